"""uvicorn's HTTP protocol with bounds on what comes before a body: size and number of headers, and time."""

import asyncio
import importlib.util
from typing import Any

from octavo.server import errors
from octavo.server.sse import encode

MAX_HEADERS = 200
MAX_HEADER_BYTES = 64 << 10  # of all headers and the address together
HEADER_SECONDS = 30.0  # from the start of a connection or request to the end of its headers


def protocol() -> Any:
    """For `uvicorn.Config(http=...)`: the fast parser with bounds where it is installed.

    h11, the other one, has bounds of its own: 64 KiB for the headers (`h11_max_incomplete_event_size`).
    """
    return _bounded() if importlib.util.find_spec("httptools") else "h11"


def _bounded() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedProtocol(HttpToolsProtocol):
        """Answers 431 once the headers are too many or too large, and drops who does not finish them in time."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.header_bytes = self.num_headers = self.unparsed_bytes = 0
            self.refused = self.in_headers = False
            self.header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self.header_timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.refused:
                return
            in_headers = self.in_headers
            super().data_received(data)
            if in_headers and self.in_headers:  # the parser keeps a header without an end, and tells nobody
                self.unparsed_bytes += len(data)
                if self.unparsed_bytes > 2 * MAX_HEADER_BYTES:
                    self._refuse_headers()

        def on_message_begin(self) -> None:
            self.header_bytes = self.num_headers = self.unparsed_bytes = 0
            self.in_headers = True
            self.header_timer.cancel()
            self.header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            if self._takes(len(url)):
                super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self.num_headers += 1
            if self._takes(len(name) + len(value)):
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self.in_headers = False
            self.header_timer.cancel()
            if not self.refused:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.refused:
                super().on_message_complete()

        def _takes(self, size: int) -> bool:
            self.header_bytes += size
            if self.header_bytes > MAX_HEADER_BYTES or self.num_headers > MAX_HEADERS:
                self._refuse_headers()
            return not self.refused

        def _refuse_headers(self) -> None:
            if self.refused:
                return
            self.refused = True
            what = f"The headers are more than {MAX_HEADERS} or larger than {MAX_HEADER_BYTES} bytes."
            content = encode(errors.body(431, what))
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
            self.transport.close()

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            if self.refused:
                return
            content = encode(errors.body(400, msg))
            head = (
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
            self.transport.close()

    return BoundedProtocol
