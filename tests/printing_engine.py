"""An engine of benchmarks/cpu_engines.py that prints what it should not and dies where there is no model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import cpu_engines


def make(engine: str, model: str, threads: int) -> cpu_engines.Generate:
    if model == "missing":
        print("no such model", flush=True)
        sys.exit(3)
    print("{}", flush=True)
    return lambda prompts, lengths: [[0] * length for length in lengths]


cpu_engines.make = make
cpu_engines.main()
