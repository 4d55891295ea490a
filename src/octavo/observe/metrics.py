"""The engine's metrics: folded from the scheduler's events, read by Prometheus, the log and the live page."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.core.events import Added, Admitted, Committed, Event, Finished, Planned, Preempted
from octavo.core.scheduler import Scheduler
from octavo.observe.catalogue import up_to
from octavo.observe.http_counts import Row
from octavo.observe.readings import Readings
from octavo.observe.requests import Live, Record
from octavo.observe.series import Exposition, Store
from octavo.types import FinishReason

PAGE_SIZE = 4096  # bytes, of /proc/self/statm


class Metrics:
    """Subscribe an instance: `scheduler.subscribers.append(metrics)`. Threads take turns: it may be read anywhere.

    Every latency is measured on `clock` (seconds), in the engine process.

    Args:
        prefixes: each prefixed metric is served once under each of them (`octavo`, `vllm`).
        cache_info: options of the KV cache, the labels of `cache_config_info`.
        phases: seconds of each phase of the start.
        compilations: returns the kernels compiled so far, by when ("startup", "serving").
        step_seconds: returns how long the step at work has run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        model_name: str,
        max_model_len: int,
        engine: str = "0",
        prefixes: Iterable[str] = ("octavo",),
        cache_info: Mapping[str, object] | None = None,
        phases: Mapping[str, float] | None = None,
        compilations: Callable[[], Mapping[str, int]] = dict,
        step_seconds: Callable[[], float] = float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self._turn = threading.Lock()
        self.on_finished: list[Callable[[Record], None]] = []
        self.store = Store(up_to(max_model_len))
        info = {name: str(value) for name, value in (cache_info or {}).items()}
        self._exposition = Exposition(self.store, prefixes, (model_name, engine), info)
        self._compilations, self._step_seconds = compilations, step_seconds
        self._live = Live()
        self._announced: dict[str, tuple[float, str]] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Added: self._added,
            Admitted: self._admitted,
            Planned: self._planned,
            Preempted: self._preempted,
            Committed: self._committed,
            Finished: self._finished,
        }
        self._readings = Readings(scheduler, self.store, model_name, engine, clock())
        self._itl = self.store.histogram("inter_token_latency_seconds")
        self._step_tokens = self.store.histogram("iteration_tokens_total")
        for reason in FinishReason:
            self.store.put("request_success", 0, str(reason))
        for phase, seconds in (phases or {}).items():
            self.store.put("startup_time_seconds", seconds, phase)

    def __call__(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            with self._turn:
                handler(event)

    def arrived(self, request_ids: Iterable[str], at: float, traceparent: str = "") -> None:
        """Say before they are added when their HTTP request came in (same clock) and the trace it belongs to."""
        for request_id in request_ids:
            self._announced[request_id] = (at, traceparent)

    def dropped(self, request_ids: Iterable[str]) -> None:
        """They will never be added."""
        for request_id in request_ids:
            self._announced.pop(request_id, None)

    def rejected(self, reason: str) -> None:
        with self._turn:
            self.store.add("admission_rejections", 1, reason)

    def finished_per_second(self) -> float:
        """Sequences that ended lately, of their own or by an abort; 0 before any has."""
        with self._turn:
            return self._readings.finished_rate.per_second(self.clock())

    def http(self, rows: Iterable[Row]) -> None:
        """What `HttpCounts.take` gave in an API process."""
        with self._turn:
            for method, route, status, seconds in rows:
                self.store.add("http_requests", 1, route, method, f"{status // 100}xx")
                self.store.histogram("http_request_duration_seconds", route, method).observe(seconds)
                self.store.histogram("http_request_duration_highr_seconds").observe(seconds)

    def process_memory(self, process: str, num_bytes: int) -> None:
        with self._turn:
            self.store.put("process_memory_bytes", num_bytes, process)

    def render(self) -> bytes:
        """Prometheus text (version 0.0.4)."""
        if own := resident_memory():
            self.process_memory("engine", own)
        store, scheduler = self.store, self.scheduler
        with self._turn:
            store.put("num_requests_running", scheduler.num_running)
            store.put("num_requests_waiting", scheduler.num_waiting)
            store.put("num_requests_waiting_by_reason", scheduler.num_waiting, "capacity")
            store.put("kv_cache_usage_perc", self._readings.kv_cache_usage)
            store.put("step_running_seconds", self._step_seconds())
            for when, count in self._compilations().items():
                store.put("kernel_compilations", count, when)
            return self._exposition.render()

    def snapshot(self) -> dict[str, Any]:
        """What the live page shows and GET /load answers; latencies in milliseconds over the last `window_s`."""
        with self._turn:
            return self._readings.snapshot(self.clock()) | {"step_seconds": round(self._step_seconds(), 3)}

    def log_line(self) -> str | None:
        """The line of the last ten seconds when it is due; None before that, and while nothing happens."""
        with self._turn:
            return self._readings.log_line(self.clock())

    def _added(self, event: Added) -> None:
        at, traceparent = self._announced.pop(event.request_id, (self.clock(), ""))
        self._live.add(event.request, at, traceparent)

    def _admitted(self, event: Admitted) -> None:
        record = self._live.records.get(event.request_id)
        if record is None or record.admitted_at is not None:
            return  # what a preempted one finds again of its own is no hit
        record.admitted_at = self.clock()
        record.num_cached = event.num_cached_tokens
        if record.request.reads_prefix_cache:
            self.store.add("prefix_cache_queries", event.num_prompt_tokens)
            self.store.add("prefix_cache_hits", event.num_cached_tokens)
            self._readings.lookups.append((event.num_prompt_tokens, event.num_cached_tokens))

    def _planned(self, event: Planned) -> None:
        self._step_tokens.observe(event.step.num_tokens * event.step.repeat)

    def _preempted(self, event: Preempted) -> None:
        self.store.add("num_preemptions")
        if record := self._live.records.get(event.request_id):
            record.num_preemptions += 1

    def _committed(self, event: Committed) -> None:
        """The hot path: once a step, all of its sequences."""
        now, records = self.clock(), self._live.records
        generated = 0
        gaps: dict[float, int] = {}  # sequences that run together have equal gaps
        for delta in event.deltas:
            count = len(delta.token_ids)
            record = records.get(delta.request_id)
            if record is None or not count:  # of one that ended with this, `Finished` told the last tokens
                continue
            generated += count
            record.num_generated += count
            last = record.last_token_at
            record.last_token_at = now
            if last is None:
                self._first_token(record, now)
                last = now
                count -= 1
            if count:
                gap = (now - last) / count
                gaps[gap] = gaps.get(gap, 0) + count
        for gap, count in gaps.items():
            self._gap(now, gap, count)
        if generated:
            self.store.add("generation_tokens", generated)
            self._readings.generation_rate.add(now, generated)
        if event.result.faults:
            self.store.add("corrupted_requests", len(event.result.faults))

    def _first_token(self, record: Record, now: float) -> None:
        record.first_token_at = now
        ttft = now - record.arrived_at
        self.store.histogram("time_to_first_token_seconds").observe(ttft)
        self._readings.latencies["ttft"].add(now, ttft)
        prompt, cached = record.num_prompt_tokens, record.num_cached
        for name, amount, *labels in (
            ("prompt_tokens", prompt),
            ("prompt_tokens_by_source", prompt - cached, "local_compute"),
            ("prompt_tokens_by_source", cached, "local_cache_hit"),
            ("prompt_tokens_cached", cached),
            ("prompt_tokens_cached_by_source", cached, "device"),
        ):
            self.store.add(name, amount, *labels)
        self._readings.prompt_rate.add(now, prompt)

    def _gap(self, now: float, gap: float, count: int) -> None:
        self._itl.observe(gap, count)
        self._readings.latencies["itl"].add(now, gap, count)

    def _finished(self, event: Finished) -> None:
        record = self._live.records.get(event.request_id)
        if record is None:
            return
        now = self.clock()
        count = event.num_generated_tokens - record.num_generated
        if count > 0:  # its `Committed` comes after this
            self.store.add("generation_tokens", count)
            self._readings.generation_rate.add(now, count)
            last = record.last_token_at
            if last is None:
                self._first_token(record, now)
                last = now
                count -= 1
            if count:
                self._gap(now, (now - last) / count, count)
            record.num_generated, record.last_token_at = event.num_generated_tokens, now
        record.finished_at, record.reason = now, event.reason
        self._readings.finished_rate.add(now, 1)
        last_of_group = self._live.finish(record)
        self._observe(record, last_of_group, now)
        for tell in self.on_finished:
            tell(record)

    def _observe(self, record: Record, last_of_group: bool, now: float) -> None:
        self.store.add("request_success", 1, str(record.reason))
        seen: list[tuple[str, float | None]] = [
            ("request_prompt_tokens", record.num_prompt_tokens),
            ("request_generation_tokens", record.num_generated),
            ("request_params_max_tokens", record.request.params.max_tokens),
            ("request_num_preemptions", record.num_preemptions),
            ("request_time_per_output_token_seconds", record.time_per_output_token),
            ("e2e_request_latency_seconds", record.e2e),
            ("request_queue_time_seconds", record.queue_time),
            ("request_inference_time_seconds", record.inference_time),
            ("request_prefill_time_seconds", record.prefill_time),
            ("request_decode_time_seconds", record.decode_time),
        ]
        if record.first_token_at is not None:
            seen.append(("request_prefill_kv_computed_tokens", record.num_prompt_tokens - record.num_cached))
        if last_of_group:
            seen.append(("request_params_n", record.group.n))
            seen.append(("request_max_num_generation_tokens", record.group.most_generated))
        for name, value in seen:
            if value is not None:
                self.store.histogram(name).observe(value)
        for name in ("e2e", "queue"):
            value = record.e2e if name == "e2e" else record.queue_time
            if value is not None:
                self._readings.latencies[name].add(now, value)


def resident_memory() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_SIZE
    except OSError:
        return 0
