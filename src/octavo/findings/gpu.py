"""Texts about NVIDIA GPUs: driver, CUDA, kernels, memory, links."""

from collections.abc import Sequence

from octavo.findings.finding import Finding
from octavo.findings.machine import gib

CPU = "Until then --device cpu runs."


def driver_failed(detail: str) -> Finding:
    return Finding(
        "error",
        f"The NVIDIA driver does not answer: {detail.rstrip('.')}.",
        "Without it no program can use the GPU.",
        "After an update of the driver restart the machine: sudo reboot (in a container: docker run --gpus all).",
    )


def driver_too_old(detail: str) -> Finding:
    """`detail` names the versions that do not go together, as a sentence without its full stop."""
    return Finding(
        "error",
        f"The NVIDIA driver is too old for this PyTorch: {detail}.",
        "CUDA of one major version needs a driver of that version or a newer one.",
        "Update the driver, or install PyTorch for an older CUDA: "
        "pip install torch --index-url https://download.pytorch.org/whl/cu126",
    )


def cuda_too_new(torch: str, cuda: str, driver: str, driver_cuda: str) -> Finding:
    return driver_too_old(f"PyTorch {torch} was built for CUDA {cuda}, driver {driver} has CUDA {driver_cuda}")


def no_driver() -> Finding:
    return Finding(
        "error",
        "No NVIDIA driver was found on this machine.",
        "A GPU is used through it.",
        "Install it and see nvidia-smi (in a container: docker run --gpus all). " + CPU,
    )


def torch_for_cpus(version: str = "") -> Finding:
    name = f"PyTorch {version}" if version else "PyTorch"
    return Finding(
        "error",
        f"This build of {name} is for CPUs only.",
        "The GPU stays idle, and the CPU computes everything.",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
    )


def hidden(value: str) -> Finding:
    return Finding(
        "warning",
        f"CUDA_VISIBLE_DEVICES={value!r} hides the GPUs of this machine.",
        "PyTorch sees none of them, and the CPU computes everything.",
        "unset CUDA_VISIBLE_DEVICES",
    )


BUILT_FOR_CPUS = "this build of torch is for CPUs only"


def not_seen(detail: str) -> Finding:
    why = f" ({detail.rstrip('.')})" if detail else ""
    return Finding(
        "error",
        f"device=cuda: torch finds no NVIDIA GPU{why}.",
        "The CPU would compute everything.",
        "Leave device at auto, or see nvidia-smi and `octavo doctor`.",
    )


def too_old(capability: tuple[int, int], oldest: tuple[int, int], name: str = "") -> Finding:
    who = f"{name} has" if name else "This GPU has"
    return Finding(
        "error",
        f"{who} compute capability {capability[0]}.{capability[1]}; the kernels need {oldest[0]}.{oldest[1]} or newer.",
        "They use instructions that came with Ampere (A100, RTX 3090).",
        "Use --device cpu.",
    )


def not_built(detail: str = "") -> Finding:
    return Finding(
        "error",
        f"This build of PyTorch has no kernels for this GPU{f': {detail}' if detail else ''}.",
        "Every operator would fail with `no kernel image is available`.",
        "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130",
    )


def in_use(index: int, used: int, total: int, share: float, holders: Sequence[str]) -> Finding:
    """`share` of the GPU's memory is what Octavo takes by default; `holders` are processes, as "NAME (pid 123)"."""
    by = f" by {', '.join(holders)}" if holders else ""
    left = max(0.05, int((total - used) / total * 100) / 100 - 0.01)
    return Finding(
        "warning",
        f"{gib(used)} of {gib(total)} of GPU {index} are in use{by}.",
        f"Octavo takes {share:.0%} of a GPU unless told; with less, the KV cache is smaller or does not fit.",
        f"End those processes, or start with --gpu-memory-utilization {left:.2f}",
    )


def no_memory(detail: str = "") -> Finding:
    return Finding(
        "error",
        f"The memory of the GPU is used up{f' ({detail})' if detail else ''}.",
        "Weights, KV cache and activations lie in it.",
        "See nvidia-smi for other processes, lower --gpu-memory-utilization, --max-num-seqs or "
        "--max-num-batched-tokens; `octavo plan MODEL` says what fits.",
    )


def does_not_fit(needed: int, allowed: int, missing: int, name: str) -> Finding:
    """Bytes: all that must lie on the GPU, what the engine may take of it, what is missing."""
    return Finding(
        "error",
        f"The model needs {gib(needed)} on {name}, of which Octavo may take {gib(allowed)}: {gib(missing)} too much.",
        "Weights, work space and the KV cache of one sequence must fit together.",
        "`octavo plan MODEL` lists GPUs and quantizations that fit; or lower --max-model-len and --max-num-seqs.",
    )


def links_down(inactive: int, links: int) -> Finding:
    return Finding(
        "warning",
        f"{inactive} of {links} NVLinks are inactive.",
        "What passes between GPUs takes the way over PCIe, several times slower.",
        "nvidia-smi nvlink --status; then restart nvidia-fabricmanager: sudo systemctl restart nvidia-fabricmanager",
    )


def no_nccl() -> Finding:
    return Finding(
        "error",
        "This build of PyTorch has no NCCL, and there are several GPUs.",
        "GPUs that share a model talk through it.",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
    )


def nccl_failed(detail: str) -> Finding:
    return Finding(
        "error",
        f"The GPUs cannot talk to each other: {detail.rstrip('.')}.",
        "NCCL needs shared memory, and peers that see each other.",
        "Start again with NCCL_DEBUG=INFO, whose lines name the cause, and run `octavo doctor`.",
    )


def nccl_switched(variable: str, value: str) -> Finding:
    return Finding(
        "warning",
        f"{variable}={value} switches a way between the GPUs off.",
        "NCCL then copies through the host's memory, several times slower.",
        f"unset {variable}",
    )


def no_triton(detail: str) -> Finding:
    return Finding(
        "error",
        f"Triton cannot be imported: {detail.rstrip('.')}.",
        "The kernels for GPUs are written in it.",
        "pip install --force-reinstall triton",
    )


def no_compiler(what: str) -> Finding:
    return Finding(
        "error",
        f"There is no {what}.",
        "Triton compiles the launcher of each kernel with it.",
        "sudo apt-get install gcc python3-dev",
    )
