"""A server for the page's tests: the real page, and scripted answers in the shapes of the API."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from octavo.server import errors, page

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


class Script:
    """What the server answers next, and what it was asked."""

    def __init__(self) -> None:
        self.tokens: list[str] = ["The", " sky", " is", " blue", "."]
        self.deltas: list[dict[str, Any]] = []  # said after the tokens of a chat, by a model that calls tools
        self.delay = 0.0
        self.fails_after: int | None = None
        self.refuses: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self.key = ""
        self.asked: list[dict[str, Any]] = []
        self.left_early = 0
        self.snapshot = snapshot()


def snapshot() -> dict[str, Any]:
    latency = {"p50": 18.4, "p90": 41.0, "p99": 1250.0}
    return {
        "server_load": 5,
        "model": "tiny",
        "uptime_s": 4000.0,
        "running": 4,
        "waiting": 1,
        "max_num_seqs": 256,
        "kv_cache_usage": 0.375,
        "kv_blocks": {"used": 750, "total": 2000},
        "prefix_cache": {"queries": 1000, "hits": 620, "hit_rate": 0.62},
        "tokens_per_second": {"prompt": 812.5, "generation": 1234.5},
        "latency_ms": {"ttft": latency, "itl": latency, "e2e": latency, "queue": None},
        "totals": {"prompt_tokens": 123456, "generation_tokens": 65432, "requests": 789, "preemptions": 2},
        "window_s": 60.0,
    }


def build(script: Script) -> FastAPI:
    app = FastAPI()
    errors.install(app)
    app.include_router(page.router)

    def refused(request: Request) -> Response | None:
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return JSONResponse({"error": {"message": "no key", "type": "", "param": None, "code": 401}}, 401)
        return None

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        data = [{"id": name, "object": "model", "max_model_len": 128} for name in ("tiny", "tiny-alias")]
        return refused(request) or JSONResponse({"object": "list", "data": data})

    @app.get("/load")
    async def load(request: Request) -> Response:
        return refused(request) or JSONResponse(script.snapshot)

    async def answer(request: Request, chat: bool) -> Response:
        if no := refused(request):
            return no
        body = await request.json()
        script.asked.append(body)
        if script.refuses:
            status, error, headers = script.refuses
            return JSONResponse({"error": error}, status, headers)
        return StreamingResponse(_events(script, request, body, chat), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, False)

    return app


async def _events(script: Script, request: Request, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
    def line(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({'id': 'x', 'model': body['model'], 'choices': choices, **more})}\n\n"

    try:
        if chat:
            yield line([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for i, token in enumerate(script.tokens):
            if script.fails_after == i:
                error = {"message": "The engine stopped: out of memory.", "code": 500}
                yield f"data: {json.dumps({'error': error})}\n\n"
                yield "data: [DONE]\n\n"
                return
            await asyncio.sleep(script.delay)
            yield line([_choice(token, i, body, chat)])
        deltas = script.deltas if chat and body["messages"][-1]["role"] != "tool" else []
        for delta in deltas:
            yield line([{"index": 0, "delta": delta, "finish_reason": None}])
        reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        yield line([{"index": 0, "delta": {}, "text": "", "finish_reason": reason}])
        count = len(script.tokens)
        yield line([], usage={"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count})
        yield "data: [DONE]\n\n"
    except asyncio.CancelledError:
        script.left_early += 1
        raise


def _choice(token: str, i: int, body: dict[str, Any], chat: bool) -> dict[str, Any]:
    logprob = -0.05 if i % 3 else -1.6
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if chat:
        top = [{"token": token, "logprob": logprob}, {"token": " other", "logprob": -2.5}]
        logprobs = {"content": [{"token": token, "logprob": logprob, "top_logprobs": top}]}
        return choice | {"delta": {"content": token}, "logprobs": logprobs if body.get("logprobs") else None}
    legacy = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [{token: logprob, " other": -2.5}]}
    return choice | {"text": token, "logprobs": legacy if body.get("logprobs") else None}


@contextmanager
def serve(script: Script) -> Iterator[str]:
    """The address of a running server."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build(script), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(5)
        listening.close()
