"""GET /: the web page, a playground and a live view of the engine. Plain files, nothing from elsewhere."""

from pathlib import Path

from starlette.responses import Response

from octavo.server.errors import HTTPError
from octavo.server.json_body import Router

router = Router()
OPEN = ("/", "/page/")  # static files; what they show of the engine needs a key

FOLDER = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Only our own files run or load, nothing inline; whatever a model writes stays text.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def index() -> Response:
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def asset(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES}
    if name not in known:
        raise HTTPError(404, "There is no such file of the page.")
    path = known[name]
    return Response(path.read_bytes(), headers=HEADERS, media_type=TYPES[path.suffix])
