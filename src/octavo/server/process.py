"""One API process: HTTP on the shared listening socket. `python -m octavo.server.process FOLDER INDEX SOCKET ALIVE`.

SOCKET and ALIVE are inherited descriptors: the listening socket, and the pipe that ends with the engine process.
Standard input is the supervisor's word: "d" drains, "a" ends what is at work, and its end means that the
supervisor is gone. FOLDER/server.json has the options.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn

from octavo import log
from octavo.engine.client import EngineClient
from octavo.errors import EngineDead, OctavoError
from octavo.server import http_limits
from octavo.server.app import build
from octavo.server.listening import BACKLOG, address
from octavo.server.options import OPTIONS_FILE, ServerOptions

logger = logging.getLogger("octavo")

DRAIN_LOG_SECONDS = 5.0  # between lines about what is still at work
WATCH_SECONDS = 0.5
FLUSH_SECONDS = 2  # for answers that are being sent when the server ends


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(folder: Path, index: int, listening: socket.socket, alive: int) -> None:
    """Until the supervisor says that it is over."""
    options = msgspec.json.decode((folder / OPTIONS_FILE).read_bytes(), type=ServerOptions)
    log.set_up(options.log_format, f"api-{index}")
    client = EngineClient(folder, alive=alive, process=str(index), stall_timeout=options.stall_timeout)
    await client.start()
    server = HttpServer(
        uvicorn.Config(
            build(options, client),
            loop="none",
            http=http_limits.protocol(),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=options.uvicorn_log_level,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=options.timeout_keep_alive,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
    )
    tasks: set[asyncio.Task[None]] = set()

    async def drain() -> None:
        client.drain()
        while client.num_live:
            logger.info("Draining: %d requests at work", client.num_live)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.idle(), DRAIN_LOG_SECONDS)
        server.should_exit = True

    async def end_on_stall() -> None:
        while client.state != "stuck":
            await asyncio.sleep(WATCH_SECONDS)
        client.end(client.why)
        server.should_exit = True

    def obey() -> None:
        word = os.read(0, 1)
        if word == b"d":
            tasks.add(asyncio.create_task(drain()))
        elif word == b"a":
            client.end("The server was shut down.")
            server.should_exit = True
        else:
            os._exit(1)

    asyncio.get_running_loop().add_reader(0, obey)
    if index == 0:
        tasks.add(asyncio.create_task(_say_ready(client, address(listening, options))))
    stall = asyncio.create_task(end_on_stall()) if options.exit_on_stall else None
    await server.serve([listening])
    why = client.why if stall is not None and stall.done() else ""
    await client.close()
    if why:
        raise EngineDead(why)


async def _say_ready(client: EngineClient, where: str) -> None:
    with contextlib.suppress(OctavoError):  # the supervisor says why not
        await client.ready()
        logger.info("%s is ready at %s", client.info.model, where)


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, which takes a fifth of the time, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


def _allow_many_connections() -> None:
    """Each one is an open file; the usual soft limit of 1,024 is for programs that use `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    folder, index, listening, alive = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor decides what they mean
        signal.signal(number, signal.SIG_IGN)
    log.set_up()
    _allow_many_connections()
    with asyncio.Runner(loop_factory=_event_loop()) as runner:
        runner.run(serve(Path(folder), int(index), socket.socket(fileno=int(listening)), int(alive)))


if __name__ == "__main__":
    main()
