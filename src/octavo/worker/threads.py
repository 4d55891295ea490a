"""How many threads compute on a CPU, and where they run."""

import ctypes
import logging
import os
import re
from dataclasses import dataclass

import torch

from octavo.errors import InvalidConfig, shown
from octavo.kernels.cpu.library import library
from octavo.worker import machine

logger = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class Threads:
    """`count` threads; each on its own of `cpus` where `pinned`, else the system places them there."""

    count: int
    cpus: tuple[int, ...]
    pinned: bool


def choose_threads(num_threads: int | None, cpu_bind: str) -> Threads:
    """What the options say; where they do not, a thread a physical core of those that this process may use.

    Raises:
        InvalidConfig: a CPU that this process may not use, fewer CPUs than threads, or no list of CPUs.
    """
    allowed = machine.allowed_cpus()
    if cpu_bind in ("auto", "none"):
        cores = machine.one_cpu_a_core()
        count = num_threads or machine.usable_cores()
        if cpu_bind == "auto" and count == len(cores) > 1:
            return Threads(count, tuple(cores), True)
        return Threads(count, tuple(allowed), False)
    cpus = parse_cpus(cpu_bind)
    if absent := [cpu for cpu in cpus if cpu not in allowed]:
        raise InvalidConfig(
            f"cpu_bind={cpu_bind} names CPU {absent[0]}, and this process may use {listed(allowed)}.",
            "Name CPUs of those, or leave cpu_bind at auto.",
        )
    if num_threads is not None and num_threads > len(cpus):
        raise InvalidConfig(
            f"num_threads={num_threads} is more than the {len(cpus)} CPUs of cpu_bind={cpu_bind}.",
            "Name a CPU for each thread, or leave num_threads away.",
        )
    return Threads(num_threads or len(cpus), cpus, True)


def place(threads: Threads) -> None:
    """Let torch and our kernels compute with them; pinning needs the kernels, and is left out with a warning."""
    torch.set_num_threads(threads.count)
    if (loaded := library()) is None:
        if threads.pinned and threads.count > 1:
            logger.warning("The threads are not pinned: that needs the CPU kernels.")
        return
    if hasattr(os, "sched_setaffinity") and set(threads.cpus) < set(machine.allowed_cpus()):
        os.sched_setaffinity(0, threads.cpus)
    loaded.octavo_bind(
        (ctypes.c_int * len(threads.cpus))(*threads.cpus), ctypes.c_long(len(threads.cpus)), int(threads.pinned)
    )
    where = f"pinned to CPUs {listed(threads.cpus)}" if threads.pinned else "placed by the system"
    logger.info("%d threads compute, %s", threads.count, where)


def parse_cpus(text: str) -> tuple[int, ...]:
    """0-3,8 -> (0, 1, 2, 3, 8).

    Raises:
        InvalidConfig: anything else, or a CPU twice.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        number = re.compile("[0-9]{1,4}").fullmatch
        if not number(first) or (dash and not number(last)) or int(last or first) < int(first):
            raise InvalidConfig(f"cpu_bind={shown(text)} is not allowed: it must be auto, none, or CPUs such as 0-3,8.")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) < len(found):
        raise InvalidConfig(f"cpu_bind={shown(text)} names a CPU twice.")
    return tuple(found)


def listed(cpus: tuple[int, ...] | list[int]) -> str:
    """(0, 1, 2, 3, 8) -> 0-3,8."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
