"""Compiling ahead: all kernels that serving can reach, in parallel; and noticing those that come later."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from octavo.worker import compilations

logger = logging.getLogger("octavo")

compiled_late: list[str] = []  # names of kernels compiled after `watch`


def compile_all(launches: Iterable[Callable[[], None]]) -> int:
    """Compile what these launches need, without running our kernels; returns the number of variants.

    Threads are enough: the compiler's passes and the assembler run outside of Python.
    """
    with ThreadPoolExecutor(max(2, min(32, os.cpu_count() or 1))) as pool:
        with triton.AsyncCompileMode(pool) as mode, _compiling_only():
            for launch in launches:
                launch()
        compilations.counts["startup"] += len(mode.future_kernels)
        return len(mode.future_kernels)


@contextmanager
def _compiling_only() -> Iterator[None]:
    """Let kernel[grid](...) compile and not launch."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **keywords)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def unwatch() -> None:
    """An engine starts, perhaps beside one that serves."""
    triton.knobs.runtime.jit_post_compile_hook = None


def watch() -> None:
    """From now on a compilation is a fault: it stops the engine for a second or so. It is logged and counted."""
    triton.knobs.runtime.jit_post_compile_hook = _late


def _late(*, fn: Any, **_: Any) -> None:
    name = getattr(fn, "name", str(fn))
    compiled_late.append(name)
    compilations.counts["serving"] += 1
    logger.warning("Kernel %s was compiled while serving; it should have been compiled at start.", name)
