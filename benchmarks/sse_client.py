"""Sends prepared HTTP requests and timestamps the events of their streams, with as little work an event as possible."""

import asyncio
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

TOKEN, DONE, FAULT = b'"choices":[{', b"data: [DONE]", b'data: {"error"'


@dataclass(slots=True)
class Answer:
    """One request's times, in seconds of this machine's monotonic clock."""

    number: int
    waited: float = 0.0  # for a place, after its arrival
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of each chunk with tokens
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        return self.times[-1] - self.sent


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
            if not line.startswith(b"data: "):
                if line == b"0\r":
                    self._last_chunk = True
                elif self._last_chunk:  # the empty line after it: the next answer begins here
                    self._finish("" if self._done else "the stream ended without [DONE]")
                continue
            if TOKEN in line:
                answer.times.append(now)
                if b'"usage":{' not in line:
                    continue
            if line.startswith(DONE):
                self._done = True
            elif line.startswith(FAULT):
                answer.error = line[6:300].decode(errors="replace")
            else:
                usage = json.loads(line[6:]).get("usage") or {}
                answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
                answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
        if self._status != b"200" and self._buffer and self._answer is not None:
            self._finish(f"status {self._status.decode()}: {self._buffer[:300].decode(errors='replace')}")
            if self.transport:
                self.transport.close()

    def _finish(self, error: str) -> None:
        if self._answer is not None and error and not self._answer.error:
            self._answer.error = error
        self._answer = None
        if self._end is not None and not self._end.done():
            self._end.set_result(None)


@dataclass(frozen=True)
class Work:
    """One client process's part: requests with their arrivals, in seconds after `begin` (of the monotonic clock)."""

    host: str
    port: int
    begin: float
    requests: Sequence[tuple[int, float, bytes]]
    concurrency: int  # 0 is no limit


async def _send_all(work: Work) -> list[Answer]:
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    places = asyncio.Semaphore(work.concurrency) if work.concurrency else None

    async def connect() -> Connection:
        return (await loop.create_connection(Connection, work.host, work.port))[1]

    async def one(number: int, arrival: float, request: bytes) -> Answer:
        answer = Answer(number)
        if places:
            await places.acquire()
        answer.waited = time.monotonic() - work.begin - arrival
        try:
            connection = idle.pop() if idle else await connect()
            if connection.transport is None or connection.transport.is_closing():
                connection = await connect()
            await connection.ask(request, answer)
            idle.append(connection)
        except OSError as error:
            answer.error = str(error)
        finally:
            if places:
                places.release()
        return answer

    tasks = []
    idle += await asyncio.gather(*(connect() for _ in range(min(work.concurrency, len(work.requests)))))
    for number, arrival, request in work.requests:
        delay = work.begin + arrival - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(number, arrival, request)))
    answers = await asyncio.gather(*tasks)
    for connection in idle:
        if connection.transport:
            connection.transport.close()
    return answers


def _client(work: Work, results: Any) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        busy = time.process_time()
        try:
            answers = runner.run(_send_all(work))
        except Exception as error:  # of the client itself: the others must not wait for it
            answers = [Answer(number, error=repr(error)) for number, _, _ in work.requests]
        results.put((answers, time.process_time() - busy))


def send(
    host: str, port: int, requests: Sequence[bytes], arrivals: Sequence[float], concurrency: int, processes: int
) -> tuple[list[Answer], float]:
    """All answers in order, and the processor seconds of the busiest client process."""
    processes = max(1, min(processes, len(requests), concurrency or len(requests)))
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    begin = time.monotonic() + 0.5 + 0.1 * processes  # all of them have started by then
    children = []
    for index in range(processes):
        share = math.ceil((concurrency - index) / processes) if concurrency else 0
        mine = [(i, arrivals[i], requests[i]) for i in range(index, len(requests), processes)]
        child = context.Process(target=_client, args=(Work(host, port, begin, mine, share), results))
        child.start()
        children.append(child)
    parts = [results.get() for _ in children]
    for child in children:
        child.join()
    answers = sorted((answer for part, _ in parts for answer in part), key=lambda answer: answer.number)
    return answers, max(busy for _, busy in parts)
