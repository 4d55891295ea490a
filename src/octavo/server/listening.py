"""The listening socket, which all API processes share, and the address that clients type."""

import contextlib
import errno
import os
import socket
import ssl
from pathlib import Path

from octavo.errors import InvalidConfig
from octavo.findings.machine import HIGH_PORT, OTHER_HOST, OTHER_PATH, OTHER_PORT, cannot_listen
from octavo.server.options import ServerOptions

BACKLOG = 2048
LISTENING = "0A"  # the state in /proc/net/tcp


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
        holder, mend = "", OTHER_PATH if options.uds else OTHER_HOST
        if not options.uds and error.errno == errno.EADDRINUSE:
            holder, mend = holder_of(options.port), OTHER_PORT
        elif not options.uds and error.errno in (errno.EACCES, errno.EPERM):
            mend = HIGH_PORT
        reason = (error.strerror or str(error)).partition(" (while")[0]  # what follows repeats the place
        raise cannot_listen(where, reason, holder, mend).as_error() from None


def check_certificate(options: ServerOptions) -> None:
    """
    Raises:
        InvalidConfig: the certificate or its key cannot be read, or they do not belong together.
    """
    if options.ssl_certfile is None:
        return
    try:
        # An empty password: a key that has one would wait for somebody to type it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: "")
    except OSError as error:
        key = f" with ssl_keyfile={options.ssl_keyfile}" if options.ssl_keyfile else ""
        raise InvalidConfig(
            f"ssl_certfile={options.ssl_certfile}{key} cannot be used: {error.strerror or error}.",
            "Give a certificate and its key as PEM files without a password.",
        ) from None


def holder_of(port: int) -> str:
    """The process that listens there, as "NAME (pid 123)"; empty where it is another user's or nothing is found."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # of another user, or it has ended
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


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
