"""`octavo bench compare`: ratios and intervals of known values, warnings where the work differs, the exit status."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import cli
from octavo.bench import compare, results
from octavo.bench.samples import Values, lower_is_better, values_of

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")


def serving(times: list[float], **changes: Any) -> dict[str, Any]:
    """A result of bench serve --detailed whose requests took `times` seconds, a third of it to the first token."""
    count = len(times)
    found: dict[str, Any] = {"endpoint_type": "openai", "model_id": "m", "num_prompts": count, "request_rate": "inf"}
    found |= {"output_throughput": 10 * count / sum(times), "total_output_tokens": 10 * count, "failed": 0}
    found |= {"start_times": [0.0] * count, "ttfts": [t / 3 for t in times], "latencies": times}
    found |= {"queue_times": [0.0] * count, "output_lens": [10] * count, "itls": [[t / 15] * 9 for t in times]}
    return found | {"configuration": {"workload": {"seed": 0}, "engine": {"max_num_seqs": 4}}} | changes


def latency(times: list[float]) -> dict[str, Any]:
    return {"avg_latency": sum(times) / len(times), "latencies": times, "total_output_tokens": 8 * len(times)}


def rows_of(first: list[dict[str, Any]], second: list[dict[str, Any]], *names: str) -> dict[str, dict[str, Any]]:
    found = compare.compared(first, second, names, 95.0, 1000, 0)
    return {row["metric"]: row for row in found["rows"]}


def test_a_known_ratio_and_its_interval() -> None:
    rng = np.random.default_rng(1)
    times = list(rng.gamma(20.0, 0.05, 200))
    slower = [1.2 * t for t in rng.gamma(20.0, 0.05, 200)]
    rows = rows_of([serving(times)], [serving(slower)])
    for name in ("mean_ttft_ms", "median_ttft_ms", "mean_e2el_ms", "mean_tpot_ms"):
        row = rows[name]
        assert row["ratio"] == pytest.approx(1.2, rel=0.08), name
        assert row["low"] < row["ratio"] < row["high"] and row["high"] - row["low"] < 0.2, name
        assert row["verdict"] == "worse" and row["values"] == [200, 200]
    assert rows["mean_e2el_ms"]["a"] == pytest.approx(1e3 * sum(times) / 200)
    # The standard error of a ratio of two means of 200 values, each with a deviation of 1 / sqrt(20) of its mean.
    width = 2 * 1.96 * 1.2 * (2 / 20 / 200) ** 0.5
    assert rows["mean_e2el_ms"]["high"] - rows["mean_e2el_ms"]["low"] == pytest.approx(width, rel=0.15)
    assert rows["output_throughput"]["ratio"] == pytest.approx(sum(times) / sum(slower))
    assert rows["output_throughput"]["low"] is None  # one value a side


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows = [Values(lambda v, axis: np.mean(v, axis=axis), [list(rng.gamma(9.0, 1.0, 40))]) for _ in range(2)]
        row = compare._row("mean_ttft_ms", *rows, 95.0, 400, seed)
        held += row["low"] <= 1 <= row["high"]
    assert 0.89 <= held / 200 <= 0.99


def test_several_runs_a_side_widen_the_interval() -> None:
    """Within a run all values are alike; the runs differ, which one run alone cannot know."""
    runs = [serving([base] * 20) for base in (0.9, 1.0, 1.1, 1.0)]
    alone = rows_of([runs[0]], [runs[2]], "mean_e2el_ms")["mean_e2el_ms"]
    assert alone["low"] == pytest.approx(alone["high"]) == pytest.approx(1.1 / 0.9)
    together = rows_of(runs, runs, "mean_e2el_ms")["mean_e2el_ms"]
    assert together["ratio"] == pytest.approx(1.0) and together["high"] - together["low"] > 0.1
    throughput = rows_of(runs, runs, "output_throughput")["output_throughput"]
    assert throughput["low"] < 1 < throughput["high"]


def test_rounds_of_latency_and_rows_of_a_table() -> None:
    row = rows_of([latency([1.0, 1.1, 0.9])], [latency([0.5, 0.55, 0.45])])
    assert row["avg_latency"]["ratio"] == pytest.approx(0.5) and row["avg_latency"]["verdict"] == "better"
    assert row["output_throughput"]["ratio"] == pytest.approx(2.0) and row["output_throughput"]["low"] > 1.5

    def table(speed: float) -> dict[str, Any]:
        rows = [{"batch_size": n, "samples": {"output_throughput": [speed * n, speed * n * 1.01]}} for n in (1, 2)]
        return {"kind": "batch", "rows": rows}

    found = rows_of([table(10.0)], [table(11.0)])
    assert set(found) == {"output_throughput [batch_size=1]", "output_throughput [batch_size=2]"}
    assert found["output_throughput [batch_size=2]"]["ratio"] == pytest.approx(1.1)


def test_points_of_two_sweeps() -> None:
    def table(speed: float) -> dict[str, Any]:
        rows = [{"max_num_seqs": 1, "request_rate": rate, "output_throughput": speed * rate} for rate in (1.0, 2.0)]
        return {"kind": "sweep", "num_varied": 2, "rows": rows}

    found = rows_of([table(10.0)], [table(12.0)])
    assert found["output_throughput [max_num_seqs=1, request_rate=2.0]"]["ratio"] == pytest.approx(1.2)
    assert len(found) == 2


def test_failed_requests_are_in_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    found = serving([1.0, 1.0, 50.0])
    found["ttfts"][2] = found["latencies"][2] = None
    assert values_of([found])["mean_e2el_ms"].figure == pytest.approx(1000.0)
    compare.show(compare.compared([serving([1.0] * 3)], [found | {"failed": 1}], [], 95.0, 100, 0))
    assert "WARNING: requests failed, 0 and 1: they are in no figure." in capsys.readouterr().out


def test_which_way_is_better() -> None:
    for metric, lower in (("mean_ttft_ms", True), ("avg_latency", True), ("output_throughput [batch_size=1]", False)):
        assert lower_is_better(metric) is lower
    rows = [
        {"metric": "output_throughput", "ratio": 0.9, "low": 0.85, "high": 0.93},
        {"metric": "request_throughput", "ratio": 0.9, "low": 0.8, "high": 1.02},  # may be as good
        {"metric": "mean_ttft_ms", "ratio": 1.2, "low": 1.1, "high": 1.3},
        {"metric": "mean_tpot_ms", "ratio": 1.01, "low": 1.0, "high": 1.02},
        {"metric": "mean_e2el_ms", "ratio": 1.2, "low": 1.0, "high": 1.4},  # may be as good
        {"metric": "p99_itl_ms", "ratio": 2.0, "low": None, "high": None},
        {"metric": "nothing", "ratio": None, "low": None, "high": None},
    ]
    assert compare.failures(rows, 0.95) == ["output_throughput", "mean_ttft_ms", "p99_itl_ms"]
    assert compare.failures(rows, 0.5) == []


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", "compare", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err + str(ended.value.code)

    times = [0.5 + 0.01 * n for n in range(30)]
    results.write_json(Path("a.json"), serving(times))
    other = {"workload": {"seed": 1}, "engine": {"max_num_seqs": 8}}
    results.write_json(Path("b.json"), serving([1.5 * t for t in times], configuration=other))
    code, said = run("a.json", "b.json", "--output-json", "c.json", "--output-html", "c.html")
    assert not code and "mean_ttft_ms" in said and "95 % interval" in said and "worse" in said
    assert "WARNING: not the same work or machine: configuration.workload.seed is 0 and 1." in said
    assert "Differs: configuration.engine.max_num_seqs: 4 -> 8" in said
    found = json.loads(Path("c.json").read_text())
    assert found["kind"] == "compare" and found["rows"][0]["ratio"] == pytest.approx(2 / 3)
    page = Path("c.html").read_text()
    assert "Ratios, with their confidence intervals" in page and "configuration.workload.seed is 0 and 1" in page
    assert "Settings that differ" in page and "configuration.engine.max_num_seqs" in page
    same = run("a.json", "a.json")[1]
    assert "WARNING" not in same and "unclear: the interval has 1 in it" in same and "p99_ttft_ms" not in same
    code, said = run("a.json", "b.json", "--fail-below", "0.95", "--metrics", "mean_ttft_ms")
    assert code == 1 and "Below 0.95 of the first side: mean_ttft_ms." in said and "tpot" not in said
    assert not run("b.json", "a.json", "--fail-below", "0.95")[0]
    assert not run("a.json", "a.json", "--to", "b.json", "b.json")[0]
    results.write_json(Path("l.json"), latency([1.0, 2.0]))
    for words, message in (
        (("a.json",), "1 file without --to: two are needed"),
        (("a.json", "l.json"), "Results of latency, serve cannot be compared"),
        (("a.json", "b.json", "--metrics", "ttfb"), "--metrics ttfb: both sides have"),
        (("a.json", "b.json", "--confidence", "100"), "confidence=100.0 is not allowed"),
        (("a.json", "b.json", "--fail-belo", "1"), "Did you mean --fail-below?"),
        (("a.json", "none.json"), "none.json cannot be read"),
    ):
        code, said = run(*words)
        assert code and message in said, said
