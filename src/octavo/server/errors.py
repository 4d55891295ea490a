"""Every error of the server in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; there is no 422."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.errors import EngineDead, InvalidRequest, OctavoError, Overloaded, ShuttingDown, TimedOut, shown

logger = logging.getLogger("octavo")

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    499: "ClientClosedRequestError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class HTTPError(OctavoError):
    """An error of the HTTP layer. `code` is what programs may look at; the status where nothing finer is known."""

    def __init__(
        self,
        status: int,
        message: str,
        hint: str = "",
        *,
        param: str = "",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})


def body(status: int, message: str, param: str = "", code: str | None = None) -> dict[str, Any]:
    """The error object, for a response or for an event in a stream."""
    message = message.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no JSON
    param = param.encode("utf-8", "backslashreplace").decode()
    error = {
        "message": message,
        "type": TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError"),
        "param": param or None,
        "code": status if code is None else code,
    }
    return {"error": error}


def described(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and error object of an exception; one that nobody foresaw is logged and told without its text."""
    if isinstance(error, OctavoError):
        return error.status, body(error.status, str(error), getattr(error, "param", ""), getattr(error, "code", None))
    logger.error("A request failed with an internal error.", exc_info=error)
    return 500, body(500, "An internal error ended this request; the server's log has the cause.")


def response(error: BaseException) -> Response:
    """The answer to a request that ends with this exception."""
    status, content = described(error)
    headers = dict(getattr(error, "headers", {}))
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, ShuttingDown):
        headers["retry-after"] = "1"
    elif isinstance(error, EngineDead | TimedOut):  # the same request would fare no better
        headers["x-should-retry"] = "false"
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Let the app answer every exception in this shape."""
    app.add_exception_handler(OctavoError, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)


async def _answer(_: Request, error: Exception) -> Response:
    return response(error)


async def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response(invalid(error.errors()))


def invalid(found: Any) -> InvalidRequest:
    """The first of pydantic's errors, as everybody else words them."""
    first = found[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, InvalidRequest):  # a check of our own
        return own
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = ".".join(where)
    if not param:
        return InvalidRequest("The body must be a JSON object.", param="body")
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing.", param=param)
    what = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return InvalidRequest(f"{param}={shown(first['input'])} is not allowed: it {what}.", param=param)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    messages = {
        404: f"There is nothing at {path}.",
        405: f"{request.method} is not allowed at {path}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    return response(HTTPError(error.status_code, message, headers=error.headers))
