"""Checks of NVIDIA GPUs. On a machine without one all of them are in order: the CPU computes."""

from octavo.core.gpus import OLDEST_CAPABILITY
from octavo.doctor.facts import Facts
from octavo.findings import gpu as texts
from octavo.findings.finding import Finding, ok, skipped
from octavo.findings.machine import gib

NO_GPU = "No NVIDIA GPU here: the CPU computes"
NOT_NEEDED = "Not needed without a GPU"
SHARE = 0.92  # of a GPU's memory that the engine takes unless told
NCCL_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def driver(facts: Facts) -> Finding:
    found = facts.nvidia
    if found.fault:
        return texts.driver_failed(found.fault)
    if not found.gpus:
        return ok(NO_GPU)
    names = sorted({gpu.name for gpu in found.gpus})
    return ok(f"{found.driver} with CUDA {found.cuda or 'unknown'}; {len(found.gpus)} x {', '.join(names)}")


def cuda(facts: Facts) -> Finding:
    """Does PyTorch see the GPUs, and is its CUDA one that the driver runs?"""
    found, libraries = facts.nvidia, facts.libraries
    if not found.gpus:
        return ok(NOT_NEEDED)
    if libraries.torch_fault:
        return skipped("Not looked at: PyTorch cannot be imported.")
    if not libraries.torch_cuda:
        return texts.torch_for_cpus(libraries.torch)
    if found.cuda and _major(found.cuda) < _major(libraries.torch_cuda):
        return texts.cuda_too_new(libraries.torch, libraries.torch_cuda, found.driver, found.cuda)
    if not libraries.torch_gpus:
        visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
        return texts.not_seen("though the driver shows one") if visible is None else texts.hidden(visible)
    return ok(f"PyTorch's {libraries.torch_cuda} runs on the driver's {found.cuda}; it sees {libraries.torch_gpus}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def kernels(facts: Facts) -> Finding:
    """Octavo's kernels need Ampere; PyTorch's must be built for the GPU, or be PTX that its driver compiles."""
    found, libraries = facts.nvidia, facts.libraries
    if not found.gpus:
        return ok(NOT_NEEDED)
    for gpu in found.gpus:
        if gpu.capability < OLDEST_CAPABILITY:
            return texts.too_old(gpu.capability, OLDEST_CAPABILITY, gpu.name)
        if libraries.arches and not any(_runs(arch, gpu.capability) for arch in libraries.arches):
            has = ", ".join(libraries.arches)
            return texts.not_built(f"{gpu.name} is sm_{gpu.capability[0]}{gpu.capability[1]}, it has {has}")
    return ok(", ".join(sorted({f"sm_{gpu.capability[0]}{gpu.capability[1]}" for gpu in found.gpus})))


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on later GPUs of its own generation, PTX (compute_) on all later ones."""
    kind, _, digits = arch.rstrip("af").partition("_")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def triton(facts: Facts) -> Finding:
    if not facts.nvidia.gpus:
        return ok(NOT_NEEDED)
    if facts.libraries.triton_fault:
        if facts.libraries.torch_fault:
            return skipped("Not looked at: PyTorch cannot be imported.")
        return texts.no_triton(facts.libraries.triton_fault)
    return ok(facts.libraries.triton)


def memory(facts: Facts) -> Finding:
    """What others hold beyond the share that is left to them anyway."""
    gpus = facts.nvidia.gpus
    if not gpus:
        return ok(NOT_NEEDED)
    for index, gpu in enumerate(gpus):
        if gpu.used > (1 - SHARE) * gpu.total:
            return texts.in_use(index, gpu.used, gpu.total, SHARE, facts.nvidia.holders)
    return ok(f"{gib(min(gpu.total - gpu.used for gpu in gpus))} free of {gib(gpus[0].total)}")


def links(facts: Facts) -> Finding:
    """NVLink, and NCCL, which talks over it."""
    found, libraries = facts.nvidia, facts.libraries
    if len(found.gpus) < 2:
        return ok("One GPU: nothing to connect" if found.gpus else NOT_NEEDED)
    for name in NCCL_SWITCHES:
        if facts.environment.get(name, "0") not in ("0", ""):
            return texts.nccl_switched(name, facts.environment[name])
    if not libraries.nccl and libraries.torch_cuda:
        return texts.no_nccl()
    if inactive := found.links.count(False):
        return texts.links_down(inactive, len(found.links))
    way = f"{len(found.links)} NVLinks" if found.links else "PCIe, without NVLink"
    return ok(f"{way}; NCCL {libraries.nccl or 'unknown'}")
