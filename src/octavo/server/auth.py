"""Who may call what: keys of users, of the administrator and of the metrics scraper."""

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import Request

from octavo.errors import InvalidConfig
from octavo.server.errors import HTTPError

METRICS = "/metrics"
TENANT = "octavo.tenant"  # of the ASGI scope: whose request it is
IS_ADMIN = "octavo.is_admin"


class Keys:
    """The keys of a server; without any, everybody may call everything but the control routes.

    Raises:
        InvalidConfig: a key that no HTTP header can carry.
    """

    def __init__(
        self,
        users: Iterable[str] = (),
        admin: str | None = None,
        metrics: str | None = None,
        metrics_open: bool = False,
    ) -> None:
        self._users = [_digest(_checked("api_key", key)) for key in users]
        self._admin = _digest(_checked("admin_api_key", admin)) if admin is not None else None
        self._metrics = _digest(_checked("metrics_key", metrics)) if metrics is not None else None
        self._metrics_open = metrics_open

    def tenant(self, path: str, key: str) -> tuple[str, bool] | None:
        """Whose request this is, and whether it is the administrator's; None where the key does not open `path`.

        The tenant is "" as long as there are fewer than two keys to tell apart, else a digest of the key.
        """
        digest = _digest(key)
        # All are compared, and whole, so that the time taken tells nothing.
        user = sum(hmac.compare_digest(digest, known) for known in self._users) > 0
        admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        metrics = self._metrics is not None and hmac.compare_digest(digest, self._metrics)
        if path == METRICS and (metrics or self._metrics_open):
            return "", False
        if not (user or admin or self._is_open(path)):
            return None
        several = len(self._users) + (self._admin is not None) > 1
        return digest.hex()[:16] if several and (user or admin) else "", admin

    def _is_open(self, path: str) -> bool:
        return not self._users and (path != METRICS or self._metrics is None)


def key_of(headers: dict[bytes, bytes]) -> str:
    """The key that a request carries: `Authorization: Bearer KEY`, or `x-api-key`."""
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


def unauthorized() -> HTTPError:
    return HTTPError(
        401,
        "This needs a valid API key.",
        "Send it as the header Authorization: Bearer KEY.",
        headers={"www-authenticate": "Bearer"},
    )


async def require_admin(request: Request) -> None:
    """Dependency of control routes: only the administrator's key opens them.

    Raises:
        HTTPError: another key, or none.
    """
    if not request.scope.get(IS_ADMIN):
        raise unauthorized()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _checked(name: str, key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise InvalidConfig(f"{name} must be printable ASCII without spaces around it; a given key is not.")
    return key
