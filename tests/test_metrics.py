"""Metrics from scripted events with a clock of our own: exact counts, times and text."""

import random
import re
import time
from collections import Counter
from itertools import count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_device import Engine, FakeDevice, request
from octavo.core.blocks import BlockPool
from octavo.core.events import Committed, Planned
from octavo.core.scheduler import Scheduler
from octavo.core.step import Chunk, Step, StepResult
from octavo.observe.catalogue import METRICS, up_to
from octavo.observe.http_counts import HttpCounts
from octavo.observe.metrics import Metrics
from octavo.observe.series import Histogram
from octavo.observe.window import Percentiles, Rate
from octavo.types import Delta, FinishReason


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """An engine on the fake device with metrics that hear of it; each step takes 0.5 s."""

    def __init__(
        self,
        num_blocks: int = 65,
        max_num_seqs: int = 8,
        depth: int = 0,
        faults: dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        scheduler = Scheduler(BlockPool(num_blocks, 4), max_num_seqs, 1000, 100, 1)
        self.engine = Engine(scheduler, FakeDevice(num_blocks, 4, faults), depth)
        options = {"prefixes": ("octavo",), **options}
        self.metrics = Metrics(scheduler, model_name="m", max_model_len=100, clock=self.clock, **options)
        scheduler.subscribers.append(self.metrics)

    def step(self) -> None:
        self.clock.now += 0.5
        self.engine.step()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def value(self, name: str, **labels: str) -> float:
        return values(self.metrics.render())[name, frozenset({"model_name": "m", "engine": "0", **labels}.items())]


def values(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} stands twice"
            found[key] = sample.value
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(7) for _ in range(length)]


@pytest.mark.case("OPS-01")
def test_sums_are_exact() -> None:
    """10 requests of 9 + 10 tokens; 3 with n=2; 2 aborted; 1 failed; 1 that hits the prefix cache."""
    watched = Watched(faults={"fails": 3})
    scheduler = watched.engine.scheduler
    for i in range(10):
        scheduler.add(request(f"r{i}", prompt(9, i), 10, ignore_eos=True))
    watched.run()
    for i in range(3):
        for sample in range(2):
            scheduler.add(request(f"p{i}.{sample}", prompt(5, 100 + i), 4, n=2, seed=sample))
    watched.run()
    scheduler.add(request("early", prompt(6, 200), 5))
    scheduler.abort("early")
    scheduler.add(request("late", prompt(6, 201), 50))
    for _ in range(3):
        watched.step()
    scheduler.abort("late")
    scheduler.add(request("fails", prompt(6, 202), 5))
    watched.run()
    scheduler.add(request("cached", prompt(9, 0), 2))
    watched.run()
    text = watched.engine.deltas
    generated = Counter({"late": 0})
    for delta in text:
        generated[delta.request_id] += len(delta.token_ids)
    sequences = 10 + 6 + 2 + 1 + 1
    value = watched.value
    assert value("octavo:prompt_tokens_total") == 10 * 9 + 6 * 5 + 6 + 6 + 9
    assert value("octavo:prompt_tokens_cached_total") == 3 * 4 + 8  # whole blocks of 4: a second sample's, two again
    assert value("octavo:prompt_tokens_by_source_total", source="local_cache_hit") == 3 * 4 + 8
    assert value("octavo:prompt_tokens_by_source_total", source="local_compute") == 90 + 30 + 12 + 9 - 20
    assert value("octavo:generation_tokens_total") == sum(generated.values())
    assert value("octavo:request_success_total", finished_reason="length") == 10 + 6 + 1
    assert value("octavo:request_success_total", finished_reason="abort") == 2
    assert value("octavo:request_success_total", finished_reason="error") == 1
    assert value("octavo:request_success_total", finished_reason="stop") == 0
    assert value("octavo:corrupted_requests_total") == 1
    assert value("octavo:time_to_first_token_seconds_count") == sequences - 1  # "early" never had one
    gaps = sum(n - 1 for n in generated.values() if n)
    assert value("octavo:inter_token_latency_seconds_count") == gaps
    assert value("octavo:e2e_request_latency_seconds_count") == sequences
    assert value("octavo:request_queue_time_seconds_count") == sequences
    assert value("octavo:request_params_n_count") == 10 + 3 + 4
    assert value("octavo:request_params_n_sum") == 10 + 3 * 2 + 4
    assert value("octavo:request_max_num_generation_tokens_sum") == sum(generated.values()) - 3 * 4
    assert value("octavo:request_generation_tokens_sum") == sum(generated.values())
    assert value("octavo:prefix_cache_queries_total") == 90 + 30 + 12 + 9
    assert value("octavo:prefix_cache_hits_total") == 20
    assert value("octavo:num_requests_running") == value("octavo:num_requests_waiting") == 0
    assert value("octavo:kv_cache_usage_perc") == 0


