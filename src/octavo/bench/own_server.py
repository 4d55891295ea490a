"""A server that a benchmark starts for itself on a free port of this machine, and ends."""

import ctypes
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from octavo import env
from octavo.errors import OctavoError
from octavo.tools.server_client import NoAnswer, Server

STOP_SECONDS = 60.0
PR_SET_PDEATHSIG = 1


class OwnServer:
    """`octavo serve` with these options; entering waits until it is ready, leaving ends it. Its words go to `log`."""

    def __init__(self, options: Mapping[str, Any], log: Path, ready_seconds: float = 3600.0) -> None:
        self.options, self.log, self.ready_seconds = options, log, ready_seconds
        self.port = 0
        self._key = secrets.token_hex(16)
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-sweep-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """
        Raises:
            OctavoError: it ended before it was ready; the message is its own last line.
        """
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        place = {"host": "127.0.0.1", "port": self.port, "admin_api_key": self._key, "data_dir": self._folder.name}
        file = Path(self._folder.name) / "options.yaml"  # a file, so that no process list shows the key
        file.write_text(yaml.safe_dump({**self.options, **place}))
        file.chmod(0o600)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "octavo", "serve", "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env.for_child(sys.path),
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def reset_prefix_cache(self) -> None:
        Server(f"http://127.0.0.1:{self.port}", self._key).ask("POST", "/reset_prefix_cache")

    def _wait(self) -> None:
        server, deadline = Server(f"http://127.0.0.1:{self.port}"), time.monotonic() + self.ready_seconds
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                lines = self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise OctavoError(f"The server ended before it was ready: {lines[-1].removeprefix('octavo: ')}")
            try:
                if server.call("GET", "/health")[0] == 200:
                    return
            except NoAnswer:
                pass
            time.sleep(0.1)
        raise OctavoError(f"The server was not ready after {self.ready_seconds:g} s.", f"See {self.log}.")


def _end_with_parent() -> None:
    """A benchmark that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
