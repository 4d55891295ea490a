"""Request bodies as strict JSON: what the standard leaves open or forbids is refused, with the field's name."""

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, params
from fastapi.routing import APIRoute
from starlette.responses import Response

from octavo.errors import InvalidRequest, shown
from octavo.server.errors import HTTPError

MAX_CONTAINERS = 250_000  # of lists and objects: each takes some 90 bytes, whatever little is in it


class StrictRoute(APIRoute):
    """A route whose JSON body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None or isinstance(self.body_field.field_info, params.Form):
            return handle

        async def strict(request: Request) -> Response:
            kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                raise HTTPError(
                    415, f"Content-Type {shown(kind)} is not read here.", "Send Content-Type: application/json."
                )
            parsed = _Parsed(request.scope, request.receive)
            parsed.content = parse(await parsed.body())
            return await handle(parsed)

        return strict


class _Parsed(Request):
    content: Any

    async def json(self) -> Any:
        return self.content


class Router(APIRouter):
    """FastAPI's router, with strict JSON bodies."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"route_class": StrictRoute, **options})


def parse(data: bytes) -> Any:
    """A JSON document.

    Raises:
        InvalidRequest: it is empty, no UTF-8, no JSON, too deep, or has NaN, an infinite number or a key twice.
    """
    if not data.strip():
        raise InvalidRequest("The body is empty.", "Send a JSON object.", param="body")
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequest(f"The body has more than {MAX_CONTAINERS} lists and objects.", param="body")
    reader = _Reader()
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=reader.take_object,
            parse_constant=reader.take_constant,
            parse_float=reader.take_float,
        )
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8: byte {error.start} is wrong.", param="body") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", param="body") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", param="body") from None
    except InvalidRequest:
        raise
    except ValueError:  # of an integer with thousands of digits
        raise InvalidRequest("The body has a number with too many digits.", param="body") from None
    if reader.bad_number:
        raise InvalidRequest(f"{reader.bad_number} is no JSON number.", param="body")
    return value


class _Reader:
    """Takes the parts of a document as they are read, innermost first."""

    def __init__(self) -> None:
        self.bad_number = ""  # as it is written

    def take_constant(self, text: str) -> float:
        self.bad_number = text
        return math.nan

    def take_float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.bad_number = shown(text).strip("'")
        return value

    def take_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            seen: set[str] = set()
            key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidRequest(f"The key {shown(key)} is there twice.", param=key[:80])
        if self.bad_number:
            key = next((key for key, value in pairs if _has_bad_number(value)), "body")
            raise InvalidRequest(f"{shown(key).strip(chr(39))}: {self.bad_number} is no JSON number.", param=key[:80])
        return values


def _has_bad_number(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_bad_number(item) for item in value)
    return isinstance(value, float) and not math.isfinite(value)
