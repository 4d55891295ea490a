"""Server-sent events as bytes made by hand: a token's way to the client passes neither pydantic nor a JSON tree."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.server import errors

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(content: Any) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


class EventStream(Response):
    """Sends the chunks of a generator, then `[DONE]`; an exception out of it becomes an error event before that.

    A client that goes away closes the generator at once. `keep_alive_s`, where it is not 0, is the time
    after which silence is broken by a comment, for proxies that would cut the connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None, keep_alive_s: float = 0
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        # init_headers gives a length to every body that is not None; this one has no end yet
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self.chunks, self.keep_alive_s = chunks, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.chunks), while_connected(receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self.keep_alive_s:
                async with _broken_silence(send, self.keep_alive_s) as sent:
                    await self._send_all(send, sent)
            else:
                await self._send_all(send, None)
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_all(self, send: Send, sent: Callable[[], None] | None) -> None:
        try:
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if sent is not None:
                    sent()
        except Exception as error:
            _, content = errors.described(error)
            await send({"type": "http.response.body", "body": event(content), "more_body": True})


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body as soon as the client has gone, and go on behind it."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()


@contextlib.asynccontextmanager
async def _broken_silence(send: Send, seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Send a comment after every `seconds` in which the yielded function was not called."""
    clock = asyncio.get_running_loop().time
    last = clock()

    def sent() -> None:
        nonlocal last
        last = clock()

    async def break_silence() -> None:
        while True:
            await asyncio.sleep(last + seconds - clock())
            if clock() - last >= seconds:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                sent()

    breaker = asyncio.create_task(break_silence())
    try:
        yield sent
    finally:
        breaker.cancel()
