"""`octavo bench latency` and `throughput` on a tiny model: counted tokens, known keys, fresh prompts, refusals."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from octavo import cli

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")  # its guess of a forgotten argument

TINY = ("--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1", "--device=cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.f_bpe(tiny_models.save(tiny_models.oracle(), tmp_path_factory.mktemp("model")))


def bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", *words])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main()
    return out.getvalue()


def result_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_latency(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--input-len", "12", "--output-len", "6", "--batch-size", "2", "--num-iters-warmup", "1"]
    flags += ["--num-prompts", "5", "--output-json", str(tmp_path / "r.json")]
    printed = bench(monkeypatch, "latency", "--model", str(folder), *flags, *TINY)
    found = result_of(tmp_path / "r.json")
    assert f"Avg latency: {found['avg_latency']} seconds" in printed and "99% percentile latency:" in printed
    assert len(found["latencies"]) == 3 and len(found["warmup_latencies"]) == 1  # 5 requests are 3 batches
    assert found["total_output_tokens"] == 3 * 2 * 6
    assert set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert 0 < found["mean_ttft_ms"] < found["mean_e2el_ms"] <= 1e3 * max(found["latencies"])
    assert found["mean_e2el_ms"] == pytest.approx(found["mean_ttft_ms"] + 5 * found["mean_tpot_ms"])
    assert len(found["requests"]["ttfts"]) == 6 and "itls" not in found["requests"]  # what comparisons draw from


@pytest.mark.case("BEN-04")
def test_throughput(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--num-prompts", "7", "--random-input-len", "20", "--output-len", "5", "--random-range-ratio", "0.5"]
    flags += ["--num-warmups", "2", "--num-scheduler-steps", "4", "--dtype", "float32"]
    runs = []
    for name in ("a", "b"):
        path = tmp_path / name
        printed = bench(monkeypatch, "throughput", str(folder), *flags, *TINY[1:], "--output-json", str(path))
        runs.append(result_of(path))
    first, second = runs
    assert first["input_lens"] == second["input_lens"] and first["output_lens"] == second["output_lens"]
    assert len(set(first["input_lens"])) > 1 and first["total_prompt_tokens"] == sum(first["input_lens"])
    assert first["num_requests"] == 7 and first["total_output_tokens"] == sum(first["output_lens"])
    assert first["tokens_per_second"] == pytest.approx(first["total_num_tokens"] / first["elapsed_time"])
    assert first["configuration"]["model"]["dtype"] == "float32" and first["prefix_cache"] == "empty at the start"
    assert first["configuration"]["scheduler"]["num_scheduler_steps"] == 4
    assert first["configuration"]["effective"]["max_model_len"] == 256 and first["versions"]["torch"]
    assert "Throughput: " in printed and f"Total num output tokens: {second['total_output_tokens']}" in printed


@pytest.mark.parametrize("dataset", ["sharegpt", "custom", "prefix_repetition"])
def test_datasets(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    file = tmp_path / "data"
    if dataset == "sharegpt":
        talk = {"conversations": [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Good day"}]}
        file.write_text(json.dumps([talk]))
    else:
        file.write_text('{"prompt": "Hello there"}\n')
    flags = ["--dataset-name", dataset, "--dataset-path", str(file), "--num-prompts", "3"]
    flags += ["--custom-output-len", "4", "--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "8"]
    flags += ["--prefix-repetition-output-len", "4", "--output-json", str(tmp_path / "r.json")]
    bench(monkeypatch, "throughput", str(folder), *flags, *TINY)
    found = result_of(tmp_path / "r.json")
    assert found["num_requests"] == 3 and len(set(found["output_lens"])) == 1
    if dataset == "prefix_repetition":
        assert found["input_lens"] == [40] * 3 and found["output_lens"] == [4] * 3


def test_what_cannot_be_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["latency", "--batch-size", "0"], "batch_size=0 is not allowed"),
        (["latency", "--num-iters", "0"], "leave nothing to measure"),
        (["throughput", "--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["throughput", "--num-promts", "3"], "Did you mean --num-prompts?"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["octavo", "bench", *words, "--model", str(folder)])
            cli.main()
        said = capsys.readouterr().err + str(ended.value.code)
        assert message in said, said
