"""Control routes: they exist only with --admin-api-key, and only that key opens them."""

from collections.abc import Awaitable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from octavo.errors import OctavoError
from octavo.server.errors import HTTPError

router = APIRouter(tags=["Control"])
ADMIN = True


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes; running requests go on."""
    await request.app.state.engine.reset_prefix_cache()
    return Response(status_code=200)


@router.post("/start_profile")
async def start_profile(request: Request) -> JSONResponse:
    """Begin to record what the engine process does. The folder is the server's --profile-dir, not the request's."""
    return JSONResponse({"path": await _done(request.app.state.engine.start_profile())})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> JSONResponse:
    """Write the recording down; `path` is the file, on the server."""
    return JSONResponse({"path": await _done(request.app.state.engine.stop_profile())})


async def _done(work: Awaitable[str]) -> str:
    """
    Raises:
        HTTPError: 409, the engine is in a state that does not allow it.
    """
    try:
        return await work
    except OctavoError as error:
        if error.status == 500:  # the engine's own refusal, as it came over the wire
            raise HTTPError(409, str(error)) from None
        raise
