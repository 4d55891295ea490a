"""/docs: the API's description as a page that needs nothing from elsewhere."""

from pathlib import Path

from starlette.responses import HTMLResponse

from octavo.server.json_body import Router

router = Router()
OPEN = ("/docs",)  # a static page; what it shows needs a key
PAGE = Path(__file__).with_name("docs.html")


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"))
