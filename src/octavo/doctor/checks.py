"""The checks of `octavo doctor`: each reads the facts and gives one finding; nothing here looks at the machine."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.doctor import gpu_checks, model_checks
from octavo.doctor.facts import Facts
from octavo.findings import gpu as gpu_texts
from octavo.findings import machine, software
from octavo.findings.finding import LEVELS, Finding, Level, ok, skipped
from octavo.findings.machine import GIB, gib

OLDEST_PYTHON = (3, 11)
FILES, GPU_FILES = 512, 2048  # twice the requests that run at once
PROCESSES = 512
SHARED_MEMORY, GPU_SHARED_MEMORY = 16 << 20, 1 << 30  # the second where several GPUs talk
LEAST_SPACE = 2 * GIB
LEAST_MEMORY = 2 * GIB
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")
CORES_A_GPU = 8


@dataclass(frozen=True, slots=True)
class Check:
    """`needs` names the fields of Facts it cannot do without: one that failed is told by the first that needs it."""

    name: str
    judge: Callable[[Facts], Finding]
    needs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    check: str
    finding: Finding


def run(facts: Facts) -> list[Result]:
    """Every check, in the order of the list."""
    told: set[str] = set()
    results = []
    for check in CHECKS:
        if check.judge in model_checks.JUDGES and facts.model is None:
            continue
        lacking = [name for name in check.needs if name in facts.failed]
        if not lacking:
            results.append(Result(check.name, check.judge(facts)))
        elif lacking[0] in told:
            results.append(Result(check.name, skipped(f"Not looked at: {lacking[0]} could not be found out.")))
        else:
            told.add(lacking[0])
            results.append(Result(check.name, software.probe_failed(check.name, facts.failed[lacking[0]])))
    return results


def worst(results: list[Result]) -> Level:
    return max((result.finding.level for result in results), key=LEVELS.index, default="ok")


def python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python.version))
    if facts.python.version[:2] < OLDEST_PYTHON:
        return software.python_too_old(version)
    if facts.python.bits < 64:
        return software.python_of_32_bits()
    return ok(f"{version}, {facts.python.executable}")


def packages(facts: Facts) -> Finding:
    return software.wrong_packages(facts.packages) if facts.packages else ok("Versions are those that Octavo needs")


def numpy(facts: Facts) -> Finding:
    found = facts.libraries
    if found.numpy_fault:
        return software.numpy_broken(found.numpy_fault)
    for package, fault in found.neighbours.items():
        if fault:
            return software.numpy_mismatch(package, fault)
    names = ", ".join(found.neighbours)
    return ok(found.numpy + (f"; {names} fit{'' if len(found.neighbours) > 1 else 's'} it" if names else ""))


def torch(facts: Facts) -> Finding:
    found = facts.libraries
    if found.torch_fault and found.numpy_fault:
        return skipped("Not looked at: NumPy, which it imports, cannot be imported.")
    if found.torch_fault:
        return software.torch_broken(found.torch_fault)
    return ok(f"{found.torch}, built for {f'CUDA {found.torch_cuda}' if found.torch_cuda else 'CPUs'}")


def compiler(facts: Facts) -> Finding:
    """A GPU's kernels need a C compiler and Python's headers; the CPU's a C++ compiler and ninja."""
    programs = facts.programs
    if facts.nvidia.gpus:
        if not any(programs.get(name) for name in ("cc", "gcc", "clang")):
            return gpu_texts.no_compiler("C compiler")
        if not facts.python.headers:
            return gpu_texts.no_compiler("Python.h")
        return ok(next(path for name in ("cc", "gcc", "clang") if (path := programs.get(name))))
    if facts.environment.get("OCTAVO_CPU_KERNELS", "").strip() == "0":
        return ok("Not needed: OCTAVO_CPU_KERNELS=0")
    missing = [name for name in ("g++", "ninja") if not programs.get(name)]
    return software.no_compiler(" and no ".join(missing)) if missing else ok(f"{programs['g++']}, {programs['ninja']}")


def cores(facts: Facts) -> Finding:
    found, gpus = facts.cores, len(facts.nvidia.gpus)
    usable = min(found.allowed, int(found.quota) if found.quota and found.quota >= 1 else found.allowed)
    if gpus and usable < CORES_A_GPU * gpus:
        return machine.few_cores(usable, gpus)
    pinned = f", pinned to {found.allowed} of {found.total}" if found.allowed < found.total else ""
    return ok(f"{found.physical} cores ({found.allowed} hardware threads{pinned})")


