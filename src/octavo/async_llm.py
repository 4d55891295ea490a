"""The engine for use inside an asyncio program: `async for output in engine.generate(...)`."""

import asyncio
import itertools
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Self

from octavo import log
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.inputs import Prompt
from octavo.errors import EngineDead, OctavoError
from octavo.types import RequestOutput, SamplingParams


class AsyncLLM:
    """A model in this process, computing in a thread of its own.

    Keywords are those of `LLM`. Close it, or use it as an async context manager. Any number of threads and
    event loops may use it; a forked child must make its own.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        log.set_up()
        self.engine = Engine(EngineConfig.from_keywords("AsyncLLM", model=model, **options))
        self._process = os.getpid()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # by request id; the thread's own, and so is the engine
        self._names = itertools.count()
        self._dead = ""  # why it stopped
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()
        # A program that ends without closing must not end in the middle of a step.
        weakref.finalize(self, _stop, self._calls, self._thread)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs as they come (`SamplingParams.output_kind`); leaving early aborts it.

        Raises:
            InvalidRequest: it can never run, or `request_id` belongs to a live request.
            EngineDead: the engine stopped; the message has the cause.
        """
        name = request_id if request_id is not None else f"async-{next(self._names)}"
        stream = _Stream(asyncio.get_running_loop())

        # A long prompt takes seconds to tokenize: neither the engine's thread nor the event loop waits for it.
        group = await asyncio.to_thread(self.engine.check, prompt, sampling_params, request_id=name, priority=priority)

        def add() -> None:
            try:
                self.engine.add(group)
            except OctavoError as error:
                stream.send(error)
            else:
                self._streams[name] = stream

        def leave() -> None:
            if self._streams.get(name) is stream:  # the name may be another request's by now
                del self._streams[name]
                self.engine.abort(name)

        self._call(add, stream)
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._calls.put(_Call(leave))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream yields a last output with finish_reason "abort". Unknown ids are ignored."""
        self._call(lambda: self._abort(request_id))

    async def reset_prefix_cache(self) -> None:
        self._call(self.engine.reset_prefix_cache)

    def _abort(self, name: str) -> None:
        if output := self.engine.abort(name):
            self._send(output)

    def _call(self, work: Callable[[], None], stream: "_Stream | None" = None) -> None:
        if os.getpid() != self._process:
            raise EngineDead("This engine belongs to the process that this one was forked from.", "Make one here.")
        self._calls.put(_Call(work, stream))
        if self._dead:  # looked at after putting, so that a thread about to end sees the call, or this sees its end
            raise EngineDead(self._dead)

    def _send(self, output: RequestOutput) -> None:
        name = output.request_id
        stream = self._streams.pop(name) if output.finished else self._streams[name]
        if not stream.send(output) and not output.finished:  # its event loop has gone, and nobody will leave
            del self._streams[name]
            self.engine.abort(name)

    def _run(self) -> None:
        try:
            while self._take_calls():
                for output in self.engine.step():
                    self._send(output)
            cause = "it was closed."
        except BaseException as error:
            cause = str(error) if isinstance(error, EngineDead) else f"{error!r}."
        self._dead = f"The engine stopped: {cause}"
        waiting = [*self._streams.values()]
        while not self._calls.empty():
            if (call := self._calls.get()) and call.stream:
                waiting.append(call.stream)
        for stream in waiting:
            stream.send(EngineDead(self._dead))

    def _take_calls(self) -> bool:
        """Do what was asked since the last step; wait while there is nothing to compute. False means close."""
        while True:
            try:
                call = self._calls.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return True
            if call is None:
                return False
            call.work()

    def close(self) -> None:
        """Stop the thread; live streams end with `EngineDead`. A second call does nothing."""
        _stop(self._calls, self._thread)
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class _Stream:
    """Where one request's outputs go: to the event loop that reads them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.items: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    def send(self, item: RequestOutput | BaseException) -> bool:
        """From any thread; false when the event loop was closed."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True


class _Call(NamedTuple):
    """What the engine's thread is to do, and the stream that waits for it."""

    work: Callable[[], None]
    stream: _Stream | None = None


def _stop(calls: "queue.SimpleQueue[_Call | None]", thread: threading.Thread) -> None:
    calls.put(None)
    thread.join()
