"""The API against what schemathesis makes of its own description: no 5xx, errors in one shape, the engine untouched."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings

import tiny_tokenizers
from octavo.server import http_limits
from octavo.server.app import build
from octavo.server.options import ServerOptions
from stand_in import StandIn

EXAMPLES = 25
ALL = list(HealthCheck)


class Running:
    """The app on a port, with an engine that is played, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.started = folder, 0, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self.thread.start()
        assert self.started.wait(30)

    async def serve(self) -> None:
        self.engine = await StandIn(self.folder).start()
        app = build(ServerOptions(data_dir=str(self.folder / "data")), self.engine)
        config = uvicorn.Config(app, port=0, http=http_limits.protocol(), log_config=None, access_log=False)
        self.server = uvicorn.Server(config)
        task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.started.set()
        await task

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    server = Running(tiny_tokenizers.f_bpe(tmp_path_factory.mktemp("fuzz")))
    yield server
    server.stop()


def fuzz(operation: schemathesis.schemas.APIOperation, running: Running, statuses: set[int]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=ALL)
    @given(case=operation.as_strategy())
    def send(case: schemathesis.Case) -> None:
        answer = case.call(timeout=20)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert running.engine.num_live == 0

    send()


@pytest.mark.case("HTTP-01", "HTTP-02")
def test_whatever_is_sent(running: Running) -> None:
    url = f"http://127.0.0.1:{running.port}"
    operations = [found.ok() for found in schemathesis.openapi.from_url(url + "/openapi.json").get_all_operations()]
    assert len(operations) > 12
    statuses: dict[str, set[int]] = {}
    for operation in operations:
        seen = statuses[operation.label] = set()
        fuzz(operation, running, seen)
        assert httpx.get(url + "/health").status_code == 200
    assert 400 in statuses["POST /v1/completions"] and 200 in statuses["GET /v1/models"]
