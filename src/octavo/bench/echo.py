"""A server that computes nothing and sends events by the clock: what a client can read, and scripts for tests."""

import asyncio
import contextlib
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

EMPTY = b'data: {"choices":[{"index":0,"text":""}]}\n\n'


@dataclass(frozen=True)
class Script:
    """How every request is answered: seconds after its arrival, and tokens of the chunk that is sent then.

    A chunk of 0 tokens is one without text. The usage at the end counts the tokens of all.
    """

    chunks: Sequence[tuple[float, int]]


def even(first: float, gap: float, count: int) -> Script:
    """`count` tokens, one a chunk, `gap` seconds apart."""
    return Script([(first + gap * number, 1) for number in range(count)])


def _event(tokens: int) -> bytes:
    event = EMPTY.replace(b'""', b'"%b"' % (b" word" * tokens))
    return b"%x\r\n%b\r\n" % (len(event), event)


class _Answering(asyncio.Protocol):
    def __init__(self, script: Script) -> None:
        self.script, self.buffer = script, b""
        self.transport: Any = None
        self.total = sum(tokens for _, tokens in script.chunks)
        self.events = [(moment, _event(tokens)) for moment, tokens in script.chunks]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self.buffer = b""
        loop = asyncio.get_running_loop()
        if head.startswith(b"GET"):
            content = json.dumps({"data": [{"id": "echo"}]}).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        prompt = json.loads(body).get("prompt") or []
        self._send(0, loop, loop.time(), len(prompt))

    def _send(self, number: int, loop: asyncio.AbstractEventLoop, begin: float, prompt_tokens: int) -> None:
        if self.transport.is_closing():
            return
        while number < len(self.events):
            moment, event = self.events[number]
            if begin + moment > loop.time():
                loop.call_at(begin + moment, self._send, number, loop, begin, prompt_tokens)
                return
            self.transport.write(event)
            number += 1
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.total}
        last = b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % json.dumps(usage).encode()
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


def _serve(script: Script, port: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Answering(script), "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        port.close()
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(main())


class EchoServer:
    """A process on a free port of this machine; a context manager."""

    def __init__(self, script: Script) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(script, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.port: int = ours.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join()
