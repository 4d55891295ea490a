"""The listening socket, which all API processes share, and the address that clients type."""

import contextlib
import socket
from pathlib import Path

from octavo.errors import InvalidConfig
from octavo.server.options import ServerOptions

BACKLOG = 2048


def listen(options: ServerOptions) -> socket.socket:
    """
    Raises:
        InvalidConfig: the place is taken, or is none.
    """
    try:
        if options.uds:
            return _listen_on_path(options.uds)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = options.uds or f"port {options.port} of {options.host}"
        raise InvalidConfig(
            f"Cannot listen on {where}: {error.strerror or error}.", "Stop what is there, or choose another."
        ) from None


def _listen_on_path(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as other:
        other.connect(path)
        raise OSError(f"{path} is in use")
    if Path(path).is_socket():  # left behind by a server that was killed
        Path(path).unlink()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(BACKLOG)
    return listening


def address(listening: socket.socket, options: ServerOptions) -> str:
    """What a client on this machine types."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{options.uds}"
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
