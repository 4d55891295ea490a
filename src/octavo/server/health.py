"""Probes and numbers of the server: /livez, /health and its other names, /version, /load, /metrics."""

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from octavo.server import errors
from octavo.server.json_body import Router
from octavo.server.serving import serving_of
from octavo.version import __version__

router = Router(tags=["Operations"])
READY = ("/health", "/ready", "/readyz")
OPEN = ("/livez", *READY)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/livez")
@router.head("/livez", include_in_schema=False)
async def livez() -> Response:
    """200 as long as the process lives."""
    return Response()


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ready", include_in_schema=False)
@router.head("/ready", include_in_schema=False)
@router.get("/readyz", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while requests run; 503 until the engine is warm, and when it is dead, stuck or draining."""
    serving = serving_of(request)
    engine = serving.engine
    if engine.state == "ready":
        return Response()
    content: dict[str, Any] = errors.body(503, engine.why)
    content["state"] = engine.state
    if engine.state == "starting":
        content["phase"] = engine.phase
        content["elapsed"] = serving.age()
    return JSONResponse(content, 503)


@router.get("/version")
async def version() -> JSONResponse:
    return JSONResponse({"version": __version__})


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """What the engine is doing, in numbers."""
    serving = serving_of(request)
    serving.info()
    return JSONResponse(await serving.engine.snapshot())


@router.get("/metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of the whole server, whichever of its processes answers."""
    serving = serving_of(request)
    serving.info()
    serving.send_counts()
    return Response(await serving.engine.metrics(), media_type=METRICS_TYPE)
