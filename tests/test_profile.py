"""`octavo profile`: the trace has the steps, their parts and operators; a server records on demand and is unharmed."""

import contextlib
import io
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models
import tiny_tokenizers
from octavo import cli
from octavo.bench import profile_trace
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.profile import Profile
from octavo.engine.spans import engine_spans
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.types import SamplingParams
from server_process import TINY_FLAGS, ServerProcess, running_server

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")

TINY = ("--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1", "--device=cpu")
ADMIN = "admin-key-31"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.f_bpe(tiny_models.save(tiny_models.oracle(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    place = tmp_path_factory.mktemp("server")
    flags = ("--admin-api-key", ADMIN, "--profile-dir", str(place / "traces"))
    with running_server(folder, *TINY_FLAGS, *flags, folder=place) as server:
        yield server


def command(*words: str) -> tuple[str, Any]:
    """What `octavo profile` printed, and the status or message that it ended with."""
    out, status = io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", ["octavo", "profile", *words])
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
    return out.getvalue(), status


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_a_model_s_steps(folder: Path, tmp_path: Path) -> None:
    words = ("--num-steps", "7", "--batch-size", "2", "--input-len", "12", "--output-len", "3")
    printed, status = command(str(folder), *words, "--output", str(tmp_path / "out"), *TINY)
    assert not status
    (path,) = (tmp_path / "out").iterdir()
    events = events_of(path)
    ranges = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert ranges["step"] == 7 and ranges["plan"] == 7 and ranges["outputs"] == 7
    assert ranges["forward"] > ranges["commit"] > 3 and ranges["sample"] > 3
    operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
    assert "aten::argmax" in operators or "aten::max" in operators or len(operators) > 10
    # The prompts were there: 12 tokens each, and again after 3 tokens of an answer.
    trace = profile_trace.read(path)
    parts = trace.seconds(on_device=False)
    assert trace.num_steps == 7 and {"plan", "prepare", "forward", "sample", "commit", "outputs"} <= set(parts)
    assert sum(parts.values()) == pytest.approx(trace.step_seconds, rel=1e-3)
    assert f"7 steps, {1e3 * trace.step_seconds / 7:.3f} ms each while recorded" in printed
    lines = [line for line in printed.splitlines() if line[:1].isalpha() and "%" in line]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=1) and "aten::" in printed
    assert f"Trace: {path}" in printed
    assert "nsys profile --trace=cuda,nvtx" in printed and f"octavo profile {folder}" in printed and "--nvtx" in printed


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--num-steps", "0"), "num_steps=0 is not allowed"),
        (("--num-steps", "5000"), "at most 1000 steps"),
        (("--batch-size", "-1"), "batch_size=-1 is not allowed"),
        (("--nvtx",), "--nvtx needs an NVIDIA GPU"),
        (("--url", "http://127.0.0.1:9", "--seconds", "0"), "seconds=0.0 is not allowed"),
        (("--url", "http://127.0.0.1:9"), "No server answers"),
    ):
        _, status = command(str(folder), *words, *TINY)
        assert message in str(status), status
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be written to"):
        Profile([], tmp_path / "file").start()


def test_no_trace_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for content, message in (("{", "is no trace"), ("{}", "is no trace"), ('{"traceEvents": []}', "no step in it")):
        path.write_text(content)
        with pytest.raises(InvalidConfig, match=message):
            profile_trace.read(path)


def test_a_forgotten_recording_ends_by_itself(folder: Path, tmp_path: Path) -> None:
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": "16M", "num_threads": 1}
    with Engine(EngineConfig.from_keywords("test", model=str(folder), device="cpu", **options)) as engine:
        recording = Profile(engine_spans(engine), tmp_path, most_steps=3)
        recording.start()
        with pytest.raises(InvalidRequest, match="recorded already"):
            recording.start()
        engine.add(engine.check([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True)))
        count = 0
        while engine.has_unfinished:
            engine.step()
            count += 1
        assert count > 5 and "step" not in vars(engine)  # nothing is wrapped any more
        assert profile_trace.read(Path(recording.stop())).num_steps == 3
        with pytest.raises(InvalidRequest, match="No profile is being recorded"):
            recording.stop()
        recording.start()  # and a second one after it
        engine.add(engine.check([5, 6, 8], SamplingParams(max_tokens=1)))
        while engine.has_unfinished:
            engine.step()
        assert 1 <= profile_trace.read(Path(recording.stop())).num_steps <= 2


def text_of(server: ServerProcess) -> str:
    body = {"prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return str(httpx.post(server.url + "/v1/completions", json=body, timeout=30).json()["choices"][0]["text"])


def test_a_running_server(server: ServerProcess) -> None:
    before = text_of(server)
    during: list[str] = []
    ending = threading.Event()

    def ask() -> None:
        while not ending.is_set():
            during.append(text_of(server))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        printed, status = command("--url", server.url, "--admin-api-key", ADMIN, "--seconds", "0.5")
    finally:
        ending.set()
        asking.join()
    assert not status
    path = Path(printed.split("Trace on the server: ")[1].split("  (")[0])
    trace = profile_trace.read(path)
    assert path.parent.name == "traces" and trace.num_steps >= 1
    assert {"plan", "forward", "sample", "commit"} <= set(trace.seconds(on_device=False))
    assert f"{trace.num_steps} steps" in printed and "aten::" in printed
    assert {before} == {*during, text_of(server)} and httpx.get(server.url + "/health").status_code == 200


def test_a_server_s_refusals(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}

    def control(route: str) -> httpx.Response:
        return httpx.post(server.url + route, headers=headers, timeout=30)

    assert control("/stop_profile").status_code == 409
    assert control("/start_profile").status_code == 200
    again = control("/start_profile")
    assert again.status_code == 409 and "recorded already" in again.json()["error"]["message"]
    _, status = command("--url", server.url, "--admin-api-key", ADMIN, "--seconds", "0.1")
    assert "recorded already" in str(status)  # by somebody else: that recording goes on
    text_of(server)
    path = Path(control("/stop_profile").json()["path"])
    assert profile_trace.read(path).num_steps > 20
    assert "No profile is being recorded" in control("/stop_profile").json()["error"]["message"]
    _, status = command("--url", server.url, "--admin-api-key", "wrong", "--seconds", "0.1")
    assert "refuses the key" in str(status) and "--admin-api-key" in str(status)
    control("/start_profile")
    time.sleep(0.1)
    path = Path(control("/stop_profile").json()["path"])  # of an idle server
    with pytest.raises(InvalidConfig, match="nothing was computed"):
        profile_trace.read(path)
    assert httpx.get(server.url + "/health").status_code == 200
