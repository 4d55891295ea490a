"""From the exceptions of PyTorch, the system and other libraries to the finding that says the cause and the mend."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator

from octavo.errors import OctavoError
from octavo.findings import gpu, machine, software
from octavo.findings.finding import Finding

Tell = Callable[[BaseException, str], Finding]
"""Called with the exception and its text in one line."""

NUMBERS: dict[int, Tell] = {
    errno.EMFILE: lambda error, text: machine.too_few_files(None),
    errno.ENFILE: lambda error, text: machine.too_few_files(None),
    errno.ENOMEM: lambda error, text: machine.no_memory(text),
    errno.ENOSPC: lambda error, text: machine.disk_full(_path(error)),
    errno.EDQUOT: lambda error, text: machine.disk_full(_path(error)),
    errno.EACCES: lambda error, text: machine.no_permission(_path(error), "Permission denied"),
    errno.EROFS: lambda error, text: machine.no_permission(_path(error), "Read-only file system"),
    errno.EADDRINUSE: lambda error, text: machine.cannot_listen("that port", "Address already in use"),
}
"""By the number of an OSError."""

TEXTS: tuple[tuple[str, Tell], ...] = (
    (r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation", lambda e, t: gpu.no_memory(_first(t))),
    (r"driver version is insufficient|driver on your system is too old", lambda e, t: gpu.driver_too_old(_versions(t))),
    (r"Found no NVIDIA driver|libcuda\.so\S*: cannot open", lambda e, t: gpu.no_driver()),
    (r"Torch not compiled with CUDA", lambda e, t: gpu.torch_for_cpus()),
    (r"no kernel image is available|not compatible with the current PyTorch", lambda e, t: gpu.not_built()),
    (r"No CUDA GPUs are available", lambda e, t: gpu.not_seen("CUDA_VISIBLE_DEVICES may hide it")),
    (r"NCCL error|nccl\w*Error", lambda e, t: gpu.nccl_failed(_first(t))),
    (r"Failed to find C compiler", lambda e, t: gpu.no_compiler("C compiler")),
    (r"Python\.h: No such file", lambda e, t: gpu.no_compiler("Python.h")),
    (
        r"unable to open shared memory object|shm_open|/dev/shm.*No space left|No space left.*/dev/shm",
        lambda e, t: machine.shared_memory_full(_first(t)),
    ),
    (r"can't allocate memory|Cannot allocate memory|alloc_cpu", lambda e, t: machine.no_memory(_first(t))),
    (r"Too many open files", lambda e, t: machine.too_few_files(None)),
    (r"No space left on device", lambda e, t: machine.disk_full("")),
    (r"can't start new thread|Resource temporarily unavailable", lambda e, t: machine.too_few_processes(None)),
    (
        r"numpy\.dtype size changed|compiled using NumPy 1|numpy\.core\.multiarray failed",
        lambda e, t: software.numpy_mismatch("a package", _first(t)),
    ),
    (r"numpy C-extensions failed|Error importing numpy", lambda e, t: software.numpy_broken(_first(t))),
    (r"certificate is not yet valid", lambda e, t: machine.wrong_clock("a time before certificates are valid")),
    (r"lib(torch|c10|cud|cublas|nv)\w*[\w.-]*: (cannot open|undefined)", lambda e, t: software.torch_broken(_first(t))),
    (r"\.so[\w.]*: (cannot open|undefined)", lambda e, t: software.library_missing(_first(t))),
)
"""By what the text of any exception holds; the first that is found counts."""


def explain(error: BaseException) -> Finding | None:
    """What a known exception of others means; None for one that nobody foresaw, and for Octavo's own.

    An exception that was raised because of another one is explained by that.
    """
    if isinstance(error, OctavoError):
        return None
    return _explain(error) or (explain(error.__cause__) if error.__cause__ else None)


def _explain(error: BaseException) -> Finding | None:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return machine.no_memory(text)
    if isinstance(error, OSError) and error.errno in NUMBERS:
        return NUMBERS[error.errno](error, text)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which this module does not import
        return gpu.no_memory(_first(text))
    found = next((tell(error, text) for pattern, tell in TEXTS if re.search(pattern, text)), None)
    if found is None and isinstance(error, ImportError):
        return _not_imported(error, text)
    return found


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises what is known of others' exceptions as the error that says cause and mend.

    Raises:
        InvalidConfig: an exception that `explain` knows; the exception itself is its cause.
    """
    try:
        yield
    except Exception as error:
        found = explain(error)
        if found is None:
            raise
        raise found.as_error() from error


def cause(error: BaseException) -> str:
    """The last line of a failing start: the cause and the mend, whatever the exception."""
    if isinstance(error, OctavoError):
        return str(error)
    found = explain(error)
    if found is None:
        text = " ".join(str(error).split())
        found = software.unexpected(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    return found.line


def _not_imported(error: ImportError, text: str) -> Finding | None:
    package = (error.name or "").partition(".")[0]
    if package == "triton":
        return gpu.no_triton(_first(text))
    if package in ("torch", "functorch") and not isinstance(error, ModuleNotFoundError):
        return software.torch_broken(_first(text))
    if package and package != "octavo" and isinstance(error, ModuleNotFoundError):
        return software.missing(package)
    return None


def _path(error: BaseException) -> str:
    return str(getattr(error, "filename", None) or "")


def _first(text: str) -> str:
    """The first sentence, which names the cause; what follows is advice about other things."""
    return re.split(r"(?<=[a-z)])\. ", text)[0][:200].rstrip(".")


def _versions(text: str) -> str:
    found = re.search(r"found version (\d+)", text)
    if not found:
        return _first(text)
    number = int(found[1])
    return f"it has CUDA {number // 1000}.{number % 1000 // 10}"
