"""Texts about the host: memory, files, ports, processors, the clock."""

from octavo.findings.finding import Finding

GIB = 1024**3


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"


OTHER_PORT = "Stop what is there, or choose another with --port."
HIGH_PORT = "Choose a port from 1024 with --port; lower ones are root's."
OTHER_HOST = "Give an address of this machine with --host: 127.0.0.1 for itself, 0.0.0.0 for all."
OTHER_PATH = "Give --uds a short path in a folder that exists, where nothing else listens."


def cannot_listen(where: str, reason: str, holder: str = "", mend: str = OTHER_PORT) -> Finding:
    """`holder` is the process that listens there, as "NAME (pid 123)", where it can be seen."""
    by = f", by {holder}" if holder else ""
    return Finding(
        "error",
        f"Cannot listen on {where}: {reason}{by}.",
        "The server could not answer anybody.",
        mend,
    )


def no_memory(detail: str = "") -> Finding:
    return Finding(
        "error",
        f"The machine's memory is used up{f' ({detail})' if detail else ''}.",
        "Weights, KV cache and activations lie in it on a CPU, and weights pass through it on the way to a GPU.",
        "Lower --kv-cache-memory-bytes or --max-model-len, take a smaller model, or raise the container's limit; "
        "`octavo doctor MODEL` compares.",
    )


def weights_too_large(needed: int, free: int, shape: str = "") -> Finding:
    """Bytes that the weights take, and bytes that are available. `shape` says which of the model's sizes make them."""
    of = f" as {shape}" if shape else ""
    return Finding(
        "error",
        f"The weights take {needed / GIB:,.2f} GiB{of}, and {free / GIB:,.2f} GiB of memory are available.",
        "A system that lends memory freely would end the process in the middle of the start.",
        "Run a smaller model, or mend config.json.",
    )


def little_memory(available: int, needed: int, what: str) -> Finding:
    return Finding(
        "warning",
        f"{gib(available)} of memory are available; {what} wants {gib(needed)}.",
        "A system without memory swaps, or ends the largest process, which is the engine.",
        "End other programs, raise the container's limit (docker run --memory), or take a smaller model.",
    )


def killed() -> Finding:
    """A process ended by SIGKILL, which nobody of Octavo sends at a start."""
    return Finding(
        "error",
        "It was not Octavo: most often the system ran out of memory.",
        "The kernel ends the largest process when memory is used up.",
        "See `dmesg | grep -i oom`, lower --kv-cache-memory-bytes, and run `octavo doctor MODEL`.",
    )


def illegal_instruction() -> Finding:
    return Finding(
        "error",
        "The processor lacks an instruction that a compiled library uses.",
        "Libraries that were compiled on another processor, in a shared cache folder for example, stop so.",
        "Try OCTAVO_CPU_KERNELS=0, and remove the folder kernels in Octavo's cache.",
    )


def bus_error() -> Finding:
    return Finding(
        "error",
        "A file that lay in memory became shorter, or shared memory is full.",
        "A model file that is replaced while it is read, and a full /dev/shm, stop a process so.",
        "Fetch the model again, and see `df -h /dev/shm`.",
    )


def too_few_files(limit: int | None, needed: int = 4096) -> Finding:
    """`limit` is the soft limit of open files; None where it was met, not read."""
    has = "The limit of open files is used up" if limit is None else f"At most {limit:,} files may be open"
    return Finding(
        "error" if limit is None or limit < 64 else "warning",
        f"{has}.",
        "Each connection of a client is an open file; past the limit new clients are refused.",
        f"ulimit -n {needed} (in a service: LimitNOFILE={needed}).",
    )


def too_few_processes(limit: int | None, needed: int = 1024) -> Finding:
    """`limit` counts processes and threads; None where it was met, not read."""
    has = "No further thread can be started" if limit is None else f"At most {limit:,} processes and threads may run"
    return Finding(
        "error" if limit is None else "warning",
        f"{has}.",
        "The engine, the API processes and their libraries start some dozens of threads for each core.",
        f"ulimit -u {needed} (in a container: --pids-limit {needed}).",
    )


