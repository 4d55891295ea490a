"""Compiled grammars, kept by content. A few threads of low priority make them, so that nobody else waits."""

import contextlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from octavo.errors import InvalidRequest
from octavo.grammar.base import Backend, name_of
from octavo.structured_outputs import FIELD, StructuredOutputsParams

MAX_KEPT = 256  # grammars
MAX_KEPT_LENGTH = 8 << 20  # characters of their sources
NUM_THREADS = 2
SECONDS = 10.0  # that a compilation may take, waiting for a thread included
NICE = 10


class Grammars:
    """Compiles for any number of callers; the same content is compiled once at a time."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, Future[Any]] = OrderedDict()
        self._length = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", _step_back)

    def submit(self, params: StructuredOutputsParams) -> "Future[Any]":
        """The grammar, or the `InvalidRequest` that refuses it; refusals are not kept."""
        with self._lock:
            found = self._kept.get(params)
            if found is not None and not (found.done() and found.exception() is not None):
                self._kept.move_to_end(params)
                return found
            if found is None:
                self._length += len(params.text)
            made = self._kept[params] = self._threads.submit(self.backend.compile, params)
            while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._length > MAX_KEPT_LENGTH):
                dropped, _ = self._kept.popitem(last=False)
                self._length -= len(dropped.text)
            return made

    def compile(self, params: StructuredOutputsParams) -> Any:
        """The same, waited for.

        Raises:
            InvalidRequest: it cannot be followed, or takes too long.
        """
        try:
            return self.submit(params).result(SECONDS)
        except TimeoutError:
            raise too_slow(params) from None

    def warm(self) -> None:
        """Read the vocabulary and fill a first mask, so that no request waits for that; up to a second or two.

        A vocabulary that cannot write an object (no brace in it) is no fault: requests that want one are refused.
        """
        with contextlib.suppress(InvalidRequest):
            self.compile(StructuredOutputsParams(json_object=True))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def too_slow(params: StructuredOutputsParams) -> InvalidRequest:
    return InvalidRequest(f"{name_of(params)}: compiling it takes longer than {SECONDS:g} seconds.", param=FIELD)


def _step_back() -> None:
    with contextlib.suppress(AttributeError, OSError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
