"""The engine for use inside an asyncio program: `async for output in engine.generate(...)`."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from octavo import log
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.inputs import Prompt
from octavo.errors import EngineDead, InvalidRequest
from octavo.types import RequestOutput, SamplingParams

Stream = asyncio.Queue["RequestOutput | BaseException"]


class AsyncLLM:
    """A model in this process, computing in a thread of its own.

    Keywords are those of `LLM`. Close it, or use it as an async context manager.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        log.set_up()
        self.engine = Engine(EngineConfig.from_keywords("AsyncLLM", model=model, **options))
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, Stream]] = {}
        self._names = itertools.count()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

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
        if name in self._streams:
            raise InvalidRequest(f"request_id={name!r} belongs to a request that is still running.", param="request_id")
        stream: Stream = asyncio.Queue()
        self._streams[name] = (asyncio.get_running_loop(), stream)

        def add() -> None:
            try:
                self.engine.add(self.engine.check(prompt, sampling_params, request_id=name, priority=priority))
            except (InvalidRequest, TypeError) as error:
                self._send(name, error)

        finished = False
        try:
            self._call(add)
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            self._streams.pop(name, None)
            if not finished and self._dead is None:
                self._calls.put(lambda: self._abort(name))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream yields a last output with finish_reason "abort". Unknown ids are ignored."""
        self._call(lambda: self._abort(request_id))

    async def reset_prefix_cache(self) -> None:
        self._call(self.engine.reset_prefix_cache)

    def _abort(self, name: str) -> None:
        if output := self.engine.abort(name):
            self._send(name, output)

    def _call(self, call: Callable[[], None]) -> None:
        if self._dead is not None:
            raise EngineDead(f"The engine stopped: {self._dead!r}.")
        self._calls.put(call)

    def _send(self, name: str, item: "RequestOutput | BaseException") -> None:
        if name in self._streams:
            loop, stream = self._streams[name]
            if not loop.is_closed():
                loop.call_soon_threadsafe(stream.put_nowait, item)

    def _run(self) -> None:
        try:
            while self._take_calls():
                for output in self.engine.step():
                    self._send(output.request_id, output)
            self._dead = EngineDead("it was closed")
        except BaseException as error:
            self._dead = error
        for name in list(self._streams):
            self._send(name, EngineDead(f"The engine stopped: {self._dead!r}."))

    def _take_calls(self) -> bool:
        """Do what was asked since the last step; wait while there is nothing to compute. False means close."""
        while True:
            try:
                call = self._calls.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def close(self) -> None:
        """Stop the thread; live streams end with `EngineDead`."""
        self._calls.put(None)
        self._thread.join()
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
