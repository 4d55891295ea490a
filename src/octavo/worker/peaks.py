"""What this very machine reaches: bytes/s read from memory and FLOP/s of matrix products, measured once and kept."""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import env
from octavo.worker.machine import available_memory

logger = logging.getLogger("octavo")

VERSION = 1  # of the measurement; another one is measured again
MIB = 1 << 20
CPU_SIZES = (8 * MIB, 64 * MIB, 512 * MIB)  # what caches hold is read faster, and small models lie in them
GPU_SIZES = (512 * MIB,)
CPU_ROWS, GPU_ROWS = (512, 1024, 2048), (4096, 8192)
TRIES = 5
COLUMNS = 1024
GPU_CALLS = 20  # between two looks at the clock, so that launching and waiting do not count


@dataclass(frozen=True, slots=True)
class Peaks:
    """`bandwidths` are pairs of (bytes read again and again, bytes/s), smaller ones first."""

    machine: dict[str, Any]
    bandwidths: tuple[tuple[int, float], ...]
    flops: float
    measured_at: str

    def bandwidth(self, working_set: float) -> float:
        """Bytes/s of reading that many bytes in turn: as measured for the least size that is not smaller."""
        return next((rate for size, rate in self.bandwidths if size >= working_set), self.bandwidths[-1][1])


def identity(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a measurement holds for."""
    found: dict[str, Any] = {"version": VERSION, "torch": torch.__version__, "dtype": str(dtype).removeprefix("torch.")}
    if device.type == "cuda":
        return {"name": torch.cuda.get_device_name(device), "device": "cuda"} | found
    return {"name": _cpu_name(), "device": "cpu", "threads": torch.get_num_threads(), "cores": os.cpu_count()} | found


def peaks(device: torch.device, dtype: torch.dtype, *, again: bool = False) -> Peaks:
    """Those of the file in Octavo's cache, else measured now; a file that cannot be read is as good as none."""
    machine = identity(device, dtype)
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    path = env.cache_root() / "machines" / f"{digest}.json"
    if not again and (known := _read(path, machine)) is not None:
        return known
    found = measure(device, dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        part.replace(path)  # whole or not at all
    except OSError as error:
        logger.warning("What this machine reaches is measured each time: %s cannot be written (%s).", path, error)
    return found


def measure(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The best of several tries: what others do on the machine meanwhile slows down, and nothing speeds up.

    Bandwidth: a matrix of float32 times a vector, which reads each element once. FLOP/s: a square matrix product in
    the compute type, 2 n^3 operations.
    """
    logger.info("Measuring what this machine reaches, once ...")
    sizes, rows = (GPU_SIZES, GPU_ROWS) if device.type == "cuda" else (CPU_SIZES, CPU_ROWS)
    room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else available_memory() // 4
    bandwidths = tuple((size, _read_rate(size, device)) for size in sizes if size == sizes[0] or size <= room)
    fitting = [count for count in rows if count == rows[0] or 3 * count**2 * dtype.itemsize <= room]
    flops = max(_product_rate(count, device, dtype) for count in fitting)
    return Peaks(identity(device, dtype), bandwidths, flops, time.strftime("%Y-%m-%d %H:%M:%S"))


@torch.inference_mode()
def _read_rate(size: int, device: torch.device) -> float:
    if device.type == "cuda":  # a copy: half of the bytes are read, half are written
        source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return size / _seconds(lambda: target.copy_(source), device, GPU_CALLS)
    matrix = torch.zeros(size // 4 // COLUMNS, COLUMNS)
    vector, out = torch.zeros(COLUMNS), torch.empty(matrix.shape[0])
    return size / _seconds(lambda: torch.mv(matrix, vector, out=out), device, max(1, 64 * MIB // size))


@torch.inference_mode()
def _product_rate(rows: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.rand(rows, rows, device=device).to(dtype) for _ in range(2))
    calls = GPU_CALLS if device.type == "cuda" else 1
    return 2 * rows**3 / _seconds(lambda: torch.nn.functional.linear(left, right), device, calls)


def _seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Of one call, in the fastest of several rounds of so many calls."""
    found = []
    for _ in range(1 + TRIES):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - begin) / calls)
    return min(found[1:])


def _read(path: Path, machine: dict[str, Any]) -> Peaks | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = Peaks(
            dict(found["machine"]),
            tuple((int(size), float(rate)) for size, rate in found["bandwidths"]),
            float(found["flops"]),
            str(found["measured_at"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    whole = known.bandwidths and all(rate > 0 for _, rate in known.bandwidths) and known.flops > 0
    return known if whole and known.machine == machine else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
