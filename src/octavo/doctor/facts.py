"""What `octavo doctor` knows of a machine: plain values, from which its checks follow without looking again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.findings.finding import Level


@dataclass(frozen=True, slots=True)
class Python:
    version: tuple[int, ...] = (0,)
    bits: int = 64
    executable: str = ""
    headers: bool = True
    """Whether Python.h is there, which Triton compiles with."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """What importing PyTorch, NumPy and their neighbours in a process of their own told; a fault is an error's text."""

    torch: str = ""
    torch_fault: str = ""
    torch_cuda: str = ""
    """CUDA that this build is for, as "13.0"; empty for a build for CPUs."""
    torch_gpus: int = 0
    arches: tuple[str, ...] = ()
    """What its kernels are compiled for, as "sm_90" or "compute_120"."""
    nccl: str = ""
    bfloat16: bool = False
    """Whether the CPU multiplies it."""
    numpy: str = ""
    numpy_fault: str = ""
    triton: str = ""
    triton_fault: str = ""
    """Also of one that is not installed."""
    neighbours: Mapping[str, str] = field(default_factory=dict)
    """Installed packages that are compiled against NumPy, and what importing them says against it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total: int
    used: int
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Nvidia:
    """Sizes in bytes. Without a GPU everything is empty."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    holders: tuple[str, ...] = ()
    """Programs that compute there, as "NAME (pid 123)"."""
    links: tuple[bool, ...] = ()
    """NVLinks: whether each is active."""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Cores:
    allowed: int = 1
    """Processors that the scheduler may put this process on."""
    total: int = 1
    physical: int = 1
    quota: float | None = None
    """CPUs' worth of time that the control group grants."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit."""

    open_files: int | None = None
    processes: int | None = None
    shared_memory: int | None = None
    """Bytes of /dev/shm; None where there is none."""
    available_memory: int = 0


@dataclass(frozen=True, slots=True)
class Folder:
    what: str
    path: str
    variable: str
    """That puts it elsewhere."""
    free: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    where: str = ""
    fault: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Clock:
    now: float = 0.0
    oldest: float = 0.0
    """Seconds since 1970 that cannot lie ahead: the files of this installation are from then."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Of a model: what it is, or the error and the mend."""

    says: str = ""
    fault: str = ""
    mend: str = ""
    level: Level = "error"
    """Of the fault."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str = ""
    files: Part = Part()
    tokenizer: Part = Part()
    template: Part = Part()
    config: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0
    """In 16 bits; 0 where the files are not there yet."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`failed` has what could not be found out, by the field's name, with the reason; the field is then as empty."""

    octavo: str = ""
    system: str = ""
    python: Python = Python()
    packages: tuple[str, ...] = ()
    """Requirements of Octavo that the installed packages do not meet, each a sentence without its full stop."""
    libraries: Libraries = Libraries()
    nvidia: Nvidia = Nvidia()
    programs: Mapping[str, str] = field(default_factory=dict)
    """Compilers by name, with their paths; empty where missing."""
    cores: Cores = Cores()
    limits: Limits = Limits()
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Folder, ...] = ()
    port: Port = Port()
    clock: Clock = Clock()
    model: Model | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
