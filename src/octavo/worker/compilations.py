"""How many kernels were compiled, at the start and, a fault, while serving; counted for the metrics. No torch."""

counts = {"startup": 0, "serving": 0}
