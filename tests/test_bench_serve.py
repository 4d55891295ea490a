"""`octavo bench serve` against servers whose times are known: definitions, arrivals, datasets, failures, self-check."""

import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo import env
from octavo.bench import self_check
from octavo.bench.arrivals import arrivals, ramp
from octavo.bench.client import Answer, Load
from octavo.bench.echo import EchoServer, Script, even
from octavo.bench.measures import objectives, percentile, summary
from octavo.bench.serve import Pressure, Run, Target, run_load
from octavo.bench.workload import Workload, items
from octavo.errors import InvalidConfig

# An empty chunk after 10 ms, the first text after 200 ms, then 9 chunks of 1 to 3 tokens every 50 ms: 20 tokens.
KNOWN = Script([(0.01, 0), (0.2, 2), *((0.2 + 0.05 * (n + 1), n % 3 + 1) for n in range(9))])

KEYS = [
     "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
     "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
     "total_output_tokens", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
     "max_output_tokens_per_s", "max_concurrent_requests", "mean_ttft_ms", "median_tpot_ms", "std_itl_ms",
     "p99_e2el_ms", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "versions",
     "configuration", "prefix_cache", "definitions", "self_check",
]  # fmt: skip


def load(port: int, count: int, pressure: Pressure | None = None, **more: Any) -> Run:
    """Without the self-check unless asked: a test machine may well be the limit."""
    work = Workload(num_prompts=count, random_input_len=7, random_output_len=20, **more.pop("work", {}))
    target = Target(port=port, **more.pop("target", {}))
    goodput = objectives(more.pop("goodput", ()))
    return run_load(target, pressure or Pressure(clients=1), work, goodput, [50, 90, 99], more.pop("check", "off"))