def threads(facts: Facts) -> Finding:
    found = facts.cores
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        value = facts.environment.get(name, "").strip()
        if not value:
            continue
        if not re.fullmatch(r"\d+(,\d+)*", value):
            return machine.no_number(name, value)
        if int(value.split(",")[0]) > found.allowed:
            return machine.too_many_threads(name, value, found.allowed)
    if found.quota is not None and found.quota < 1:
        return machine.share_of_a_core(found.quota)
    if found.quota is not None and found.quota < found.physical:
        return ok(f"{int(found.quota)} would compute, the container's share of {found.physical} cores")
    return ok(f"{found.physical} would compute, each pinned to a core of its own")


def memory(facts: Facts) -> Finding:
    available = facts.limits.available_memory
    if available < LEAST_MEMORY:
        return machine.little_memory(available, LEAST_MEMORY, "a start")
    return ok(f"{gib(available)} available")


def shared_memory(facts: Facts) -> Finding:
    total = facts.limits.shared_memory
    needed = GPU_SHARED_MEMORY if len(facts.nvidia.gpus) > 1 else SHARED_MEMORY
    if total is None or total < needed:
        return machine.small_shared_memory(total, needed)
    return ok(f"/dev/shm has {gib(total)}")


def open_files(facts: Facts) -> Finding:
    limit, needed = facts.limits.open_files, GPU_FILES if facts.nvidia.gpus else FILES
    if limit is not None and limit < needed:
        return machine.too_few_files(limit)
    return ok(f"{limit:,} may be open" if limit is not None else "No limit")


def processes(facts: Facts) -> Finding:
    limit = facts.limits.processes
    if limit is not None and limit < PROCESSES:
        return machine.too_few_processes(limit)
    return ok(f"{limit:,} processes and threads may run" if limit is not None else "No limit")


def disk(facts: Facts) -> Finding:
    """Folders may share a disk: the first that is at fault speaks."""
    for folder in facts.folders:
        if folder.fault:
            return machine.not_writable(folder.what, folder.path, folder.fault, folder.variable)
    for folder in facts.folders:
        if folder.free < LEAST_SPACE and folder.variable != "TMPDIR":
            return machine.little_space(folder.what, folder.path, folder.free, LEAST_SPACE)
    least = min(facts.folders, key=lambda folder: folder.free)
    return ok(f"Caches can be written; {gib(least.free)} free")


def port(facts: Facts) -> Finding:
    found = facts.port
    if found.fault:
        known = machine.cannot_listen(found.where, "")
        return Finding("error", found.fault, known.why, found.mend or known.mend)
    return ok(f"{found.where} is free".capitalize())


def clock(facts: Facts) -> Finding:
    found = facts.clock
    says = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.now))
    if found.now < found.oldest - 86400:
        return machine.wrong_clock(says)
    if found.source in SLOW_CLOCKS:
        return machine.slow_clock(found.source)
    return ok(says + (f", read from {found.source}" if found.source else ""))


CHECKS: tuple[Check, ...] = (
    Check("Python", python, ("python",)),
    Check("Packages", packages, ("packages",)),
    Check("PyTorch", torch, ("libraries",)),
    Check("NumPy", numpy, ("libraries",)),
    Check("NVIDIA driver", gpu_checks.driver, ("nvidia",)),
    Check("CUDA", gpu_checks.cuda, ("nvidia", "libraries", "environment")),
    Check("GPU kernels", gpu_checks.kernels, ("nvidia", "libraries")),
    Check("Triton", gpu_checks.triton, ("libraries", "nvidia")),
    Check("GPU memory", gpu_checks.memory, ("nvidia",)),
    Check("GPU links", gpu_checks.links, ("nvidia", "libraries", "environment")),
    Check("Compiler", compiler, ("programs", "nvidia", "python", "environment")),
    Check("CPU cores", cores, ("cores", "nvidia")),
    Check("CPU threads", threads, ("cores", "nvidia", "environment")),
    Check("Memory", memory, ("limits",)),
    Check("Shared memory", shared_memory, ("limits", "nvidia")),
    Check("Open files", open_files, ("limits", "nvidia")),
    Check("Processes", processes, ("limits",)),
    Check("Disk", disk, ("folders",)),
    Check("Port", port, ("port",)),
    Check("Clock", clock, ("clock",)),
    Check("Settings", model_checks.settings, ("environment",)),
    Check("Hugging Face", model_checks.hub, ("environment",)),
    Check("Model", model_checks.files, ("model",)),
    Check("Tokenizer", model_checks.tokenizer, ("model",)),
    Check("Chat template", model_checks.template, ("model",)),
    Check("Model's memory", model_checks.fits, ("model", "nvidia", "limits", "libraries")),
)
