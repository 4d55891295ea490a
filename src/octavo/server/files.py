"""/v1/files: the input and output files of batches, in OpenAI's form."""

import asyncio
import uuid
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import FileResponse, JSONResponse

from octavo.errors import InvalidRequest, shown
from octavo.server import upload
from octavo.server.batch_folder import store_of, tenant_of
from octavo.server.batch_store import NotFound, Row
from octavo.server.json_body import Router

router = Router(tags=["Batches"])
OWN_BODY_LIMIT = ("/v1/files",)

MIN_LIFETIME, MAX_LIFETIME = 3600, 30 * 86400
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_LIFETIME, "maximum": MAX_LIFETIME},
                    },
                }
            }
        },
    }
}


def shape(row: Row) -> dict[str, Any]:
    names = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    return {"object": "file", **{name: row[name] for name in names}, "status": "processed", "status_details": None}


def page(items: list[dict[str, Any]], more: bool) -> JSONResponse:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": items, **ends, "has_more": more})


def lifetime(anchor: object, seconds: object, name: str) -> int | None:
    """Seconds that a file is kept, from OpenAI's two fields of it; None is for ever.

    Raises:
        InvalidRequest: only one of them, another anchor, or a time out of range.
    """
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            f"{name}.anchor={shown(anchor)} is not allowed: it must be created_at.", param=f"{name}.anchor"
        )
    text = str(seconds)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not MIN_LIFETIME <= int(text) <= MAX_LIFETIME:
        raise InvalidRequest(
            f"{name}.seconds={shown(seconds)} is not allowed: it must be {MIN_LIFETIME} to {MAX_LIFETIME}.",
            param=f"{name}.seconds",
        )
    return int(text)


@router.post("/v1/files", openapi_extra=FORM)
async def create(request: Request) -> JSONResponse:
    """Upload the input file of a batch."""
    store = store_of(request.app)
    file_id = f"file-{uuid.uuid4().hex[:24]}"
    path, part = store.path(file_id), store.path(f"{file_id}.part")
    form = await upload.receive(request, part, request.app.state.options.max_file_bytes)
    try:
        purpose = form.fields.get("purpose")
        if purpose != "batch":
            raise InvalidRequest(f"purpose={shown(purpose)} is not allowed: it must be batch.", param="purpose")
        if not form.size:
            raise InvalidRequest("The file is empty.", param="file")
        fields = form.fields
        kept = lifetime(fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]"), "expires_after")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    tenant, name = tenant_of(request), form.filename or "file"
    row = await asyncio.to_thread(store.add_file, file_id, tenant, purpose, name, form.size, kept)
    return JSONResponse(shape(row))


@router.get("/v1/files")
async def index(
    request: Request,
    purpose: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: Annotated[str | None, Query()] = None,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> JSONResponse:
    """The files of the asking key."""
    store = store_of(request.app)
    tenant = tenant_of(request)
    rows, more = await asyncio.to_thread(store.list_files, tenant, limit, after, purpose, order == "asc")
    return page([shape(row) for row in rows], more)


@router.get("/v1/files/{file_id}")
async def retrieve(file_id: str, request: Request) -> JSONResponse:
    store = store_of(request.app)
    return JSONResponse(shape(await asyncio.to_thread(store.file, file_id, tenant_of(request))))


@router.get("/v1/files/{file_id}/content")
async def content(file_id: str, request: Request) -> FileResponse:
    """The bytes of a file."""
    store = store_of(request.app)
    row = await asyncio.to_thread(store.file, file_id, tenant_of(request))
    path = store.path(row["id"])
    if not path.is_file():
        raise NotFound(f"The content of the file {row['id']} is gone.")
    return FileResponse(path, media_type="application/octet-stream", filename=row["filename"])


@router.delete("/v1/files/{file_id}")
async def delete(file_id: str, request: Request) -> JSONResponse:
    store = store_of(request.app)
    await asyncio.to_thread(store.delete_file, file_id, tenant_of(request))
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})
