"""GPUs that plans are made for: datasheet figures, and the shares of them that Octavo reached on an H200."""

from dataclasses import dataclass

from octavo.core.cost import Machine
from octavo.core.memory import GIB

OLDEST_CAPABILITY = (8, 0)  # that the kernels are compiled and tested for

# Measured on one H200 (docs/performance.md) against its datasheet's 4.8 TB/s and 989 TFLOP/s: `Machine` fitted to
# decode steps of 1, 32 and 256 sequences of three models and to prompts of 128 to 8,192 tokens of two.
BANDWIDTH_SHARE = 0.883
CACHE_SHARE = 0.61
FLOPS_SHARE = 0.758
ATTENTION_SHARE = 0.28
FEW_SECONDS = 15.3e-6
MANY_SECONDS = 26.8e-6
STEP_SECONDS = 63e-6
FIRST_SECONDS = 0.75e-3


@dataclass(frozen=True, slots=True)
class Datasheet:
    """GB/s of memory, TFLOP/s of dense bfloat16 products with float32 sums, GiB that the driver shows as total."""

    gib: float
    gb_per_second: float
    tflops: float


GPUS = {
    "RTX 3090": Datasheet(23.6, 936, 71),
    "RTX 4070S": Datasheet(11.6, 504, 71),
    "RTX 4090": Datasheet(23.5, 1008, 165),
    "RTX 5090": Datasheet(31.4, 1792, 210),
    "L4": Datasheet(22.0, 300, 121),
    "A10G": Datasheet(22.0, 600, 70),
    "L40S": Datasheet(44.4, 864, 362),
    "A100 40GB": Datasheet(39.4, 1555, 312),
    "A100 80GB": Datasheet(79.2, 2039, 312),
    "H100": Datasheet(79.1, 3350, 989),
    "H200": Datasheet(139.8, 4800, 989),
    "B200": Datasheet(178.3, 8000, 2250),
}
MEASURED = "H200"


def machine(name: str, sheet: Datasheet) -> Machine:
    """What Octavo is expected to reach on a GPU of these figures."""
    bandwidth, flops = sheet.gb_per_second * 1e9, sheet.tflops * 1e12
    return Machine(
        name=name,
        memory_bytes=int(sheet.gib * GIB),
        bandwidth=BANDWIDTH_SHARE * bandwidth,
        cache_bandwidth=CACHE_SHARE * bandwidth,
        flops=FLOPS_SHARE * flops,
        attention_flops=ATTENTION_SHARE * flops,
        few_seconds=FEW_SECONDS,
        many_seconds=MANY_SECONDS,
        step_seconds=STEP_SECONDS,
        first_seconds=FIRST_SECONDS,
    )
