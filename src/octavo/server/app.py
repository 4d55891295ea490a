"""The ASGI app of an API process: every file of this folder with a `router` is a part of it."""

import asyncio
import contextlib
import functools
import importlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from octavo import server
from octavo.engine.client import EngineClient
from octavo.server import errors
from octavo.server.auth import Keys, require_admin
from octavo.server.gate import Gate
from octavo.server.options import ServerOptions
from octavo.server.serving import IGNORED, Serving
from octavo.version import __version__

logger = logging.getLogger("octavo")

SECONDS_BETWEEN_COUNTS = 1.0
_ROUTER = re.compile(r"^router\b.*=", re.MULTILINE)
_ERROR_CONTENT = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "integer", "null"]},
                    },
                }
            },
        }
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be answered; `param` names the field.", "content": _ERROR_CONTENT},
    "5XX": {"description": "The server cannot answer now.", "content": _ERROR_CONTENT},
}


def build(options: ServerOptions, engine: EngineClient) -> FastAPI:
    """The app; the engine may still be starting.

    A router file may also have: `ADMIN = True` (its routes need the administrator's key, and do not exist
    without one), `OPEN` and `OWN_BODY_LIMIT` (paths, see `Gate`), and `async def background(app)`, which
    runs as long as the app does.

    Raises:
        InvalidConfig: a key or chat template that cannot be used.
    """
    keys = Keys(options.api_key, options.admin_api_key, options.metrics_key, options.metrics_open)
    serving = Serving(engine, options)
    modules = [module for module in _router_modules() if options.admin_api_key or not _is_admin(module)]
    app = FastAPI(
        title="Octavo",
        version=__version__,
        summary="LLM inference with an API that OpenAI's clients speak.",
        openapi_url=None if options.disable_fastapi_docs else "/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        root_path=options.root_path,
        responses=ERRORS,
        lifespan=functools.partial(_lifespan, modules=modules, serving=serving),
    )
    app.state.engine, app.state.options, app.state.serving = engine, options, serving
    errors.install(app)
    for module in modules:
        if options.disable_fastapi_docs and module.__name__.endswith(".docs"):
            continue
        app.include_router(module.router, dependencies=[Depends(require_admin)] if _is_admin(module) else None)
    app.add_middleware(
        Gate,
        keys=keys,
        max_body_bytes=options.max_body_bytes,
        open_paths=[path for module in modules for path in getattr(module, "OPEN", ())],
        unlimited_paths=[path for module in modules for path in getattr(module, "OWN_BODY_LIMIT", ())],
        count=serving.counts.count,
    )
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", IGNORED, "retry-after"],
            allow_credentials="*" not in options.allowed_origins,
        )
    return app


def _router_modules() -> list[ModuleType]:
    files = sorted(Path(server.__path__[0]).glob("*.py"))
    names = [file.stem for file in files if _ROUTER.search(file.read_text(encoding="utf-8"))]
    return [importlib.import_module(f"octavo.server.{name}") for name in names]


def _is_admin(module: ModuleType) -> bool:
    return getattr(module, "ADMIN", False)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI, *, modules: list[ModuleType], serving: Serving) -> AsyncIterator[None]:
    works = {module.__name__: module.background(app) for module in modules if hasattr(module, "background")}
    works["counts"] = _send_counts(serving)
    tasks = [asyncio.create_task(_logged(name, work)) for name, work in works.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _logged(name: str, work: Any) -> None:
    try:
        await work
    except Exception:
        logger.exception("The work of %s in the background ended.", name)


async def _send_counts(serving: Serving) -> None:
    while True:
        await asyncio.sleep(SECONDS_BETWEEN_COUNTS)
        serving.send_counts()
