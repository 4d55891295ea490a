"""What the HTTP side costs alone: one API process on one core over an engine that emits tokens at a given rate.

`python benchmarks/http_stub.py` starts the server (the real app and engine client; the engine's messages are made
in the same process, decoded as they would be) and a raw client in a second process; prints tokens/s, CPU seconds,
time to first byte, and the cost of a request. `--ways` compares ways to send a token chunk and to encode it.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tiny_tokenizers
from octavo.engine import protocol
from octavo.server import http_limits
from octavo.server.app import build
from octavo.server.options import ServerOptions
from octavo.server.sse import EventStream
from octavo.types import Delta, FinishReason
from stand_in import StandIn

STREAMS, TOKENS, RATE = 256, 200, 20_000


class Emitter(StandIn):
    """All sequences get a token every `STREAMS / RATE` seconds, in one encoded message, as the engine sends them."""

    def begin_emitting(self, seconds: float) -> None:
        self.live: dict[int, int] = {}
        self.task = asyncio.create_task(self.emit(seconds))

    def _send(self, message: protocol.FromClient) -> None:
        match message:
            case protocol.Add(keys=keys, requests=requests):
                for key, request in zip(keys, requests, strict=True):
                    self.live[key] = request.params.max_tokens or 1
                    if not self.task_seconds:
                        self._answer_at_once(key)
            case protocol.Abort(keys=keys):
                for key in keys:
                    self.live.pop(key, None)

    def _answer_at_once(self, key: int) -> None:
        del self.live[key]
        delta = Delta("", [40], finish_reason=FinishReason.LENGTH)
        self._loop.call_soon(self._take, protocol.Step(b"", b"", [(key, delta)]), time.monotonic())

    task_seconds = 0.0

    async def emit(self, seconds: float) -> None:
        self.task_seconds = seconds
        clock = asyncio.get_running_loop().time
        due = clock()
        first: set[int] = set()
        while True:
            due = max(due + seconds, clock() - 5 * seconds)
            await asyncio.sleep(max(0.0, due - clock()))
            others, keys = [], []
            for key, left in list(self.live.items()):
                if left == 1:
                    others.append((key, Delta("", [41], finish_reason=FinishReason.LENGTH)))
                    del self.live[key]
                    first.discard(key)
                    continue
                self.live[key] = left - 1
                if key in first:
                    keys.append(key)
                else:
                    first.add(key)
                    others.append((key, Delta("", [40])))
            if keys or others:
                tokens = array("I", [40 + left % 500 for left in range(len(keys))])
                frame = protocol.encode(protocol.Step(array("I", keys).tobytes(), tokens.tobytes(), others))
                self._take(protocol.decode_from_engine(frame), time.monotonic())


def ways() -> FastAPI:
    """Endpoints that stream the same bytes in several ways."""
    app = FastAPI()
    chunk = b'data: {"choices":[{"index":0,"text":"hello"}]}\n\n'

    @app.get("/starlette/{count}")
    async def starlette(count: int) -> StreamingResponse:
        async def chunks() -> Any:
            for number in range(count):
                if number % 16 == 0:
                    await asyncio.sleep(0)
                yield chunk

        return StreamingResponse(chunks(), media_type="text/event-stream")

    @app.get("/ours/{count}")
    async def ours(count: int, request: Request) -> EventStream:
        async def chunks() -> Any:
            for number in range(count):
                if number % 16 == 0:
                    await asyncio.sleep(0)
                yield chunk

        return EventStream(chunks())

    return app


def serve(app_of: str, loop: str, http: Any, port: Any, seconds: float) -> None:
    async def main() -> None:
        if app_of == "ways":
            app: Any = ways()
        else:
            folder = tiny_tokenizers.f_bpe(Path(tempfile.mkdtemp()))
            engine = Emitter(folder, max_model_len=4096)
            await engine.start()
            if seconds:
                engine.begin_emitting(seconds)
            else:
                engine.live = {}
            app = build(ServerOptions(data_dir=tempfile.mkdtemp()), engine)
        config = uvicorn.Config(app, port=0, http=http, log_config=None, access_log=False, lifespan="on")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port.send(server.servers[0].sockets[0].getsockname()[1])

        async def report() -> None:
            while True:
                await asyncio.get_running_loop().run_in_executor(None, port.recv)
                used = resource.getrusage(resource.RUSAGE_SELF)
                port.send(used.ru_utime + used.ru_stime)

        await asyncio.gather(task, report())

    if loop == "uvloop":
        uvloop.run(main())
    else:
        asyncio.run(main())


class Server:
    def __init__(self, app: str, loop: str = "uvloop", http: Any = None, seconds: float = 0.0) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        http = http_limits.protocol() if http is None else http
        self.process = multiprocessing.get_context("fork").Process(
            target=serve, args=(app, loop, http, theirs, seconds), daemon=True
        )
        self.process.start()
        self.port = self.ours.recv()

    def cpu(self) -> float:
        self.ours.send(1)
        return float(self.ours.recv())

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def stream(port: int, request: bytes) -> tuple[float, float, int, float]:
    """Seconds to the headers and to the first event, the number of events, and seconds of all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = time.perf_counter()
    writer.write(request)
    await reader.readuntil(b"\r\n\r\n")
    headers = time.perf_counter() - begin
    await reader.readuntil(b"data: ")
    first = time.perf_counter() - begin
    count, end = 1, b""
    while b"[DONE]" not in end:
        piece = await reader.read(1 << 16)
        if not piece:
            break
        count += piece.count(b"data: ")
        end = (end + piece)[-32:]
    writer.close()
    return headers, first, count - 1, time.perf_counter() - begin


