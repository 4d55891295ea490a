"""The API process's side of the engine: requests out, `RequestOutput`s in; asyncio, and no torch."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from array import array
from pathlib import Path
from typing import Any, Literal, Self

import zmq

from octavo.engine import protocol
from octavo.engine.inputs import Group, Inputs, Prompt
from octavo.engine.outputs import Answer, Sample
from octavo.engine.protocol import EngineInfo
from octavo.errors import EngineDead, InvalidRequest, OctavoError, Overloaded, ShuttingDown, TimedOut
from octavo.hub import ModelFiles
from octavo.text import chat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.formats import Formats
from octavo.types import FinishReason, RequestOutput, RequestOutputKind, SamplingParams

logger = logging.getLogger("octavo")

State = Literal["starting", "ready", "stuck", "draining", "dead"]

LONG_TEXT = 20_000  # characters or ids; above it a prompt is read in a thread, so that streams go on
MESSAGES_AT_ONCE = 64  # read before others on the event loop have their turn
WATCH_SECONDS = 0.5
ANSWER_SECONDS = 10.0  # that a control call may take, beside the step that it waits for


class EngineClient:
    """Speaks to one engine process. All methods belong to the event loop that called `start`.

    `state` is "ready" when requests run; `why` says why not. `info` and `tokenizer` are there from "ready" on.

    Args:
        folder: the server's private folder, where the engine's socket is.
        alive: a pipe's end whose other end the engine process holds: it ends when that process does.
        process: this API process's name, which tells its requests from those of others.
        stall_timeout: seconds of silence of the engine after which it counts as stuck.
    """

    def __init__(
        self, folder: Path, *, alive: int | None = None, process: str = "0", stall_timeout: float = 60.0
    ) -> None:
        self.state: State = "starting"
        self.why = "The engine is starting."
        self.phase = "prepare"
        self.process = process
        self._folder, self._alive, self._stall_timeout = folder, alive, stall_timeout
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._reading: asyncio.Future[Tokenizer] | None = None  # of the tokenizer
        self._inputs: Inputs | None = None
        self.chat_template: str | None = None  # the source of one that is used in place of the model's
        self.formats = Formats()  # how the model writes calls and thoughts, from "ready" on
        self._keys = itertools.count()
        self._feeds: dict[int, tuple[Feed, Sample]] = {}  # by key of a sequence, until it is finished
        self._by_name: dict[str, set[Feed]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._settled = asyncio.Event()  # ready or dead
        self._idle = asyncio.Event()
        self._idle.set()
        self._heard = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Self:
        """Connect; returns at once. `ready` waits for the engine."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(f"ipc://{self._folder / protocol.ENGINE_SOCKET}")
        self._descriptor: int = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        if self._alive is not None:
            self._loop.add_reader(self._alive, self._engine_ended)
        self._send(protocol.Join())
        self._keep(self._watch())
        return self

    async def ready(self) -> None:
        """Wait until requests run.

        Raises:
            EngineDead: the engine could not start.
        """
        await self._settled.wait()
        if self.state == "dead":
            raise EngineDead(self.why)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead(self.why)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """
        Raises:
            InvalidRequest: the engine runs without one.
        """
        if self._tokenizer is None:
            self._refuse_unless_open()
            raise InvalidRequest("This engine runs without a tokenizer (skip_tokenizer_init).")
        return self._tokenizer

    def formats_of(self, template: str) -> Formats:
        """How calls and thoughts are written with this chat template, unless the engine's options say how."""
        options = self.info.options.get("model", {})
        return Formats.of(template, options.get("tool_call_parser"), options.get("reasoning_parser"))

    @property
    def num_live(self) -> int:
        """Requests that are not finished, or whose last output nobody has read yet."""
        return sum(map(len, self._by_name.values()))

    async def check(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> Group:
        """Tokenize and validate, without running anything.

        Raises:
            InvalidRequest: it can never run.
            EngineDead, ShuttingDown: nothing runs now.
        """
        self._refuse_unless_open()
        assert self._inputs is not None
        structured = params.structured_outputs if params is not None else None
        if _length(prompt) > LONG_TEXT or (structured is not None and len(structured.text) > LONG_TEXT):
            return await asyncio.to_thread(self._inputs.group, prompt, params, request_id=request_id, priority=priority)
        return self._inputs.group(prompt, params, request_id=request_id, priority=priority)

    def generate(
        self, group: Group, *, tenant: str = "", timeout_ms: float | None = None, traceparent: str = ""
    ) -> "Stream":
        """Run a checked request; iterate over the result for its outputs.

        The engine shares itself out between tenants, and they share no cached prefix. After `timeout_ms` the
        request ends, also while it is queued: with `TimedOut` before its first token, else with a last output
        whose finish_reason is "abort" and stop_reason "timeout".

        Raises (here, or out of the iteration):
            Overloaded: the queue is full; before the first output. `Stream.admitted` waits for this answer.
            TimedOut: see above.
            EngineDead: the engine stopped.
            ShuttingDown: the server ends.
        """
        self._refuse_unless_open()
        if timeout_ms is not None and not 0 < timeout_ms < 1e12:
            raise InvalidRequest(
                f"timeout_ms={timeout_ms} is not allowed: it must be a number of milliseconds above 0.",
                param="timeout_ms",
            )
        now = time.monotonic()
        if tenant:
            requests = tuple(
                dataclasses.replace(request, tenant=tenant, namespace=f"{tenant}{request.namespace}")
                for request in group.requests
            )
            group = dataclasses.replace(group, requests=requests)
        feed = Feed(self, Answer(group, group.params.output_kind, self._tokenizer, now), self._loop)
        feed.taken = not self.info.has_limits and group.params.structured_outputs is None
        for sample in feed.answer.samples:
            key = next(self._keys)
            self._feeds[key] = (feed, sample)
            feed.open[sample] = key
        self._by_name.setdefault(group.id, set()).add(feed)
        self._idle.clear()
        self._send(protocol.Add.of([*feed.open.values()], group.requests, now, traceparent))
        if timeout_ms is not None:
            feed.timer = self._loop.call_later(timeout_ms / 1000, self._time_out, feed)
        return Stream(self, feed)

    async def abort(self, request_id: str) -> None:
        """End every request of this process with that id: a last output says "abort". Unknown ids are ignored."""
        for feed in list(self._by_name.get(request_id, ())):
            self._abort(feed)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; what runs goes on."""
        await self._ask("reset_prefix_cache")

    async def start_profile(self) -> str:
        """Record what the engine computes; returns the folder where the trace will lie."""
        return str(await self._ask("start_profile"))

    async def stop_profile(self) -> str:
        """Returns the path of the trace, in Chrome's format."""
        return str(await self._ask("stop_profile", 120.0))

    async def metrics(self) -> bytes:
        """Prometheus text of the engine process."""
        return bytes(await self._ask("metrics"))

    async def snapshot(self) -> dict[str, Any]:
        """The state of the engine in numbers, for /load."""
        return dict(await self._ask("snapshot"))

    def count_http(self, rows: list[tuple[str, str, int, float]], memory: int = 0) -> None:
        """Tell the engine's metrics of answered requests: (method, route, status, seconds)."""
        if self.state != "dead":
            self._send(protocol.Http(f"api-{self.process}", rows, memory))

    def drain(self) -> None:
        """Take no new requests."""
        if self.state != "dead":
            self.state, self.why = "draining", "The server is shutting down."

    async def idle(self) -> None:
        """Wait until every request is finished and read."""
        await self._idle.wait()

    def end(self, why: str) -> None:
        """End every request with `EngineDead`; nothing runs any more."""
        if self.state == "dead":
            return
        self.state, self.why = "dead", why
        for feeds in list(self._by_name.values()):
            for feed in list(feeds):
                feed.fail(EngineDead(why))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(why))
        self._settled.set()

    async def close(self) -> None:
        """Drop the connection; live requests end with `EngineDead`."""
        self.end("The server was closed.")
        for task in list(self._tasks):
            task.cancel()
        if self._alive is not None:
            self._loop.remove_reader(self._alive)
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=200)
        await asyncio.to_thread(self._context.term)

    # What comes from the engine

    def _read(self) -> None:
        """Take in what has arrived. The socket's descriptor tells of changes only, so none may be left behind."""
        now = time.monotonic()
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:  # closed
                return
            self._heard = now
            self._take(protocol.decode_from_engine(frame), now)
        self._loop.call_soon(self._read)

    def _take(self, message: protocol.FromEngine, now: float) -> None:
        match message:
            case protocol.Step():
                self._take_step(message, now)
            case protocol.Beat(stuck=stuck):
                self._beat(stuck)
            case protocol.Taken(key=key) | protocol.Refused(key=key) if key not in self._feeds:
                pass  # its reader has left
            case protocol.Taken(key=key):
                self._feeds[key][0].take_in()
            case protocol.Refused(key=key):
                self._feeds[key][0].fail(_refusal(message))
            case protocol.Reply(number=number):
                call = self._calls.pop(number, None)
                if call is not None and not call.done():
                    if message.error:
                        call.set_exception(OctavoError(message.error))
                    else:
                        call.set_result(message.value)
            case protocol.Starting(phase=phase, tokenizer=files):
                self.phase = phase
                self._read_tokenizer(files)
            case protocol.Hello(info=info):
                self._keep(self._prepare(info))
            case protocol.Dead(cause=cause):
                self.end(cause)

    def _take_step(self, step: protocol.Step, now: float) -> None:
        feeds = self._feeds
        stopped: list[int] = []
        for key, delta in step.others:
            if (entry := feeds.get(key)) is not None:
                feed, sample = entry
                sample.take(delta, now)
                if sample.finished:
                    if delta.finish_reason is None:
                        stopped.append(key)
                    self._finished(key, feed, sample)
                if feed.waiter is not None and (feed.reads_all or not feed.open):
                    feed.wake()
        if step.keys:
            for key, token in zip(array(protocol.TOKEN, step.keys), array(protocol.TOKEN, step.tokens), strict=True):
                if (entry := feeds.get(key)) is not None:
                    feed, sample = entry
                    sample.take_token(token, now)
                    if sample.finished:
                        stopped.append(key)
                        self._finished(key, feed, sample)
                    if feed.waiter is not None and (feed.reads_all or not feed.open):
                        feed.wake()
        if stopped:
            self._send(protocol.Abort(stopped, FinishReason.STOP))

    def _finished(self, key: int, feed: "Feed", sample: Sample) -> None:
        del self._feeds[key], feed.open[sample]
        if not feed.open and feed.timer is not None:
            feed.timer.cancel()

    def _beat(self, stuck: str) -> None:
        if stuck and self.state in ("ready", "stuck"):
            self.state, self.why = "stuck", stuck
        elif self.state == "stuck":
            logger.info("The engine moves again.")
            self.state, self.why = "ready", ""

    def _read_tokenizer(self, files: protocol.TokenizerFiles) -> None:
        """Begin to read it in a thread, while the engine starts."""
        if files.folder and self._reading is None:
            found = ModelFiles(Path(files.folder), Path(files.gguf) if files.gguf else None)
            self._reading = self._loop.run_in_executor(None, Tokenizer.from_files, found)
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # `_prepare` tells it

    async def _prepare(self, info: EngineInfo) -> None:
        self._read_tokenizer(info.tokenizer)
        try:
            self._tokenizer = await self._reading if self._reading else None
        except Exception as error:
            self.end(f"The tokenizer cannot be read: {error}")
            return
        self._info = info
        template = chat.main_template(self._tokenizer) if self._tokenizer else ""
        self.formats = self.formats_of(self.chat_template or template)
        self._inputs = Inputs(
            self._tokenizer,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=frozenset(info.eos_token_ids),
            default_params=info.default_params,
            reasoning=self.formats.reasoning,
            prefix_caching=info.prefix_caching,
            max_logprobs=info.max_logprobs,
            seed=info.seed,
            mark=f"{self.process}-",
        )
        if self.state == "starting":
            self.state, self.why = "ready", ""
        self._settled.set()

    def _engine_ended(self) -> None:
        """The engine process is gone; what it said before counts."""
        if self._alive is not None:
            self._loop.remove_reader(self._alive)
        self._alive = None
        self._read()
        cause = self._folder / protocol.CAUSE_FILE
        self.end(cause.read_text() if cause.exists() else "The engine process ended.")

    async def _watch(self) -> None:
        """Notice an engine that says nothing any more, and what the socket's descriptor did not tell of."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._read()
            silence = time.monotonic() - self._heard
            if self.state == "ready" and silence > self._stall_timeout:
                self.state, self.why = "stuck", f"The engine has said nothing for {silence:.0f} seconds."
                logger.error(self.why)

    # What goes to the engine

    def _send(self, message: protocol.FromClient) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed
            self._socket.send(protocol.encode(message), zmq.NOBLOCK, copy=True)
            self._loop.call_soon(self._read)  # sending may have swallowed the descriptor's word of an arrival

    async def _ask(self, name: str, seconds: float = ANSWER_SECONDS) -> Any:
        self._refuse_unless_running()
        number = next(self._call_numbers)
        call = self._calls[number] = self._loop.create_future()
        self._send(protocol.Ask(number, name))
        try:
            return await asyncio.wait_for(call, seconds + self._stall_timeout)
        except TimeoutError:
            raise EngineDead(f"The engine did not answer {name} in time.") from None
        finally:
            self._calls.pop(number, None)

    def _abort(self, feed: "Feed", stop_reason: str | None = None) -> None:
        keys = [*feed.open.values()]
        if keys:
            self._send(protocol.Abort(keys))
        for sample, key in list(feed.open.items()):
            sample.abort(time.monotonic(), stop_reason)
            self._finished(key, feed, sample)
        feed.wake()

    def _time_out(self, feed: "Feed") -> None:
        if feed.answer.metrics.first_token_time is None and feed.open:
            self._abort(feed)
            feed.fail(TimedOut("The request timed out before its first token (timeout_ms)."))
        else:
            self._abort(feed, "timeout")

    def forget(self, key: int) -> None:
        """Whatever still comes for this sequence is not looked at."""
        self._feeds.pop(key, None)

    def leave(self, feed: "Feed") -> None:
        """Its reader is gone: end what is not finished, and forget it."""
        self._abort(feed)
        if feed.timer is not None:
            feed.timer.cancel()
        name = feed.answer.group.id
        feeds = self._by_name.get(name, set())
        feeds.discard(feed)
        if not feeds:
            self._by_name.pop(name, None)
            if not self._by_name:
                self._idle.set()

    def _refuse_unless_open(self) -> None:
        if self.state == "draining":
            raise ShuttingDown("The server is shutting down.", "Send the request again, to another one.")
        self._refuse_unless_running()

    def _refuse_unless_running(self) -> None:
        if self.state == "dead" or self._info is None:
            raise EngineDead(self.why)

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Feed:
    """Where a request's deltas are put together until its reader takes them: a slow reader gets more at once."""

    __slots__ = ("answer", "client", "error", "loop", "open", "reads_all", "taken", "timer", "waiter")

    def __init__(self, client: EngineClient, answer: Answer, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.answer, self.loop = client, answer, loop
        self.reads_all = answer.kind is not RequestOutputKind.FINAL_ONLY
        self.open: dict[Sample, int] = {}  # samples at work, and their keys
        self.error: OctavoError | None = None
        self.taken = False  # the engine has queued it
        self.waiter: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def take_in(self) -> None:
        self.taken = True
        self.wake()

    def fail(self, error: OctavoError) -> None:
        """Its reader gets this next; the engine is not told."""
        self.error = error
        for sample, key in list(self.open.items()):
            self.client.forget(key)
            del self.open[sample]
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def changed(self) -> None:
        self.waiter = self.loop.create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None


class Stream:
    """The outputs of one request. Whoever stops reading before the end closes it, or drops it: that aborts it."""

    def __init__(self, client: EngineClient, feed: Feed) -> None:
        self._client, self._feed = client, feed
        self._ended = False

    async def admitted(self) -> None:
        """Wait until the engine has queued the request.

        Raises:
            Overloaded: the queue is full.
            InvalidRequest, EngineDead: it cannot run.
        """
        feed = self._feed
        while not feed.taken and feed.error is None and not feed.answer.is_new:
            await feed.changed()
        if feed.error is not None:
            self.close()
            raise feed.error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        feed = self._feed
        answer = feed.answer
        while True:
            if feed.error is not None:
                self.close()
                raise feed.error
            if answer.is_new and (output := answer.show()) is not None:
                if output.finished:
                    self.close()
                return output
            await feed.changed()

    def close(self) -> None:
        """No more is read; what is not finished is aborted. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._client.leave(self._feed)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended and not self._feed.loop.is_closed():
            self._ended = True
            # The collector may run in any thread.
            self._feed.loop.call_soon_threadsafe(self._client.leave, self._feed)


def _length(prompt: Prompt) -> int:
    """Characters or ids of a prompt, roughly."""
    if isinstance(prompt, dict):
        return max((len(value) for value in prompt.values() if isinstance(value, str | list | tuple)), default=0)
    return len(prompt) if isinstance(prompt, str | list | tuple) else 0


def _refusal(refused: protocol.Refused) -> OctavoError:
    if refused.status == InvalidRequest.status:
        return InvalidRequest(refused.why, param=refused.param)
    return Overloaded(refused.why, retry_after_s=refused.retry_after_s)
