"""What nvidia-smi tells about GPUs, their driver, who uses them, and the links between them."""

import contextlib
import re
import shutil
from pathlib import Path

from octavo.doctor.facts import Gpu, Nvidia
from octavo.doctor.probe import ProbeFailed, ask

SECONDS = 15.0  # without its daemon the driver takes some seconds for each GPU
MIB = 1 << 20


def look() -> Nvidia:
    """
    Raises:
        ProbeFailed: it hangs, or says what nobody expects.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        if Path("/proc/driver/nvidia/version").exists() and Path("/dev/nvidiactl").exists():
            raise ProbeFailed("there is an NVIDIA driver and no nvidia-smi (in a container: docker run --gpus all)")
        return Nvidia()
    status, out, told = ask(
        [
            program,
            "--query-gpu=name,memory.total,memory.used,compute_cap,driver_version",
            "--format=csv,noheader,nounits",
        ],
        SECONDS,
    )
    if status:
        said = (out.strip() or told.strip()).splitlines()
        text = said[0] if said else f"nvidia-smi ended with status {status}"
        return Nvidia() if "No devices were found" in text else Nvidia(fault=text)
    gpus, driver = [], ""
    for line in out.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        try:
            name, total, used, capability, driver = fields
            major, _, minor = capability.partition(".")
            gpus.append(Gpu(name, int(total) * MIB, int(used) * MIB, (int(major), int(minor))))
        except ValueError:
            raise ProbeFailed(f"nvidia-smi said {line[:100]!r}") from None
    return Nvidia(driver, _cuda(program), tuple(gpus), _holders(program), _links(program) if len(gpus) > 1 else ())


def _cuda(program: str) -> str:
    """The newest CUDA that the driver runs."""
    _, out, _ = ask([program], SECONDS)
    found = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", out)
    return found[1] if found else ""


def _holders(program: str) -> tuple[str, ...]:
    with contextlib.suppress(ProbeFailed):
        status, out, _ = ask([program, "--query-compute-apps=process_name,pid", "--format=csv,noheader"], SECONDS)
        pairs = [line.rsplit(",", 1) for line in out.strip().splitlines() if "," in line]
        if not status:
            return tuple(f"{Path(name.strip()).name} (pid {pid.strip()})" for name, pid in pairs)
    return ()


def _links(program: str) -> tuple[bool, ...]:
    with contextlib.suppress(ProbeFailed):
        status, out, _ = ask([program, "nvlink", "--status"], SECONDS)
        if not status:
            return tuple("inactive" not in line for line in out.splitlines() if re.match(r"\s*Link \d+:", line))
    return ()
