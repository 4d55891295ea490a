"""A real server process: `octavo serve` on a free port of this machine, its log, and how it ended."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from octavo import env

START_SECONDS = 90.0
STOP_SECONDS = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


class ServerProcess:
    """`url` is its address; `log` what it wrote to standard error so far."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log_file: Path) -> None:
        self.process, self.port, self.log_file = process, port, log_file
        self.url = f"http://127.0.0.1:{port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_until(self, path: str = "/health", status: int = 200, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + path, timeout=5).status_code == status:
                    return
            assert self.process.poll() is None, f"the server ended: {self.log[-3000:]}"
            assert time.monotonic() < deadline, f"{path} is not {status}: {self.log[-3000:]}"
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The first child that runs this module: octavo.engine.process or octavo.server.process."""
        return next(child for child in self.children() if module in child.cmdline())

    def terminate(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """The exit status."""
        return self.process.wait(seconds)


@contextlib.contextmanager
def running_server(
    model: str | Path,
    *flags: str,
    folder: Path,
    wait: bool = True,
    environment: dict[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """Start, wait for /health, and stop by pid. `folder` takes the log and, unless a flag says otherwise, the data."""
    port = free_port()
    log_file = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    if not any(flag.startswith("--data-dir") for flag in flags):
        command += ["--data-dir", str(folder / f"data-{port}")]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=env.for_child(sys.path) | (environment or {}),
        )
    server = ServerProcess(process, port, log_file)
    children: list[psutil.Process] = []
    try:
        if wait:
            server.wait_until()
        yield server
    finally:
        if process.poll() is None:
            children = server.children()
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.wait(STOP_SECONDS)


TINY_FLAGS = (
    "--dtype=float32",
    "--max-model-len=512",
    "--kv-cache-memory-bytes=32M",
    "--num-threads=1",
    "--shutdown-timeout=5",
)
"""What a server of a tiny model needs."""

SMOLLM2_FLAGS = ("--max-model-len=2048", "--kv-cache-memory-bytes=256M", "--num-threads=1", "--shutdown-timeout=5")
