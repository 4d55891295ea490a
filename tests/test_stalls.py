"""A real server whose device hangs or breaks, or whose scheduler plans nothing: what probes and clients see."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_process import TINY_FLAGS, ServerProcess, running_server

FLAGS = (*TINY_FLAGS, "--served-model-name=tiny", "--skip-tokenizer-init", "--stall-timeout=1")
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
FAULTY = """
import sys

if "octavo.engine.process" in sys.orig_argv:
    import time
    from pathlib import Path

    from octavo.core.scheduler import Scheduler
    from octavo.executor.inline import Inline

    launch, plan = Inline.launch, Scheduler.plan

    def launch_or_hang(self, step):
        while Path({folder!r}, "hang").exists():
            time.sleep(0.02)
        if Path({folder!r}, "break").exists():
            raise RuntimeError("the forward broke")
        return launch(self, step)

    Inline.launch = launch_or_hang
    Scheduler.plan = lambda self: None if Path({folder!r}, "starve").exists() else plan(self)
"""


class Answer(threading.Thread):
    """A completion that is waited for in a thread."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__()
        self.url, self.fields, self.text = url, fields, ""
        self.start()

    def run(self) -> None:
        self.text = httpx.post(self.url + "/v1/completions", json=BODY | self.fields, timeout=60).text


@contextmanager
def faulty_server(model: Path, folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server whose engine hangs while folder/hang exists, and plans nothing while folder/starve does."""
    code = folder / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(FAULTY.format(folder=str(folder)))
    path = os.pathsep.join([str(code), *filter(None, sys.path)])
    with running_server(model, *FLAGS, *flags, folder=folder, environment={"PYTHONPATH": path}) as server:
        yield server


def metric(text: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.case("OPS-03")
def test_a_step_that_hangs_is_told_while_it_runs(tiny_folder: Path, tmp_path: Path) -> None:
    with faulty_server(tiny_folder, tmp_path) as server, httpx.Client(base_url=server.url, timeout=10) as client:
        used = client.get("/load").json()["kv_blocks"]["used"]
        assert metric(client.get("/metrics").text, "octavo:step_running_seconds") == 0
        (tmp_path / "hang").touch()
        answer = Answer(server.url)
        deadline = time.monotonic() + 10
        while (load := client.get("/load").json())["step_seconds"] == 0:
            assert time.monotonic() < deadline
        assert load["running"] == 1
        assert metric(client.get("/metrics").text, "octavo:step_running_seconds") > 0
        with pytest.raises(httpx.ReadTimeout):  # comes and goes while the step hangs
            client.post("/v1/completions", json=BODY | {"prompt": [8, 9]}, timeout=0.3)
        server.wait_until("/health", 503, 10)
        health = client.get("/health").json()
        assert health["state"] == "stuck" and "A step has run for" in health["error"]["message"]
        assert "1 running" in health["error"]["message"]
        assert client.get("/livez").status_code == 200
        assert client.get("/load").json()["step_seconds"] > 1
        assert "launch_or_hang" in server.log, "the stack is shown"
        (tmp_path / "hang").unlink()
        answer.join(20)
        assert '"finish_reason":"length"' in answer.text
        server.wait_until("/health", 200, 10)
        deadline = time.monotonic() + 10
        while client.get("/load").json()["kv_blocks"]["used"] != used:
            assert time.monotonic() < deadline, "the one that left is still there"
        assert server.log.count("A step has run for") == 1


@pytest.mark.case("SSE-04")
def test_a_forward_that_raises_is_an_error_for_everybody(tiny_folder: Path, tmp_path: Path) -> None:
    with faulty_server(tiny_folder, tmp_path) as server:
        (tmp_path / "hang").touch()
        answers = [Answer(server.url, stream=number < 3, prompt=[number + 3, 5]) for number in range(6)]
        deadline = time.monotonic() + 20
        while (load := httpx.get(server.url + "/load", timeout=10).json())["server_load"] == 0:
            assert time.monotonic() < deadline
        assert load["step_seconds"] >= 0
        (tmp_path / "break").touch()
        (tmp_path / "hang").unlink()
        for number, answer in enumerate(answers):
            answer.join(20)
            assert "the forward broke" in answer.text, answer.text
            assert '"error"' in answer.text and '"finish_reason":"' not in answer.text
            assert answer.text.endswith("data: [DONE]\n\n") == (number < 3 and "data:" in answer.text)
        assert server.wait() == 1
        assert "the forward broke" in server.log.splitlines()[-1]


@pytest.mark.case("OPS-03")
def test_a_hang_ends_the_server_where_that_is_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    with faulty_server(tiny_folder, tmp_path, "--exit-on-stall") as server:
        (tmp_path / "hang").touch()
        answer = Answer(server.url, stream=True)
        assert server.wait(20) == 1
        assert "A step has run for" in server.log.splitlines()[-1]
        answer.join(5)
        assert '"error"' in answer.text and "A step has run for" in answer.text


@pytest.mark.case("OPS-03")
def test_an_engine_that_is_silent_ends_the_server_too(tiny_folder: Path, tmp_path: Path) -> None:
    with running_server(tiny_folder, *FLAGS, "--exit-on-stall", folder=tmp_path) as server:
        server.child("octavo.engine.process").send_signal(signal.SIGSTOP)
        assert server.wait(20) == 1
        assert "The engine has said nothing for" in server.log.splitlines()[-1]


@pytest.mark.case("OPS-03")
def test_requests_that_wait_while_nothing_runs_end_the_server(tiny_folder: Path, tmp_path: Path) -> None:
    with faulty_server(tiny_folder, tmp_path) as server:
        (tmp_path / "starve").touch()
        answer = Answer(server.url)
        assert server.wait(20) == 1
        assert "The scheduler is stuck: 1 requests wait" in server.log.splitlines()[-1]
        answer.join(5)
        assert '"error"' in answer.text and "The scheduler is stuck" in answer.text
