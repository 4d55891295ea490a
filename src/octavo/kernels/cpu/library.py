"""Our C++ kernels for CPUs: compiled on first use for this processor, kept in the cache folder, called by address."""

import ctypes
import functools
import hashlib
import importlib
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import env

logger = logging.getLogger("octavo")

SOURCES = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-fvisibility=hidden"]
DTYPES = (torch.float32, torch.bfloat16)  # that the kernels compute in


@functools.cache
def library() -> Any | None:
    """The loaded kernels, or None where they are switched off or cannot be built; why is logged once."""
    if not env.cpu_kernels():
        logger.info("OCTAVO_CPU_KERNELS=0: PyTorch's own operators compute.")
        return None
    file = env.cache_root() / "kernels" / f"cpu-{_key()}.so"
    try:
        if not file.exists():
            _build(file)
        return ctypes.CDLL(str(file))
    except (OSError, RuntimeError, ImportError) as error:
        lines = str(error).strip().splitlines()
        logger.warning(
            "Octavo's CPU kernels could not be built, so PyTorch's slower operators compute: %s "
            "(install g++ and ninja: apt install g++ ninja-build; OCTAVO_CPU_KERNELS=0 silences this)",
            lines[0] if lines else type(error).__name__,
        )
        return None


def _build(file: Path) -> None:
    """Compile in a folder of its own and move the result, so that two processes do not disturb each other.

    Raises:
        OSError, RuntimeError, ImportError: no compiler, no ninja, or the cache folder cannot be written.
    """
    # Not at the top: it takes a second, and a library that is there already needs none of it.
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        logger.info("Compiling the CPU kernels for this processor (once, about ten seconds)")
        cpp_extension.load(
            "octavo_cpu",
            [str(SOURCES / "octavo.cpp")],
            extra_cflags=FLAGS,
            extra_ldflags=_openmp(),
            build_directory=folder,
            is_python_module=False,
        )
        os.replace(Path(folder) / "octavo_cpu.so", file)


def _openmp() -> list[str]:
    """The OpenMP runtime that torch runs on: a second one would bring a second pool of threads."""
    maps = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    loaded = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    found = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    return found[:1] or ["-fopenmp"]


def _key() -> str:
    """What a compiled library depends on: sources, flags, torch, processor."""
    parts = [torch.__version__, platform.machine(), *FLAGS, *_openmp(), _processor()]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in {".h", ".cpp"}]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Its model and the instructions it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("flags", "Features", "model name", "cpu family")))


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's first element lies."""
    return None if tensor is None else tensor.data_ptr()


class Sequences(ctypes.Structure):
    """The sequences of a step; field by field the struct of attention.h."""

    _fields_ = (
        ("count", ctypes.c_long),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_long),
    )


class Rows(ctypes.Structure):
    """The rows of a step; the struct of decoder.h. Attention alone needs no positions."""

    _fields_ = (
        ("count", ctypes.c_long),
        ("threads", ctypes.c_long),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sequences", Sequences),
    )


class Heads(ctypes.Structure):
    """The shape of attention; the struct of attention.h. Zero stands for no window and no soft-cap."""

    _fields_ = (
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("dim", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class Matrix(ctypes.Structure):
    """A weight in the kernels' order; the struct of matrix.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_long),
        ("inner", ctypes.c_long),
        ("bits", ctypes.c_long),
    )


class Layer(ctypes.Structure):
    """One block of a decoder; the struct of decoder.h."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("pre_feedforward_norm", ctypes.c_void_p),
        ("post_feedforward_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("turned", ctypes.c_long),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("window", ctypes.c_long),
    )


class Network(ctypes.Structure):
    """All blocks and the final norm; the struct of decoder.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_long),
        ("hidden", ctypes.c_long),
        ("inner", ctypes.c_long),
        ("activation", ctypes.c_long),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("heads", Heads),
    )
