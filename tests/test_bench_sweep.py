"""`octavo bench sweep`: its points, going on after a kill, changed settings, the highest rate that meets objectives."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from octavo import cli
from octavo.bench import sweep as sweeps
from octavo.bench.axes import Point, points
from octavo.bench.echo import EchoServer, even
from octavo.bench.rates import highest_rate
from octavo.bench.serve import PRESSURE, TARGET, WORKLOAD, Run, run_load
from octavo.errors import InvalidConfig

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")
LOAD = (PRESSURE, TARGET, WORKLOAD)


def test_points_are_all_combinations_and_share_servers() -> None:
    found = points(["request-rate=1,2.5,inf", "--max-num-batched-tokens=512,2048"], LOAD, True)
    assert [point.name for point in found] == [
        f"max-num-batched-tokens={tokens},request-rate={rate}"
        for tokens in (512, 2048)
        for rate in (1.0, 2.5, math.inf)
    ]
    assert found[0].engine == (("max_num_batched_tokens", 512),) and found[0].load == (("request_rate", 1.0),)
    assert points([], LOAD, True) == [Point((), ())]
    (switched,) = points(["enable-prefix-caching=false"], LOAD, True)
    assert switched.values == {"enable_prefix_caching": False}
    names = [point.file_name for point in points(["model=a/b,a-b"], LOAD, True)]
    assert len(set(names)) == 2 and not any("/" in name for name in names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["max-num-batchd-tokens=1"], "max-num-batchd-tokens is no option.*Did you mean max-num-batched-tokens"),
        (["request-rate=1", "request_rate=2"], "varied already"),
        (["request-rate="], "must be OPTION=VALUE"),
        (["enable-prefix-caching=maybe"], "must be true or false"),
        (["port=1,2"], "port is no option"),
    ],
)
def test_an_axis_that_cannot_be(given: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        points(given, LOAD, True)
    assert re.search(message, str(error.value)), error.value


def test_a_running_server_keeps_its_engine() -> None:
    with pytest.raises(InvalidConfig, match="max-num-seqs is an option of the engine"):
        points(["max-num-seqs=1,2"], LOAD, False)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 19.0, 60.0])
@pytest.mark.parametrize("precision", [0.01, 0.05, 0.2])
def test_bisection_finds_a_known_capacity(capacity: float, precision: float) -> None:
    tried: list[float] = []

    def met(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= capacity else 0.5

    found = highest_rate(met, 0.95, 10.0, precision)
    assert found <= capacity and found in tried
    assert capacity - found <= precision * capacity * 1.05
    assert len(tried) == len(set(tried)) <= 14


def test_bisection_at_its_ends() -> None:
    assert highest_rate(lambda rate: 0.0, 0.95, 10.0, 0.05) == 0.0
    assert highest_rate(lambda rate: 1.0, 0.95, 10.0, 0.05) == 160.0


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", "sweep", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_a_killed_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def counted(target: Any, pressure: Any, work: Any, *rest: Any) -> Any:
        asked.append((pressure.max_concurrency, work.seed))
        if len(asked) == 2:
            raise KeyboardInterrupt  # as a user ends it
        return run_load(target, pressure, work, *rest)

    monkeypatch.setattr(sweeps, "run_load", counted)
    with EchoServer(even(0.01, 0.005, 3)) as server:
        flags = ["--port", str(server.port), "--num-prompts", "4", "--random-input-len", "5", "--clients", "1"]
        flags += ["--sweep", "max-concurrency=1,2,4", "--output-dir", str(tmp_path), "--self-check", "off"]
        assert run(monkeypatch, *flags) == 130
        assert [path.name for path in tmp_path.glob("point-*")] == ["point-max-concurrency=1.json"]
        assert not run(monkeypatch, *flags, "--output-html", str(tmp_path / "s.html"))
        assert [most for most, _ in asked] == [1, 2, 2, 4]  # the first point was not measured again
        assert len({seed for _, seed in asked}) == 3  # a running server has the prompts of other points in its cache
        printed = capsys.readouterr().out
        table = json.loads((tmp_path / "sweep.json").read_text())
        assert [row["max_concurrency"] for row in table["rows"]] == [1, 2, 4]
        assert all(row["completed"] == 4 and row["failed"] == 0 for row in table["rows"])
        assert "max_concurrency" in printed and "TTFT" in printed
        page = (tmp_path / "s.html").read_text()
        assert page.count('data-key="max_concurrency"') >= 3 and "Throughput against time to first token" in page
        assert not run(monkeypatch, *flags) and len(asked) == 4  # all is there
        point = tmp_path / "point-max-concurrency=2.json"
        point.write_text(point.read_text().replace('"failed": 0', '"failed": 1', 1))
        assert not run(monkeypatch, *flags) and asked[4:] == asked[2:3]  # it failed in part, as when a server ended
        code = run(monkeypatch, *flags, "--random-output-len", "9")
        assert "was measured with workload.random_output_len=128, and this sweep has" in str(code)
        assert not run(monkeypatch, *flags, "--random-output-len", "9", "--overwrite") and len(asked) == 8


def test_the_highest_rate_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A made-up server: at 8 requests/s all meet the objective, above it half of them."""

    def made_up(target: Any, pressure: Any, work: Any, slos: dict[str, float], *_: Any) -> Any:
        assert slos == {"ttft": 100.0}
        met = 20 if pressure.request_rate <= 8 else 10
        result = {"completed": 20, "failed": 0, "num_prompts": 20, "duration": 4.0, "request_goodput": met / 4.0}
        result |= {"request_throughput": min(pressure.request_rate, 12.0), "output_throughput": 1.0}
        result |= {"median_ttft_ms": 50.0, "median_tpot_ms": 5.0}
        return Run(result, [])

    monkeypatch.setattr(sweeps, "run_load", made_up)
    monkeypatch.setattr(sweeps, "details", lambda answers: {})
    flags = ["--port", "9", "--goodput", "ttft:100", "--find-rate", "--output-dir", str(tmp_path)]
    assert not run(monkeypatch, *flags, "--sweep", "random-input-len=8,16", "--output-html", str(tmp_path / "s.html"))
    page = (tmp_path / "s.html").read_text()
    assert "Highest rates that meet the objectives" in page and page.count('data-key="highest_rate"') == 2
    assert ">random_input_len=8<" in page and ">random_input_len=16<" in page  # a line of the figure each
    found = json.loads((tmp_path / "sweep.json").read_text())["highest"]
    assert [row["random_input_len"] for row in found] == [8, 16]
    assert all(8 * 0.95 <= row["highest_rate"] <= 8 and row["attainment"] == 1.0 for row in found)
    assert "highest rate for ttft:100 at 95%" in capsys.readouterr().out
    assert "needs --goodput" in str(run(monkeypatch, "--find-rate"))
    assert "leave request-rate out" in str(run(monkeypatch, *flags, "--sweep", "request-rate=1"))
    assert "attainment=2.0 is not allowed" in str(run(monkeypatch, *flags, "--attainment", "2"))


def test_servers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine options as an axis: one server each; one that cannot start is reported, and the others are measured."""
    folder = tiny_tokenizers.f_bpe(tiny_models.save(tiny_models.oracle(), tmp_path / "model"))
    flags = [str(folder), "--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1"]
    flags += ["--num-prompts", "3", "--random-input-len", "6", "--random-output-len", "4", "--vocab-size", "500"]
    flags += ["--clients", "1", "--self-check", "off", "--output-dir", str(tmp_path / "out")]
    assert run(monkeypatch, *flags, "--sweep", "max-num-seqs=2", "kv-cache-memory-bytes=16M,1K") == 1
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    (row,) = found["rows"]
    assert row["max_num_seqs"] == 2 and row["completed"] == 3 and row["output_throughput"] > 0
    ((name, error),) = found["errors"].items()
    assert "1K" in name and "ended before it was ready" in error
    point = json.loads((tmp_path / "out" / "point-max-num-seqs=2,kv-cache-memory-bytes=16M.json").read_text())
    assert point["output_lens"] == [4, 4, 4] and point["sweep_settings"]["engine"]["max_num_seqs"] == 2
    assert "ended before it was ready" in capsys.readouterr().err
