"""The environment variables that Octavo reads; nothing else of it looks at `os.environ`."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def _text(name: str) -> str | None:
    """A variable set to nothing counts as not set."""
    return os.environ.get(name, "").strip() or None


OWN = ("OCTAVO_API_KEY", "OCTAVO_CACHE_ROOT", "OCTAVO_CONFIGURE_LOGGING", "OCTAVO_CPU_KERNELS", "OCTAVO_LOGGING_LEVEL")
"""All variables of Octavo's own."""


def everything() -> dict[str, str]:
    """All variables, for a report about this machine."""
    return dict(os.environ)


def cache_root() -> Path:
    """Where pulled models and converted tokenizers are kept; it may not exist yet."""
    if own := _text("OCTAVO_CACHE_ROOT"):
        return Path(own).expanduser()
    base = _text("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else _home() / ".cache") / "octavo"


def logging_level() -> str:
    return (_text("OCTAVO_LOGGING_LEVEL") or "INFO").upper()


def configures_logging() -> bool:
    """`OCTAVO_CONFIGURE_LOGGING=0` leaves all logging to the program around Octavo."""
    return _text("OCTAVO_CONFIGURE_LOGGING") != "0"


def cpu_kernels() -> bool:
    """`OCTAVO_CPU_KERNELS=0` computes with PyTorch's operators instead of the C++ kernels, which need a compiler."""
    return _text("OCTAVO_CPU_KERNELS") != "0"


def colours_logging() -> bool | None:
    """What NO_COLOR and FORCE_COLOR say; None where neither is set."""
    if _text("NO_COLOR"):
        return False
    return True if _text("FORCE_COLOR") else None


def otlp_protocol() -> str:
    """grpc or http/protobuf, by the variable that OpenTelemetry defines."""
    return _text("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or _text("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"


def api_key() -> str | None:
    """The key that clients send, and that a server asks for."""
    return _text("OCTAVO_API_KEY")


def client_api_key() -> str | None:
    return api_key() or _text("OPENAI_API_KEY")


def hub_offline() -> bool:
    return (_text("HF_HUB_OFFLINE") or "").upper() in {"1", "ON", "YES", "TRUE"}


def hub_endpoint() -> str | None:
    return _text("HF_ENDPOINT")


def hub_cache() -> Path:
    """Where downloaded models lie, as huggingface_hub decides it."""
    if cache := _text("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := _text("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = _text("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else _home() / ".cache") / "huggingface" / "hub"


def quiet_profiler() -> None:
    """PyTorch's profiler writes two lines to standard error whenever it starts and stops; not below this level."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels."""
    given = _text("TRITON_CACHE_DIR")
    return Path(given).expanduser() if given else _home() / ".triton" / "cache"


def for_child(path: Iterable[str]) -> dict[str, str]:
    """The environment for a Python process that shall find the same modules at `path`, an interpreter's `sys.path`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in path)}


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user id that no password file knows: ordinary in a container
        return Path(tempfile.gettempdir())
