"""An engine process of a test's own, and a client of it, without any HTTP."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo import env
from octavo.config import EngineConfig
from octavo.engine import protocol
from octavo.engine.client import EngineClient


class EngineProcess:
    """Started by `running_engine`; `kill` is SIGKILL."""

    def __init__(self, folder: Path, alive: int, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.alive, self.process = folder, alive, process

    @contextlib.asynccontextmanager
    async def client(self, process: str = "0", **options: Any) -> AsyncIterator[EngineClient]:
        client = EngineClient(self.folder, alive=os.dup(self.alive), process=process, **options)
        await client.start()
        try:
            await client.ready()
            yield client
        finally:
            await client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def running_engine(
    model: str | Path,
    *,
    begin: dict[str, Any] | None = None,
    command: list[str] | None = None,
    **options: Any,
) -> Iterator[EngineProcess]:
    """`begin` goes into EngineStart; `command` runs in the place of the engine's module."""
    config = EngineConfig.from_keywords("test", **{"model": str(model), "num_threads": 1, **options})
    with tempfile.TemporaryDirectory(prefix="octavo-") as path:
        folder = Path(path)
        start = protocol.EngineStart(config=config, **(begin or {}))
        (folder / protocol.ENGINE_FILE).write_bytes(msgspec.json.encode(start))
        alive, held = os.pipe()
        process = subprocess.Popen(
            [sys.executable, *(command or ["-m", "octavo.engine.process"]), str(folder)],
            stdin=subprocess.PIPE,
            pass_fds=[held],
            env=env.for_child(sys.path),
        )
        os.close(held)
        try:
            yield EngineProcess(folder, alive, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(alive)
