"""/v1/batches: OpenAI's Batch API over the completion endpoints; it survives restarts."""

import asyncio
import re
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from octavo.batch_lines import ENDPOINTS, raw_lines
from octavo.errors import InvalidRequest, shown
from octavo.server.batch_folder import store_of, tenant_of
from octavo.server.batch_runner import Runner
from octavo.server.batch_store import NotFound, Row, Store
from octavo.server.files import lifetime, page
from octavo.server.json_body import Router

router = Router(tags=["Batches"])

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW = 30 * 86400
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip


class Expiry(BaseModel):
    anchor: str
    seconds: int


class BatchRequest(BaseModel):
    """What makes a batch. Other fields are ignored."""

    model_config = ConfigDict(extra="allow")

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: Expiry | None = None


def shape(row: Row) -> dict[str, Any]:
    used = row["prompt_tokens"], row["completion_tokens"]
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "model": row["model"],
        "errors": row["errors"] and msgspec.json.decode(row["errors"]),
        "input_file_id": row["input_file_id"],
        "completion_window": row["completion_window"],
        "status": row["status"],
        "output_file_id": row["output_file_id"],
        "error_file_id": row["error_file_id"],
        **{name: row[name] for name in TIMES},
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        "usage": {
            "input_tokens": used[0],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(used),
        },
        "metadata": row["metadata"] and msgspec.json.decode(row["metadata"]),
    }


def window_seconds(window: str) -> int:
    """The time a batch has.

    Raises:
        InvalidRequest: no number with a unit, or out of range.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", window, re.ASCII)
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW:
        raise InvalidRequest(
            f"completion_window={shown(window)} is not allowed: it must be a time such as 24h or 30m, up to 30d.",
            param="completion_window",
        )
    return seconds


@router.post("/v1/batches")
async def create(body: BatchRequest, request: Request) -> JSONResponse:
    """Start a batch over an uploaded file."""
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(
            f"endpoint={shown(body.endpoint)} is not allowed: it must be {' or '.join(ENDPOINTS)}.", param="endpoint"
        )
    seconds = window_seconds(body.completion_window)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in metadata.items()):
        raise InvalidRequest(
            f"metadata holds at most {MAX_METADATA} pairs, keys of {MAX_KEY} and values of {MAX_VALUE} characters.",
            param="metadata",
        )
    expiry = body.output_expires_after
    kept = expiry and lifetime(expiry.anchor, expiry.seconds, "output_expires_after")
    store, tenant = store_of(request.app), tenant_of(request)
    try:
        file = await asyncio.to_thread(store.file, body.input_file_id, tenant)
    except NotFound as error:
        raise InvalidRequest(error.message, param="input_file_id") from None
    if file["purpose"] != "batch":
        raise InvalidRequest(f"The file {file['id']} is not of purpose batch.", param="input_file_id")
    limit = request.app.state.options.max_batch_requests
    if await asyncio.to_thread(_has_more_lines, store, file["id"], limit):
        raise InvalidRequest(
            f"The file has more than {limit} lines.", "Split it, or raise --max-batch-requests.", param="input_file_id"
        )
    row = await asyncio.to_thread(
        store.add_batch, tenant, request.app.state.engine.info.served_names[0], seconds,
        endpoint=body.endpoint, input_file_id=file["id"], completion_window=body.completion_window,
        metadata=msgspec.json.encode(metadata).decode() if body.metadata is not None else None, output_lifetime=kept,
    )  # fmt: skip
    return JSONResponse(shape(row))


def _has_more_lines(store: Store, file_id: str, limit: int) -> bool:
    with open(store.path(file_id), "rb") as file:
        return any(count >= limit for count, _ in enumerate(raw_lines(file)))


@router.get("/v1/batches")
async def index(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query()] = None,
) -> JSONResponse:
    """The batches of the asking key, newest first."""
    store = store_of(request.app)
    rows, more = await asyncio.to_thread(store.list_batches, tenant_of(request), limit, after)
    return page([shape(row) for row in rows], more)


@router.get("/v1/batches/{batch_id}")
async def retrieve(batch_id: str, request: Request) -> JSONResponse:
    store = store_of(request.app)
    return JSONResponse(shape(await asyncio.to_thread(store.batch, batch_id, tenant_of(request))))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request) -> JSONResponse:
    """Stop a batch; what is answered already is kept."""
    store, tenant = store_of(request.app), tenant_of(request)
    row = await asyncio.to_thread(store.batch, batch_id, tenant)
    moved = await asyncio.to_thread(store.move, batch_id, "cancelling", ("validating", "in_progress"))
    row = await asyncio.to_thread(store.batch, batch_id, tenant)
    if not moved and row["status"] not in ("cancelling", "cancelled"):
        raise InvalidRequest(f"The batch {batch_id} is {row['status']} and cannot be cancelled.", param="batch_id")
    return JSONResponse(shape(row))


async def background(app: FastAPI) -> None:
    """Run batches while this process is the one that does."""
    options = app.state.options
    await Runner(app, store_of(app), app.state.engine, options.batch_concurrency).run()