def undisturbed(measure: Callable[[], dict[str, Any]], known: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The first of a few runs with the known values, each with its share of tolerance; else the last one.

    What is wrong is wrong in every run; a machine that is busy with something else is late in some.
    """
    found = {}
    for _ in range(5):
        found = measure()
        if all(found[name] == pytest.approx(value, rel=share) for name, (value, share) in known.items()):
            break
    for name, (value, share) in known.items():
        assert found[name] == pytest.approx(value, rel=share), name
    return found


@pytest.mark.case("BEN-01")
@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_a_known_server_has_its_known_times(concurrency: int | None) -> None:
    count = 3 if concurrency == 1 else 12
    most = concurrency or count
    known = {"median_ttft_ms": (200, 0.02), "median_itl_ms": (50, 0.02), "mean_itl_ms": (50, 0.02)}
    known |= {"median_tpot_ms": (450 / 19, 0.02), "median_e2el_ms": (650, 0.02)}
    known |= {"request_throughput": (count / (0.65 * count / most), 0.05)}
    with EchoServer(KNOWN) as server:
        found = undisturbed(
            lambda: load(server.port, count, Pressure(max_concurrency=concurrency, clients=1)).result, known
        )
    assert (found["completed"], found["failed"]) == (count, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (7 * count, 20 * count)
    assert found["tokens_per_chunk"] == pytest.approx(2.0)
    assert found["max_concurrent_requests"] == most
    assert found["request_throughput"] == pytest.approx(count / found["duration"])


@pytest.mark.case("BEN-01")
def test_a_wait_for_a_place_is_in_no_latency() -> None:
    known = {"median_ttft_ms": (200, 0.02), "mean_client_queue_time_ms": (650 * 1.5, 0.05)}
    with EchoServer(KNOWN) as server:
        undisturbed(lambda: load(server.port, 4, Pressure(max_concurrency=1, clients=1)).result, known)


@pytest.mark.case("BEN-01")
def test_poisson_arrivals_at_a_rate() -> None:
    planned = arrivals(8, 4.0, 1.0, random.Random(1))
    late = 1.0
    with EchoServer(even(0.02, 0.01, 3)) as server:
        for _ in range(5):
            run = load(server.port, 8, Pressure(request_rate=4.0, clients=1))
            sent = sorted(answer.sent for answer in run.answers)
            late = max(abs(a - sent[0] - b + planned[0]) for a, b in zip(sent, planned, strict=True))
            if late < 0.02:
                break
    assert late < 0.02
    assert run.result["request_rate"] == "4.0"


def test_goodput_and_percentiles_of_known_answers() -> None:
    answers = [
        Answer(n, sent=0.0, times=[0.1 * (n + 1), 1.0 + 0.1 * (n + 1)], prompt_tokens=1, output_tokens=11)
        for n in range(10)
    ]
    answers.append(Answer(10, sent=0.0, error="status 500"))
    found = summary(answers, {"ttft": 450.0, "tpot": 100.1}, (50, 90, 99))
    assert found["request_goodput"] == pytest.approx(4 / 2.0)  # 4 of 10 are fast enough, in 2 s
    assert found["p50_ttft_ms"] == pytest.approx(550) and found["p90_ttft_ms"] == pytest.approx(910)
    assert found["mean_tpot_ms"] == pytest.approx(100) and found["std_tpot_ms"] == pytest.approx(0, abs=1e-9)
    assert found["completed"] == 10 and found["errors"] == {"status 500": 1}
    assert found["total_output_tokens"] == 110
    assert percentile([1, 2, 3, 4], 50) == 2.5
    with pytest.raises(InvalidConfig, match="ttfb:3"):
        objectives(["ttfb:3"])


def test_arrivals_are_those_of_vllm() -> None:
    rng = random.Random(0)
    assert arrivals(3, float("inf"), 1.0, rng) == [0.0, 0.0, 0.0]
    assert arrivals(4, 2.0, float("inf"), rng) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    for burstiness, deviation in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        times = arrivals(20_000, 10.0, burstiness, rng)
        assert times[-1] == pytest.approx(2000.0) and times == sorted(times)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_rate_to_rate(strategy: str) -> None:
    times, events = ramp(1001, strategy, 2.0, 8.0, float("inf"), random.Random(0))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert 1 / gaps[0] == pytest.approx(2.0, rel=0.01) and 1 / gaps[-1] == pytest.approx(8.0, rel=0.01)
    assert 1 / gaps[499] == pytest.approx(5.0 if strategy == "linear" else 4.0, rel=0.01)
    assert [int(event["rps"]) for event in events] == [2, 3, 4, 5, 6, 7, 8]


def test_the_seed_fixes_the_workload(tmp_path: Path) -> None:
    def made(**given: Any) -> list[Any]:
        return items(Workload(num_prompts=6, **given), 300, 999, len)

    for kind in ("random", "prefix_repetition"):
        given: Any = {"dataset_name": kind, "random_range_ratio": 0.5}
        assert made(seed=3, **given) == made(seed=3, **given) != made(seed=4, **given)
    lengths = {len(item.prompt) for item in made(random_input_len=100, random_range_ratio=0.5)}
    assert len(lengths) > 1 and min(lengths) >= 50 and max(lengths) <= 150
    shared = made(dataset_name="prefix_repetition", prefix_repetition_num_prefixes=2, prefix_repetition_prefix_len=5)
    assert len({tuple(item.prompt[:5]) for item in shared}) == 2 and all(len(item.prompt) == 261 for item in shared)
    talks = [{"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": "abc"}]} for n in "12"]
    (tmp_path / "s.json").write_text(json.dumps([*talks, {"conversations": []}]))
    found = made(dataset_name="sharegpt", dataset_path=str(tmp_path / "s.json"))
    assert {item.prompt for item in found} == {"q1", "q2"} and {item.output_len for item in found} == {3}
    (tmp_path / "c.jsonl").write_text('{"prompt": "a", "output_tokens": 5}\n\n{"prompt": "b", "output_tokens": 6}\n')
    given = {"dataset_name": "custom", "dataset_path": str(tmp_path / "c.jsonl"), "disable_shuffle": True}
    assert [(i.prompt, i.output_len) for i in made(custom_output_len=-1, no_oversample=True, **given)] == [
        ("a", 5),
        ("b", 6),
    ]
    assert {item.output_len for item in made(**given)} == {256}
    (tmp_path / "c.jsonl").write_text('{"text": "a"}')
    with pytest.raises(InvalidConfig, match="line 1"):
        made(**given)


class Sometimes(BaseHTTPRequestHandler):
    """Every second request fails; the others stream one token after 20 ms of nothing."""

    count = itertools.count()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if next(self.count) % 2:
            self._answer(500, b'{"error": {"message": "no"}}')
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 7, '
        events += b'"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events))

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def failing_server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sometimes) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def test_failed_requests_are_reported_and_in_no_average(failing_server: int) -> None:
    found = load(failing_server, 10, Pressure(max_concurrency=1, clients=1)).result
    assert (found["completed"], found["failed"]) == (5, 5)
    assert found["errors"] == {'status 500: {"error": {"message": "no"}}': 5}
    assert found["total_output_tokens"] == 5 and found["total_input_tokens"] == 35


def command(*flags: str) -> "subprocess.CompletedProcess[str]":
    environment = env.for_child(sys.path) | {"COLUMNS": "200"}
    line = [sys.executable, "-m", "octavo", "bench", "serve", *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.case("BEN-04")
def test_the_command_prints_the_known_block_and_writes_the_known_keys(tmp_path: Path) -> None:
    with EchoServer(KNOWN) as server:
        flags = ["--port", str(server.port), "--num-prompts", "8", "--random-input-len", "9", "--clients", "2"]
        flags += ["--max-concurrency", "4", "--num-warmups", "2", "--goodput", "ttft:300", "tpot:30", "--save-result"]
        flags += ["--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99", "--self-check", "warn"]
        flags += ["--result-dir", str(tmp_path), "--label", "x", "--metadata", "a=b", "--detailed"]
        flags += ["--json", str(tmp_path / "runs.jsonl")]
        found, again = command(*flags), command(*flags)
    assert found.returncode == 0 and again.returncode == 0, found.stdout + found.stderr
    assert "============ Serving Benchmark Result ============" in found.stdout
    assert f"{'Successful requests:':<40} 8 " in found.stdout and f"{'Failed requests:':<40} 0 " in found.stdout
    assert "---------------Time to First Token----------------" in found.stdout and "P50 TTFT (ms):" in found.stdout
    assert "TPOT" not in found.stdout.split("====\n")[1].split("Output Token")[0]
    files = sorted(tmp_path.glob("x-infqps-concurrency4-echo-*.json"))
    result = json.loads(files[0].read_text())
    for key in KEYS:
        assert key in result, key
    assert result["num_prompts"] == result["completed"] == 8  # the warm-up is not among them
    assert result["configuration"]["load"]["max_concurrency"] == 4 and result["versions"]["octavo"]
    assert result["metadata"] == {"a": "b"} and result["request_goodput"] == pytest.approx(8 / result["duration"])
    assert result["output_lens"] == [20] * 8
    first, second = (json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines())
    assert first["median_e2el_ms"] == pytest.approx(second["median_e2el_ms"], rel=0.1)
    assert first["configuration"] == second["configuration"] and first["input_lens"] == second["input_lens"]


def test_the_definitions_are_in_the_help() -> None:
    text = " ".join(command("--help").stdout.replace("│", " ").split())
    for words in (
        "first chunk with text",
        "(e2el - ttft) / (output tokens - 1)",
        "counts in no other",
        "in no average",
    ):
        assert words in text


def test_what_cannot_be_is_refused_by_name() -> None:
    for flags, words in (
        (["--request-rate", "0"], "request_rate=0.0 is not allowed"),
        (["--ramp-up-strategy", "linear"], "A ramp needs"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--percentile-metrics", "ttfb"], "no 'ttfb'"),
        (["--max-concurency", "3"], "--max-concurrency"),
        (["--port", "9", "--ready-check-timeout-sec", "0"], "No server answers"),
    ):
        found = command(*flags)
        assert found.returncode != 0 and words in found.stderr and "Traceback" not in found.stderr, found.stderr


def test_the_client_loads_no_torch() -> None:
    code = "import sys, octavo.bench.serve; sys.exit(any(name in sys.modules for name in ('torch', 'triton')))"
    subprocess.run([sys.executable, "-c", code], check=True, env=env.for_child(sys.path), timeout=60)


def test_a_client_at_its_limit_is_told() -> None:
    result = {"median_ttft_ms": 20.0, "median_itl_ms": 20.0, "max_concurrent_requests": 4}
    busy = self_check.check(result, Load(busy=0.99, mean_lag=0.05, worst_lag=0.2), 1)
    assert any("of a core" in fault for fault in busy.faults) and any("late" in fault for fault in busy.faults)
    assert busy.echo_asked_tokens_per_s == pytest.approx(200)
    assert busy.echo_read_tokens_per_s == pytest.approx(200, rel=0.3)


def test_a_rate_that_no_client_reads_is_refused() -> None:
    """A million tokens a second are more than one process reads."""
    result = {"median_ttft_ms": 5.0, "median_itl_ms": 1.0, "max_concurrent_requests": 1000}
    found = self_check.check(result, Load(busy=0.1, mean_lag=0.0, worst_lag=0.0), 1)
    assert any("echo server" in fault for fault in found.faults)
