"""GET /v1/models: the names under which this server's model may be called."""

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse

from octavo.server.json_body import Router
from octavo.server.serving import Serving, serving_of

router = Router(tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    serving = serving_of(request)
    serving.info()
    return JSONResponse({"object": "list", "data": [_shape(serving, name) for name in serving.names]})


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> JSONResponse:
    serving = serving_of(request)
    serving.info()
    return JSONResponse(_shape(serving, serving.model(model)))


def _shape(serving: Serving, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{serving.started}",
        "object": "model_permission",
        "created": serving.started,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    info = serving.engine.info
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "octavo",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [permission],
    }