def test_times_are_those_of_the_clock() -> None:
    watched = Watched(max_num_seqs=1)
    scheduler, start = watched.engine.scheduler, watched.clock.now
    watched.metrics.arrived(["a"], start - 0.25)
    scheduler.add(request("a", prompt(5), 3))
    scheduler.add(request("b", prompt(5, 1), 1))
    assert watched.value("octavo:num_requests_waiting_by_reason", reason="capacity") == 2
    watched.step()
    assert watched.value("octavo:num_requests_running") == 1
    assert watched.value("octavo:kv_cache_usage_perc") == 2 / 64
    watched.run()
    sums = {
        "time_to_first_token_seconds": (0.25 + 0.5) + 2.0,  # b waits for a's three steps
        "inter_token_latency_seconds": 1.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": (0.25 + 1.5) + 2.0,
        "request_queue_time_seconds": (0.25 + 0.5) + 2.0,
        "request_prefill_time_seconds": 0.0,
        "request_decode_time_seconds": 1.0,
        "request_inference_time_seconds": 1.0,
    }
    found = {name: watched.value(f"octavo:{name}_sum") for name in sums}
    assert found == pytest.approx(sums)
    assert watched.value("octavo:request_time_per_output_token_seconds_count") == 1
    latencies = watched.metrics.snapshot()["latency_ms"]
    assert latencies["itl"] == {"p50": 500, "p90": 500, "p99": 500}
    assert latencies["ttft"] == {"p50": 750, "p90": 2000, "p99": 2000}
    watched.clock.now += 61
    assert set(watched.metrics.snapshot()["latency_ms"].values()) == {None}


def test_a_preempted_sequence_counts_once() -> None:
    watched = Watched(num_blocks=27)  # 104 positions for 2 x 60
    scheduler = watched.engine.scheduler
    for i in range(2):
        scheduler.add(request(f"r{i}", prompt(20, i), 40, ignore_eos=True))
    watched.run()
    assert scheduler.num_preemptions > 0
    assert watched.value("octavo:num_preemptions_total") == scheduler.num_preemptions
    assert watched.value("octavo:request_num_preemptions_sum") == scheduler.num_preemptions
    assert watched.value("octavo:prompt_tokens_total") == 40
    assert watched.value("octavo:prefix_cache_queries_total") == 40
    assert watched.value("octavo:generation_tokens_total") == 80
    assert watched.value("octavo:inter_token_latency_seconds_count") == 78
    assert watched.value("octavo:time_to_first_token_seconds_count") == 2


