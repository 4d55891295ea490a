"""Starts the engine process and the API processes, turns signals into their end, and ends when one of them does."""

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from octavo import env, log
from octavo.config import EngineConfig
from octavo.engine import protocol
from octavo.errors import EngineDead
from octavo.findings import machine
from octavo.findings.finding import Finding
from octavo.server.listening import address, listen
from octavo.server.options import OPTIONS_FILE, ServerOptions

logger = logging.getLogger("octavo")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONGEST_PATH = 80  # of the private folder: the path of a Unix socket has a hundred characters or so
NEWS_SECONDS = 0.5  # that API processes have to tell clients of a dead engine before they end
LOOK = "The lines above say more; `octavo doctor` looks for causes."
BY_SIGNAL: dict[int, Callable[[], Finding]] = {
    signal.SIGKILL: machine.killed,
    signal.SIGILL: machine.illegal_instruction,
    signal.SIGBUS: machine.bus_error,
}
END_SECONDS = 5.0  # for a child that was told to end; then it is killed


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]

    def say(self, word: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            _stdin(self.process).write(word)

    def end(self) -> None:
        """Closes its standard input, which ends it, and waits."""
        with contextlib.suppress(OSError):
            _stdin(self.process).close()

    def how_it_ended(self, folder: Path) -> str:
        """The cause that it left behind, else what its exit status tells, and the mend."""
        left = folder / protocol.CAUSE_FILE
        if left.exists():
            return left.read_text()
        status = self.process.poll() or 0
        if status < 0:
            known = BY_SIGNAL.get(-status)
            return f"{self.name} was killed by {signal.Signals(-status).name}. {known().line if known else LOOK}"
        return f"{self.name} ended with status {status}. {LOOK}"


def _stdin(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdin is not None
    return child.stdin


def supervise(engine: EngineConfig, options: ServerOptions) -> int:
    """Serve until a signal or the end of a child; returns the exit status.

    Raises:
        InvalidConfig: nothing can listen there.
        EngineDead: a child ended by itself; the message has the cause.
    """
    log.set_up(options.log_format)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(options))
        if options.uds:
            stack.callback(Path(options.uds).unlink, missing_ok=True)
        folder = stack.enter_context(_private_folder())
        signals = stack.enter_context(_caught_signals())
        logger.info("Listening on %s; loading the model", address(listening, options))
        return _run(engine, options, listening, folder, signals)


def _run(engine: EngineConfig, options: ServerOptions, listening: socket.socket, folder: Path, signals: int) -> int:
    begin = protocol.EngineStart(
        config=engine,
        served_names=options.served_model_name,
        metrics_prefixes=options.metrics_prefixes,
        log_stats=not options.disable_log_stats,
        log_requests=options.enable_log_requests,
        log_format=options.log_format,
        otlp_traces_endpoint=options.otlp_traces_endpoint or "",
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=options.max_num_queued_tokens,
        stall_timeout=options.stall_timeout,
        profile_dir=options.profile_dir or "",
    )
    (folder / protocol.ENGINE_FILE).write_bytes(msgspec.json.encode(begin))
    (folder / OPTIONS_FILE).write_bytes(msgspec.json.encode(options))
    # The engine holds the writing end for as long as it lives: its end is seen at once by all that read.
    alive, held = os.pipe()
    engine_child = _start("The engine process", "octavo.engine.process", [folder], [held])
    os.close(held)
    apis = [
        _start(
            f"API process {index}",
            "octavo.server.process",
            [folder, index, listening.fileno(), alive],
            [listening.fileno(), alive],
        )
        for index in range(options.api_server_count)
    ]
    os.close(alive)
    try:
        return _watch(engine_child, apis, folder, signals, options.shutdown_timeout)
    finally:
        for child in [*apis, engine_child]:
            child.end()
        _wait([*apis, engine_child], END_SECONDS)
        for child in [*apis, engine_child]:
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()


def _watch(engine: Child, apis: list[Child], folder: Path, signals: int, shutdown_timeout: float) -> int:
    """Until all API processes have ended, as a signal asks or because a child failed."""
    deadline: float | None = None  # after the first signal
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([signals], [], [], left)
        news = os.read(signals, 64) if ready else b""
        asked = [number for number in news if number in SIGNALS]
        if asked or (not ready and deadline is not None):
            if deadline is None and len(asked) == 1 and shutdown_timeout > 0:
                logger.info("Shutting down: requests at work have %g s; a second signal ends them", shutdown_timeout)
                deadline = time.monotonic() + shutdown_timeout
                _say(apis, b"d")
            else:
                _say(apis, b"a")
                _wait(apis, END_SECONDS)
                return 0
        ended = [child for child in [engine, *apis] if child.process.poll() is not None]
        if deadline is not None and all(child in ended for child in apis):
            return 0
        if engine in ended:
            time.sleep(NEWS_SECONDS)
            _say(apis, b"a")
            _wait(apis, END_SECONDS)
            raise EngineDead(engine.how_it_ended(folder))
        if ended and deadline is None:
            _say(apis, b"a")
            _wait(apis, END_SECONDS)
            raise EngineDead(ended[0].how_it_ended(folder))


def _say(children: list[Child], word: bytes) -> None:
    for child in children:
        child.say(word)


def _wait(children: list[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _start(name: str, module: str, arguments: list[object], descriptors: list[int]) -> Child:
    command = [sys.executable, "-P", "-m", "octavo.server.child", module, *map(str, arguments)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, pass_fds=descriptors, env=env.for_child(sys.path)
    )
    return Child(name, child)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """For sockets and options; nobody else may enter it."""
    path = tempfile.mkdtemp(prefix="octavo-")
    if len(path) > LONGEST_PATH:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _caught_signals() -> Iterator[int]:
    """A descriptor that brings the number of each signal as a byte, those of ended children too."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, lambda *_: None) for number in (*SIGNALS, signal.SIGCHLD)}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
