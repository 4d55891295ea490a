"""Sends prepared HTTP requests and timestamps the events of their streams, with as little work an event as possible."""

import asyncio
import json
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

# An event with text. A quote inside a text is escaped, so no text can look like one of these fields.
TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)": ?"[^"]')
CHOICES, USAGE, DONE, FAULT = re.compile(rb'"choices": ?\[\{'), re.compile(rb'"usage": ?\{'), b"[DONE]", b'{"error"'
LAG_SECONDS = 0.01  # between two looks at how late the event loop is
REPORT_SECONDS = 0.25


@dataclass(slots=True)
class Answer:
    """One request's times, in seconds of this machine's monotonic clock."""

    number: int
    waited: float = 0.0  # for a place, after its arrival
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of each chunk with text
    end: float = 0.0  # of the last chunk of all that carry a choice
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        return max(self.end, self.times[-1]) - self.sent


class Connection(asyncio.Protocol):
    """One connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None  # uvloop's transports are of no class of asyncio
        self._answer: Answer | None = None
        self._end: asyncio.Future[None] | None = None
        self._buffer, self._status = b"", b""
        self._in_body = self._done = self._last_chunk = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._finish("" if self._done else f"connection closed: {error or 'by the server'}")

    async def ask(self, request: bytes, answer: Answer) -> None:
        self._answer, self._end = answer, asyncio.get_running_loop().create_future()
        self._buffer, self._status = b"", b""
        self._in_body = self._done = self._last_chunk = False
        answer.sent = time.monotonic()
        self.transport.write(request)
        await self._end

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer = self._answer
        if answer is None:
            return
        buffer = self._buffer + data
        if not self._in_body:
            head, found, buffer = buffer.partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return
            self._in_body, self._status = True, head[9:12]
        # Chunk sizes stand between events and are lines of their own: they are no "data:" lines.
        *lines, self._buffer = buffer.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                if line == b"0\r":
                    self._last_chunk = True
                elif self._last_chunk:  # the empty line after it: the next answer begins here
                    self._finish("" if self._done else "the stream ended without [DONE]")
                continue
            self._event(answer, line[5:].strip(), now)
        if self._status != b"200" and self._buffer and self._answer is not None:
            self._finish(f"status {self._status.decode()}: {self._buffer[:300].decode(errors='replace')}")
            if self.transport:
                self.transport.close()

    def _event(self, answer: Answer, event: bytes, now: float) -> None:
        if TEXT.search(event):
            answer.times.append(now)
        if CHOICES.search(event):
            answer.end = now
            if not USAGE.search(event):
                return
        elif event == DONE:
            self._done = True
            return
        elif event.startswith(FAULT):
            answer.error = event[:300].decode(errors="replace")
            return
        try:
            usage = json.loads(event).get("usage") or {}
        except ValueError:
            answer.error = f"an event that is no JSON: {event[:200].decode(errors='replace')}"
            return
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)

    def _finish(self, error: str) -> None:
        if self._answer is not None and error and not self._answer.error:
            self._answer.error = error
        self._answer = None
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


@dataclass(frozen=True)
class Part:
    """One client process's part: requests with their arrivals, in seconds after `begin` (of the monotonic clock)."""

    host: str
    port: int
    begin: float
    requests: Sequence[tuple[int, float, bytes]]
    concurrency: int  # 0 is no limit
    secure: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a client process worked.

    `busy` is its share of a core while requests were at work; the lags say how late its event loop was, in seconds.
    """

    busy: float
    mean_lag: float
    worst_lag: float


async def _send_all(part: Part, done: Callable[[int], None], lags: list[float]) -> list[Answer]:
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    places = asyncio.Semaphore(part.concurrency) if part.concurrency else None
    finished = 0

    async def connect() -> Connection:
        secure = True if part.secure else None
        return (await loop.create_connection(Connection, part.host, part.port, ssl=secure))[1]

    async def one(number: int, arrival: float, request: bytes) -> Answer:
        nonlocal finished
        answer = Answer(number)
        if places:
            await places.acquire()
        answer.waited = max(0.0, time.monotonic() - part.begin - arrival)
        try:
            connection = idle.pop() if idle else await connect()
            if connection.transport is None or connection.transport.is_closing():
                connection = await connect()
            await connection.ask(request, answer)
            idle.append(connection)
        except OSError as error:
            answer.error = str(error) or type(error).__name__
        finally:
            finished += 1
            if places:
                places.release()
        return answer

    async def watch() -> None:
        told, shown = 0, time.monotonic()
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            now = time.monotonic()
            if now > part.begin:
                lags.append(max(0.0, now - due))
            if now - shown > REPORT_SECONDS:
                done(finished - told)
                told, shown = finished, now

    watching = asyncio.create_task(watch())
    tasks = []
    ready = await asyncio.gather(
        *(connect() for _ in range(min(part.concurrency, len(part.requests)))), return_exceptions=True
    )
    idle += [connection for connection in ready if isinstance(connection, Connection)]
    for number, arrival, request in part.requests:
        delay = part.begin + arrival - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(number, arrival, request)))
    answers = await asyncio.gather(*tasks)
    watching.cancel()
    for connection in idle:
        if connection.transport:
            connection.transport.close()
    return answers


def _client(part: Part, results: Any) -> None:
    lags: list[float] = []
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        used, begin = time.process_time(), time.monotonic()
        try:
            answers = runner.run(_send_all(part, lambda count: results.put(count), lags))
        except Exception as error:  # of the client itself: the others must not wait for it
            answers = [Answer(number, error=repr(error)) for number, _, _ in part.requests]
        busy = (time.process_time() - used) / max(1e-9, time.monotonic() - max(begin, part.begin))
        lags = lags or [0.0]
        results.put((answers, Load(busy, sum(lags) / len(lags), max(lags))))


def send(
    host: str,
    port: int,
    requests: Sequence[bytes],
    arrivals: Sequence[float],
    concurrency: int,
    processes: int,
    done: Callable[[int], object] = lambda count: None,
    secure: bool = False,
) -> tuple[list[Answer], Load]:
    """All answers in order, and the load of the busiest client process. `done` hears how many more are finished."""
    processes = max(1, min(processes, len(requests), concurrency or len(requests)))
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    begin = time.monotonic() + 0.5 + 0.1 * processes  # all of them have started by then
    children = []
    for index in range(processes):
        share = math.ceil((concurrency - index) / processes) if concurrency else 0
        mine = [(i, arrivals[i], requests[i]) for i in range(index, len(requests), processes)]
        child = context.Process(target=_client, args=(Part(host, port, begin, mine, share, secure), results))
        child.start()
        children.append(child)
    parts: list[tuple[list[Answer], Load]] = []
    told = 0
    while len(parts) < processes:
        found = results.get()
        if isinstance(found, int):
            told += found
            done(found)
        else:
            parts.append(found)
    done(len(requests) - told)
    for child in children:
        child.join()
    answers = sorted((answer for part, _ in parts for answer in part), key=lambda answer: answer.number)
    loads = [load for _, load in parts]
    worst = Load(max(x.busy for x in loads), max(x.mean_lag for x in loads), max(x.worst_lag for x in loads))
    return answers, worst
