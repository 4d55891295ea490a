"""What this machine can give: memory, cores, number types."""

import os
import resource
from pathlib import Path

import torch

from octavo.errors import InvalidConfig

CPU_CACHE_LIMIT = 4 * 1024**3
CPU_CACHE_SHARE = 0.4


def available_memory() -> int:
    """Bytes this process may still take: the least of the host's, the control group's and the ulimit's."""
    limits = [_meminfo("MemAvailable"), _control_group(), _address_space()]
    return min(limit for limit in limits if limit is not None)


def cpu_cache_bytes() -> int:
    """KV cache of a CPU engine that was not told a size."""
    return min(CPU_CACHE_LIMIT, int(available_memory() * CPU_CACHE_SHARE))


def _meminfo(name: str) -> int | None:
    return _first_number("/proc/meminfo", name + ":", scale=1024)


def _control_group() -> int | None:
    """What a container's limit leaves, for version 2 and 1 of control groups."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def _address_space() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _first_number("/proc/self/status", "VmSize:", scale=1024)
    return None if soft == resource.RLIM_INFINITY or used is None else max(0, soft - used)


def _first_number(path: str, label: str, scale: int) -> int | None:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(label):
                return int(line.split()[1]) * scale
    except OSError:
        pass
    return None


def allowed_cpus() -> list[int]:
    """Numbers of the CPUs that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def one_cpu_a_core() -> list[int]:
    """Of the CPUs that this process may use, the first of each core: two hardware threads of one core count once."""
    found: dict[str, int] = {}
    for cpu in allowed_cpus():
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        found.setdefault(core, cpu)
    return list(found.values())


def physical_cores() -> int:
    """Cores this process may use, two hardware threads of one core counted once."""
    return len(one_cpu_a_core())


def usable_cores() -> int:
    """Physical cores, or fewer where the container may use less CPU time: when it is spent, all threads stand still."""
    quota = _quota()
    return physical_cores() if quota is None else max(1, min(physical_cores(), int(quota)))


def _quota() -> float | None:
    """CPUs that a container may use at once, for version 2 and 1 of control groups."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join(Path("/sys/fs/cgroup", name).read_text() for name in names).split()
            quota = int(words[0]) / int(words[1])
        except (OSError, ValueError, IndexError, ZeroDivisionError):  # no such file, or "max"
            continue
        return quota if quota > 0 else None
    return None


def fast_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it, else float32."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if supported else torch.float32


def choose_dtype(wanted: str, checkpoint: str | None) -> torch.dtype:
    """The compute type: as asked, else bfloat16 for half-precision checkpoints where the CPU has it."""
    if wanted != "auto":
        return _dtype(wanted)
    return torch.float32 if checkpoint == "float32" else fast_dtype()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidConfig(f"dtype={name!r} is not allowed: it must be bfloat16, float16 or float32.")
    return dtype


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    return _first_number("/proc/self/status", "VmRSS:", scale=1024) or 0
