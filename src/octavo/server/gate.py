"""The outermost layer of the server: request ids, keys, the size of bodies, the count of requests, last errors."""

import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server import errors
from octavo.server.auth import IS_ADMIN, TENANT, Keys, key_of, unauthorized
from octavo.server.errors import HTTPError

REQUEST_ID = "octavo.request_id"
_ACCEPTABLE_ID = re.compile(rb"[!-~]{1,128}")  # one line of a log, and no more

Count = Callable[[str, str, int, float], None]


class Gate:
    """ASGI middleware.

    `open_paths` need no key; one that ends in "/" and is longer opens all paths under it. `max_body_bytes`
    holds for all bodies but those of `unlimited_paths`, whose routes count by themselves. `count` gets
    method, route template, status and seconds of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        max_body_bytes: int,
        open_paths: Sequence[str] = (),
        unlimited_paths: Sequence[str] = (),
        count: Count | None = None,
    ) -> None:
        self.app, self.keys, self.max_body_bytes, self.count = app, keys, max_body_bytes, count
        self.open_paths = frozenset(open_paths)
        self.open_folders = tuple(path for path in open_paths if len(path) > 1 and path.endswith("/"))
        self.unlimited_paths = frozenset(unlimited_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ACCEPTABLE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        scope[REQUEST_ID] = request_id.decode()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._admit(scope, headers)
            limit = None if scope["path"] in self.unlimited_paths else self.max_body_bytes
            await self.app(scope, _limited(receive, headers, limit), answer)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            if status:  # too late for another answer: the connection is cut, which a client can see
                raise
            await errors.response(error)(scope, receive, answer)
        finally:
            if self.count is not None:
                route = getattr(scope.get("route"), "path", "") or "unknown"
                self.count(scope["method"], route, status or 499, time.perf_counter() - begin)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if TENANT in scope:  # a call from inside the process
            return
        path = scope["path"]
        found = self.keys.tenant(path, key_of(headers))
        if found is None:
            if path not in self.open_paths and not path.startswith(self.open_folders or ("\0",)):
                raise unauthorized()
            found = "", False
        scope[TENANT], scope[IS_ADMIN] = found


def _limited(receive: Receive, headers: dict[bytes, bytes], limit: int | None) -> Receive:
    """`receive`, which raises once a body has more than `limit` bytes, or says that it will have."""
    if limit is None:
        return receive
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    taken = 0

    async def count() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise _too_large(limit)
        return message

    return count


def _too_large(limit: int) -> HTTPError:
    return HTTPError(
        413,
        f"The body is larger than {limit} bytes.",
        "Raise --max-body-bytes when the server starts.",
        param="body",
        headers={"connection": "close"},
    )