async def load(port: int) -> None:
    request = post("/v1/completions", {"prompt": "hello", "max_tokens": TOKENS, "stream": True})

    async def user(place: int) -> list[tuple[float, float, int, float]]:
        await asyncio.sleep(place * TOKENS / RATE)  # so that starts are spread evenly from then on
        return [await stream(port, request) for _ in range(4)]

    for _ in range(3):
        await stream(port, request)  # what is made once is made here
    users = await asyncio.gather(*(user(place) for place in range(STREAMS)))
    found = [item for items in users for item in items]
    events = sum(count for *_, count, _ in found)
    full = sum(TOKENS / seconds for items in users for *_, seconds in items[1:3]) / 2  # while all streams run
    print(
        f"{STREAMS} streams: {full:,.0f} tokens/s of {RATE:,} emitted, {events / len(found) / TOKENS:.3f} events a "
        "token"
    )
    for place, name in enumerate(("first byte", "first event")):
        times = sorted(item[place] * 1e3 for item in found)
        print(f"{name}: p50 {times[len(times) // 2]:.1f} p99 {times[int(len(times) * 0.99)]:.1f} ms")


async def requests(port: int, body: dict[str, Any], path: str, count: int = 2000) -> float:
    """Seconds of one request on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = post(path, body)
    for number in range(count + 100):
        if number == 100:
            begin = time.perf_counter()
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()
    return (time.perf_counter() - begin) / count


def timed(name: str, work: Any, count: int = 100_000) -> None:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    print(f"{name}: {(time.perf_counter() - begin) / count * 1e6:.2f} us")


def compare() -> None:
    head = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1, "model": "m"}
    chunk = {**head, "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]}
    encoder = msgspec.json.Encoder()
    before, after = b'data: {"choices":[{"index":0,"text":', b',"logprobs":null,"finish_reason":null}]}\n\n'
    timed("chunk, json.dumps", lambda: b"data: " + json.dumps(chunk).encode() + b"\n\n")
    timed("chunk, msgspec of the dict", lambda: b"data: " + encoder.encode(chunk) + b"\n\n")
    timed("chunk, fixed bytes and msgspec of the text", lambda: before + encoder.encode(" word") + after)
    for loop, http in (("uvloop", None), ("uvloop", "h11"), ("asyncio", None), ("asyncio", "h11")):
        server = Server("ways", loop, http)
        for way in ("ours", "starlette"):
            count = 20_000
            request = f"GET /{way}/{count} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            asyncio.run(stream(server.port, request))
            begin = server.cpu()
            asyncio.run(stream(server.port, request))
            print(f"{loop} + {http or 'httptools'}, {way}: {(server.cpu() - begin) / count * 1e6:.1f} us CPU a chunk")
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", action="store_true", help="compare libraries and ways to send")
    if parser.parse_args().ways:
        compare()
        return
    server = Server("octavo", seconds=STREAMS / RATE)
    begin, clock = server.cpu(), time.perf_counter()
    uvloop.run(load(server.port))  # the client must not be what is slow
    print(f"server: {(server.cpu() - begin) / (time.perf_counter() - clock):.0%} of a core")
    server.stop()
    server = Server("octavo")
    bodies = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    }
    for path, body in bodies.items():
        print(f"{path}: {asyncio.run(requests(server.port, body, path)) * 1e3:.2f} ms a request, one after another")
    server.stop()


if __name__ == "__main__":
    main()