def small_shared_memory(total: int | None, needed: int) -> Finding:
    has = "There is no /dev/shm" if total is None else f"/dev/shm has {gib(total)}, and {gib(needed)} are needed"
    return Finding(
        "warning",
        f"{has}.",
        "Processes pass tensors and semaphores through it; NCCL hangs or stops with a bus error where it is full.",
        f"docker run --shm-size={max(1, needed // GIB)}g (or --ipc=host).",
    )


def shared_memory_full(detail: str) -> Finding:
    return Finding(
        "error",
        f"Shared memory (/dev/shm) is used up: {detail.rstrip('.')}.",
        "Processes pass tensors and semaphores through it.",
        "docker run --shm-size=1g (or --ipc=host); what lies there already: ls -l /dev/shm",
    )


def no_permission(path: str, reason: str) -> Finding:
    return Finding(
        "error",
        f"{path or 'A file'} cannot be read or written: {reason}.",
        "Models are read from caches, and what is downloaded or compiled is kept there.",
        "Give this user the right to it, or set OCTAVO_CACHE_ROOT and HF_HOME to folders of its own.",
    )


def disk_full(place: str) -> Finding:
    return Finding(
        "error",
        f"There is no space left{f' in {place}' if place else ' on the disk'}.",
        "Downloads, compiled kernels and batches are written there.",
        "Remove what is not needed (`du -sh ~/.cache/*`), or set OCTAVO_CACHE_ROOT and HF_HOME to a larger disk.",
    )


def little_space(what: str, path: str, free: int, needed: int) -> Finding:
    return Finding(
        "warning",
        f"{what} ({path}) has {gib(free)} of free space.",
        f"A model takes more: {gib(needed)} is the least to start with.",
        "Remove what is not needed (`du -sh ~/.cache/*`), or set OCTAVO_CACHE_ROOT and HF_HOME to a larger disk.",
    )


def not_writable(what: str, path: str, reason: str, variable: str) -> Finding:
    return Finding(
        "error",
        f"{what} ({path}) cannot be written: {reason}.",
        "Downloads, converted tokenizers and compiled kernels are kept there.",
        f"export {variable}=/a/folder/you/may/write",
    )


def few_cores(cores: int, gpus: int) -> Finding:
    return Finding(
        "warning",
        f"{cores} CPU cores for {gpus} GPU{'s' if gpus > 1 else ''}; there should be 8 for each.",
        "Scheduler, API processes and tokenization need the processor between two steps of the GPU.",
        f"Give the container or job more: docker run --cpus={8 * gpus}, or Slurm's --cpus-per-gpu=8.",
    )


def share_of_a_core(quota: float) -> Finding:
    """`quota` CPUs, fewer than one, are what the control group grants."""
    return Finding(
        "warning",
        f"The container may use {quota:g} of one CPU.",
        "When the share is spent everything stands still for the rest of each tenth of a second.",
        "Raise the share: docker run --cpus=2, or the CPU limit of the pod.",
    )


def too_many_threads(variable: str, value: str, cores: int) -> Finding:
    return Finding(
        "warning",
        f"{variable}={value}, and this process may use {cores} core{'s' if cores != 1 else ''}.",
        "Threads that share a core wait for each other at the end of every operator.",
        f"export {variable}={cores}",
    )


def no_number(variable: str, value: str) -> Finding:
    return Finding(
        "warning",
        f"{variable}={value} is no number of threads.",
        "Libraries ignore it, each in its own way.",
        f"unset {variable}",
    )


def wrong_clock(now: str) -> Finding:
    return Finding(
        "error",
        f"The clock says {now}, before Octavo was installed.",
        "Certificates look not yet valid, so downloads fail; logs and batches carry wrong times.",
        "sudo timedatectl set-ntp true",
    )


def slow_clock(source: str) -> Finding:
    return Finding(
        "warning",
        f"The kernel reads the time from {source}.",
        "It takes a microsecond and more, and every step and every token reads the time.",
        "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource",
    )