@pytest.mark.parametrize("seed", range(12))
def test_counters_never_fall_and_agree_with_the_deltas(seed: int) -> None:
    rng = random.Random(seed)
    watched = Watched(num_blocks=rng.choice([27, 40, 65]), max_num_seqs=rng.randint(1, 6), depth=rng.randint(0, 3))
    scheduler, ids, before = watched.engine.scheduler, count(), {}
    for _ in range(60):
        if rng.random() < 0.5:
            scheduler.add(request(f"r{next(ids)}", prompt(rng.randint(1, 50), rng.randrange(3)), rng.randint(1, 40)))
        if rng.random() < 0.1:
            scheduler.abort(f"r{rng.randrange(60)}")
        watched.step()
        now = {k: v for k, v in values(watched.metrics.render()).items() if k[0].endswith(("_total", "_count", "_sum"))}
        own = {k: v for k, v in now.items() if k[0].startswith("octavo:")}
        assert all(own[key] >= value for key, value in before.items())
        before = own
    watched.run()
    tokens = sum(len(delta.token_ids) for delta in watched.engine.deltas)
    assert watched.value("octavo:generation_tokens_total") == tokens
    assert watched.value("octavo:request_generation_tokens_sum") == tokens
    first = watched.value("octavo:time_to_first_token_seconds_count")
    assert watched.value("octavo:inter_token_latency_seconds_count") == tokens - first
    assert not watched.metrics._live.records and not watched.metrics._live._groups


def test_several_prefixes_and_every_metric() -> None:
    watched = Watched(
        prefixes=("octavo", "vllm"),
        cache_info={"block_size": 4, "enable_prefix_caching": True},
        phases={"load": 1.5},
        compilations=lambda: {"startup": 7, "serving": 1},
    )
    watched.metrics.rejected("num_reqs")
    counts = HttpCounts()
    counts.count("POST", "/v1/completions", 200, 0.2)
    counts.count("POST", "/v1/completions", 404, 0.01)
    rows = counts.take()
    assert counts.take() == []
    watched.metrics.http(rows)
    watched.metrics.process_memory("api-0", 5)
    watched.engine.scheduler.add(request("r", prompt(5), 2))
    watched.run()
    text = watched.metrics.render()
    found = values(text)
    for metric in METRICS:
        for prefix in ("octavo:", "vllm:") if metric.prefixed else ("",):
            assert f"# HELP {prefix}{metric.name}" in text.decode(), metric.name
    own = {"model_name": "m", "engine": "0"}
    for prefix in ("octavo", "vllm"):
        info = frozenset({**own, "block_size": "4", "enable_prefix_caching": "True"}.items())
        assert found[f"{prefix}:cache_config_info", info] == 1
        assert found[f"{prefix}:admission_rejections_total", frozenset({**own, "reason": "num_reqs"}.items())] == 1
    route = {"handler": "/v1/completions", "method": "POST"}
    assert found["http_requests_total", frozenset({**route, "status": "2xx"}.items())] == 1
    assert found["http_requests_total", frozenset({**route, "status": "4xx"}.items())] == 1
    assert found["http_request_duration_seconds_bucket", frozenset({**route, "le": "0.1"}.items())] == 1
    assert watched.value("octavo:startup_time_seconds", phase="load") == 1.5
    assert watched.value("octavo:kernel_compilations_total", when="serving") == 1
    assert watched.value("octavo:process_memory_bytes", process="api-0") == 5
    assert watched.value("octavo:process_memory_bytes", process="engine") > 2**20
    assert found["process_resident_memory_bytes", frozenset()] > 2**20


def test_hostile_label_values_stay_labels() -> None:
    watched = Watched()
    watched.metrics.http([("GET", 'a"} 1\nfake 2', 200, 0.1)])
    assert "\nfake" not in watched.metrics.render().decode()
    assert any(dict(labels).get("handler") == 'a"} 1\nfake 2' for _, labels in values(watched.metrics.render()))


