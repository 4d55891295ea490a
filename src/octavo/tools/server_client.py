"""Talks to a running server with the standard library alone: what `octavo chat`, `complete` and `run-batch` need."""

import http.client
import json
import socket
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from octavo import env
from octavo.errors import InvalidConfig, InvalidRequest, OctavoError, shown

DEFAULT_URL = "http://localhost:8000"
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 3600.0  # a long prompt on a busy server


class NoAnswer(OctavoError):
    """The server cannot be reached, or the connection ended before the answer did."""

    status = 503


class Refused(OctavoError):
    """The server answered with an error; `body` is what it sent."""

    def __init__(self, status: int, message: str, body: Any, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status, self.body, self.headers = status, body, headers


class Server:
    """A server at a URL, with or without /v1 at its end, or at a Unix socket (unix:PATH).

    Raises:
        InvalidConfig: no URL.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.path = url[5:] if url.startswith("unix:") else ""
        parts = urlsplit(self.url)
        try:
            self._place = (parts.hostname or "", parts.port)
        except ValueError as error:
            raise InvalidConfig(f"{shown(url)} is not a URL: {error}.") from None
        if not self.path and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise InvalidConfig(f"{shown(url)} is not a URL.", f"Give one such as {DEFAULT_URL}.")
        self._secure, self._prefix = parts.scheme == "https", "" if self.path else parts.path
        key = api_key or env.client_api_key()
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidConfig("The API key has characters that no HTTP header can carry.")
        self.headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def _connect(self) -> http.client.HTTPConnection:
        if self.path:
            return _UnixConnection(self.path)
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(*self._place, timeout=CONNECT_SECONDS)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.request(method, self._prefix + path, body, self.headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            hint = "Start one with octavo serve, or give its address with --url."
            raise NoAnswer(f"No server answers at {self.url}: {error or type(error).__name__}.", hint) from None

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content, whatever the status is.

        Raises:
            NoAnswer: there was none.
        """
        connection = self._connect()
        try:
            data = None if body is None else json.dumps(body).encode()
            response = self._request(connection, method, path, data)
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"The connection to {self.url} ended early: {error or type(error).__name__}.") from None
        finally:
            connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, _decoded(content)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The content of a good answer.

        Raises:
            NoAnswer: there was none.
            Refused: the server's own words.
        """
        status, headers, content = self.call(method, path, body)
        if status >= 400:
            raise Refused(status, _message(status, content), content, headers)
        return content

    def model(self) -> str:
        """The name of the model that the server reports first."""
        found = self.ask("GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError):
            raise NoAnswer(f"{self.url} names no model: {shown(found)}.", "Name one with --model.") from None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of a streamed answer; closing the iterator ends the request.

        Raises:
            NoAnswer: the connection ended before the answer did.
            Refused: an error, before or in the stream.
        """
        connection = self._connect()
        try:
            response = self._request(connection, "POST", path, json.dumps({**body, "stream": True}).encode())
            if response.status >= 400:
                content = _decoded(response.read())
                raise Refused(response.status, _message(response.status, content), content, dict(response.getheaders()))
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = _decoded(data)
                if isinstance(chunk, dict) and "error" not in chunk:
                    yield chunk
                else:
                    raise Refused(500, _message(500, chunk), chunk, {})
            raise NoAnswer(f"The answer of {self.url} ended early.")
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"The connection to {self.url} ended early: {error or type(error).__name__}.") from None
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self.unix_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.unix_path)


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content.decode(errors="replace")


def _message(status: int, content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    if isinstance(error, str):
        return error
    return f"The server answered with status {status}: {shown(content, 300)}."


def sampling(**given: Any) -> dict[str, Any]:
    """Request fields of those options that were given; the server's defaults hold for the others.

    Raises:
        InvalidRequest: a negative number of tokens, which no server is asked for.
    """
    if (given.get("max_tokens") or 0) < 0:
        raise InvalidRequest(f"max_tokens={given['max_tokens']} is not allowed: it must be above 0.")
    return {name: value for name, value in given.items() if value is not None and value != ()}
