"""A small server with the real batch and file routes over a scripted completion endpoint, for the tests of batches.

Run as a program it serves on a port and writes a line to a log for every request that it answers.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from octavo.errors import OctavoError
from octavo.server import batches, files


class ScriptedEngine:
    """What the runner sees of an engine."""

    def __init__(self, max_num_seqs: int = 16) -> None:
        self.state = "ready"
        self.info = SimpleNamespace(served_names=["scripted"], options={"scheduler": {"max_num_seqs": max_num_seqs}})
        self.load = {"running": 0, "waiting": 0}  # of others than the batches

    def lines(self) -> int:
        return 0

    async def snapshot(self) -> dict[str, int]:
        return {**self.load, "running": self.load["running"] + self.lines()}


class Answers:
    """The scripted endpoint: echoes the prompt, refuses the prompt "bad", and remembers what it saw."""

    def __init__(self, delay: float = 0.0, log: Path | None = None) -> None:
        self.delay, self.log = delay, log
        self.seen: list[dict[str, Any]] = []
        self.tenants: set[str] = set()
        self.in_flight = self.most = self.busy = 0

    async def __call__(self, request: Request) -> JSONResponse:
        body = await request.json()
        if self.busy:
            self.busy -= 1
            return JSONResponse({"error": {"message": "busy"}}, 503, {"retry-after": "0"})
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.in_flight -= 1
        self.seen.append(body)
        self.tenants.add(request.scope.get("octavo.tenant", "?"))
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps(body["prompt"]) + "\n")
        if body["prompt"] == "bad":
            return JSONResponse(
                {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}, 400
            )
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        choice = {"index": 0, "text": f"<{body['prompt']}>", "finish_reason": "stop"}
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})


def build(data: Path, answers: Answers, engine: ScriptedEngine | None = None, **options: Any) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.background(app))
        yield
        task.cancel()
        await asyncio.wait({task})
        app.state.batch_store.close()

    app = FastAPI(lifespan=lifespan)
    app.state.engine = engine or ScriptedEngine()
    app.state.engine.lines = lambda: answers.in_flight
    defaults = {"max_file_bytes": 1 << 20, "max_batch_requests": 1000, "batch_concurrency": None}
    app.state.options = SimpleNamespace(data_dir=str(data), **{**defaults, **options})
    app.include_router(files.router)
    app.include_router(batches.router)
    app.add_api_route("/v1/completions", answers.__call__, methods=["POST"])

    @app.middleware("http")
    async def tenant(request: Request, call_next: Any) -> Any:
        request.scope.setdefault("octavo.tenant", request.headers.get("x-tenant", ""))
        return await call_next(request)

    @app.exception_handler(OctavoError)
    async def refuse(_: Request, error: OctavoError) -> JSONResponse:
        body = {"message": str(error), "param": getattr(error, "param", None)}
        return JSONResponse({"error": body}, error.status)

    return app


if __name__ == "__main__":
    import uvicorn

    folder, port, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    app = build(folder / "data", Answers(seconds, folder / "answered.log"))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