def test_the_log_line() -> None:
    watched = Watched()
    metrics, scheduler = watched.metrics, watched.engine.scheduler
    watched.clock.now += 30
    assert metrics.log_line() is None  # nothing ever happened
    scheduler.add(request("r", prompt(8), 50, ignore_eos=True))
    for _ in range(20):
        assert metrics.log_line() is None
        watched.step()
    assert metrics.log_line() == (
        "Engine 000: Avg prompt throughput: 0.8 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 10.9%, Prefix cache hit rate: 0.0%"
    )
    watched.run()
    watched.clock.now += 10
    assert "generation throughput: 1.2 " in (metrics.log_line() or "")
    watched.clock.now += 10
    assert "Running: 0 reqs" in (metrics.log_line() or "")  # one line says that it is quiet
    watched.clock.now += 10
    assert metrics.log_line() is None


def test_the_snapshot() -> None:
    watched = Watched()
    scheduler = watched.engine.scheduler
    for i in range(9):
        scheduler.add(request(f"r{i}", prompt(8, i), 20, ignore_eos=True))
    for _ in range(6):
        watched.step()
    found = watched.metrics.snapshot()
    assert (found["running"], found["waiting"], found["server_load"], found["max_num_seqs"]) == (8, 1, 9, 8)
    assert found["kv_blocks"] == {"used": 32, "total": 64}
    assert found["kv_cache_usage"] == 0.5
    assert found["tokens_per_second"] == {"prompt": 64 / 3, "generation": 16.0} | {"prompt": 21.3}
    assert found["uptime_s"] == 3.0
    assert found["totals"] == {"prompt_tokens": 64, "generation_tokens": 48, "requests": 0, "preemptions": 0}


def test_buckets() -> None:
    assert up_to(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert up_to(4096)[-1] == 2000
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 3):
        histogram.observe(value)
    histogram.observe(2, 3)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 6), ("+Inf", 7)]
    assert histogram.sum == 12


def test_windows_forget() -> None:
    rate = Rate(5, 0.0)
    rate.add(0.5, 10)
    assert rate.per_second(0.5) == 10  # never over less than a second
    assert rate.per_second(4) == 2.5
    assert rate.per_second(5.5) == 0
    window = Percentiles(60)
    assert window.at(0, 0.5) is None
    for i in range(1, 101):
        window.add(float(i) / 10, i / 100)
    assert window.at(10, 0.5, 0.9, 0.99, 1.0, 0.0) == [0.5, 0.9, 0.99, 1.0, 0.01]
    window.add(10, 9.0, 900)
    assert window.at(10, 0.5) == [9.0]
    assert window.at(71, 0.5) is None


def test_a_step_of_256_costs_little() -> None:
    """The bound is wide, for a busy machine; docs/performance.md has the figure of a quiet one."""
    watched = Watched(max_num_seqs=256)
    metrics = watched.metrics
    watched.engine.scheduler.subscribers.clear()
    from_scheduler = [request(f"r{i}", [1, 2, 3], 90) for i in range(256)]
    for one in from_scheduler:
        metrics._live.add(one, 1000.0, "")
    ids = tuple(one.id for one in from_scheduler)
    step = Step(chunks=[Chunk(i, 5, 1) for i in range(256)])
    best = 1.0
    for _ in range(30):
        watched.clock.now += 0.01
        deltas = tuple(Delta(i, [1]) for i in ids)
        begin = time.perf_counter()
        metrics(Planned(step, ids))
        metrics(Committed(step, StepResult([[1]] * 256), deltas))
        best = min(best, time.perf_counter() - begin)
    assert metrics.store.get("generation_tokens") == 30 * 256
    assert best < 1e-3, f"{best * 1e3:.3f} ms"
    print(f"{best * 1e3:.3f} ms a step")


def test_names_are_those_prometheus_allows() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_][a-z0-9_]*", metric.name), metric.name
        assert not (metric.kind == "counter" and metric.name.endswith("_total"))


def test_reasons_are_all_there_from_the_start() -> None:
    watched = Watched()
    for reason in FinishReason:
        assert watched.value("octavo:request_success_total", finished_reason=str(reason)) == 0
