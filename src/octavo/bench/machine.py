"""`octavo bench machine`: what this machine reaches, measured now and kept for the rooflines of other benchmarks."""

from pathlib import Path
from typing import Literal

import torch

from octavo.bench import results
from octavo.bench.roofline import threads_of
from octavo.errors import InvalidConfig
from octavo.findings.gpu import not_seen
from octavo.worker import machine as here
from octavo.worker.peaks import peaks


def machine(
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    num_threads: int | None = None,
    output_json: Path | None = None,
) -> None:
    """Measure the bandwidth of this machine's memory and its matrix products, in a few seconds.

    Benchmarks measure this once by themselves and keep it; this command measures again, after a change of the machine
    or at a quieter moment.

    Parameters
    ----------
    device
        auto takes a GPU where there is one.
    dtype
        Type of the products; auto is bfloat16 where the device multiplies it, else float32.
    num_threads
        Threads of a CPU; its physical cores when not given.
    output_json
        File for the result.
    """
    if num_threads is not None and num_threads < 1:
        raise InvalidConfig(f"num_threads={num_threads} is not allowed: it must be from 1.")
    if device == "cuda" and not torch.cuda.is_available():
        raise not_seen("").as_error()
    chosen = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    if chosen.type == "cpu":
        torch.set_num_threads(num_threads or here.usable_cores())
    usual = torch.bfloat16 if chosen.type == "cuda" else here.fast_dtype()
    kind = usual if dtype == "auto" else here.choose_dtype(dtype, None)
    found = peaks(chosen, kind, again=True)
    print(f"{found.machine['name']}{threads_of(found.machine)}, torch {found.machine['torch']}")
    for size, rate in found.bandwidths:
        print(f"Reading {size >> 20:>5,} MiB again and again: {rate / 1e9:10,.1f} GB/s")
    print(f"Products in {found.machine['dtype'] + ':':<25} {found.flops / 1e9:10,.0f} GFLOP/s")
    if output_json:
        record = {"machine": found.machine, "bandwidths": found.bandwidths, "flops": found.flops}
        results.write_json(output_json, record | {"date": results.now()} | results.environment())
