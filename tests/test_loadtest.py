"""The Locust file of deploy/loadtest, run for some seconds against a real server of a tiny model."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from octavo import env
from server_process import TINY_FLAGS, ServerProcess, running_server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is not installed (it is in the dev extra)"
)

LOCUSTFILE = Path(__file__).parent.parent / "deploy" / "loadtest" / "locustfile.py"
KEY = "load-key-77"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_tokenizers.f_bpe(tiny_models.save(tiny_models.oracle(), tmp_path_factory.mktemp("model")))
    with running_server(folder, *TINY_FLAGS, "--api-key", KEY, folder=folder) as server:
        yield server


def locust(server: ServerProcess, key: str, *users: str, seconds: int) -> tuple[int, dict[tuple[str, str], Any]]:
    """The exit status, and the rows by kind and name."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", server.url, "--headless", "--json"]
    command += ["-u", "6", "-r", "6", "-t", f"{seconds}s", "--max-tokens", "8", "--prompt-words", "5"]
    done = subprocess.run(
        [*command, *users],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env=env.for_child([]) | {"OCTAVO_API_KEY": key},
    )
    rows = json.loads(done.stdout)
    assert key not in done.stdout.decode() + done.stderr.decode()
    return done.returncode, {(row["method"], row["name"]): row for row in rows}


def test_users_of_every_kind(server: ServerProcess) -> None:
    status, rows = locust(server, KEY, seconds=5)
    assert status == 0, rows
    whole = ("POST", "/v1/chat/completions (streamed)")
    first, each = rows["TTFT", whole[1]], rows["TPOT", whole[1]]
    assert {("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), whole} <= set(rows)
    assert all(row["num_requests"] > 0 and row["num_failures"] == 0 for row in rows.values())
    assert rows[whole]["num_requests"] >= first["num_requests"] >= each["num_requests"]
    assert 0 < first["total_response_time"] < rows[whole]["total_response_time"]
    tokens_after = 7 * each["total_response_time"]
    assert tokens_after < rows[whole]["total_response_time"]


def test_refused_users_are_failures(server: ServerProcess) -> None:
    status, rows = locust(server, "wrong-key-5", "--model", "x", "ChatUser", "StreamingUser", seconds=2)
    assert status == 1 and set(rows) == {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions (streamed)"),
    }
    assert all(row["num_failures"] == row["num_requests"] > 0 for row in rows.values())
