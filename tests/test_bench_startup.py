"""`octavo bench startup`: real starts of a tiny model, phases that add up, caches that are empty or full."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from octavo import cli
from octavo.bench import startup as startups

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", "startup", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_cold_and_warm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")  # a cold start would compile them for ten seconds
    folder = tiny_models.save(tiny_models.oracle(), tmp_path)
    flags = ["--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1"]
    flags += ["--skip-tokenizer-init", "--device=cpu", "--num-iters-cold=1", "--num-iters-warmup=0"]
    files = ["--output-json", str(tmp_path / "s.json"), "--output-html", str(tmp_path / "s.html")]
    assert not run(monkeypatch, str(folder), *flags, "--num-iters-warm=1", *files)
    printed = capsys.readouterr().out
    assert " STARTUP TIME BENCHMARK RESULTS " in printed and "COLD: " in printed and "Avg startup time: " in printed
    found = json.loads((tmp_path / "s.json").read_text())
    for kind in ("cold", "warm"):
        rows = {row["phase"]: row["seconds"] for row in found["rows"] if row["caches"] == kind}
        assert list(rows)[:3] == ["interpreter", "imports", "prepare"] and list(rows)[-1] == "first token"
        (start,), (first,) = found[f"{kind}_startup_times"], found[f"{kind}_first_token_times"]
        assert sum(rows.values()) == pytest.approx(first) and first - rows["first token"] == pytest.approx(start)
        assert min(rows.values()) >= 0 and rows["imports"] > 0.1
    assert found["configuration"]["effective"]["max_model_len"] == 256
    page = (tmp_path / "s.html").read_text()
    assert "Phases of a cold start" in page and "Phases of a warm start" in page


def test_a_cold_start_has_caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, str]] = []

    def child(words: list[str], env: dict[str, str], **_: Any) -> Any:
        said.append(env)
        moments = {"begun": 1e9, "imported": 1e9, "ready": 1e9, "answered": 1e9, "phases": {}, "configuration": {}}
        Path(words[-1]).write_text(json.dumps(moments))
        return startups.subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(startups.subprocess, "run", child)
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 5000)
    options = {"engine": {"model": str(tmp_path)}, "input_len": 1}
    for cold in (True, True, False):
        startups.one_start(options, cold)
    roots = [env["OCTAVO_CACHE_ROOT"] for env in said]
    assert len(set(roots)) == 3 and roots[2] == str(tmp_path)
    assert "TRITON_CACHE_DIR" in said[0] and said[0]["TRITON_CACHE_DIR"] != said[1]["TRITON_CACHE_DIR"]


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuch"]}')
    for words, message in (
        (("--num-iters-cold", "-1"), "num_iters_cold=-1 is not allowed"),
        (("--num-iters-cold", "0", "--num-iters-warm", "0"), "leave nothing to measure"),
        ((str(tmp_path / "none"),), "none"),
    ):
        assert message in str(run(monkeypatch, *words))
