"""The engine at a glance: the snapshot of the live page and GET /load, and the log line of every ten seconds."""

from collections import deque
from typing import Any

from octavo.core.scheduler import Scheduler
from octavo.observe.series import Store
from octavo.observe.window import Percentiles, Rate

WINDOW = 60.0  # seconds of the latency percentiles
RATE_WINDOW = 5.0  # seconds of the token rates of `snapshot`
FINISHED_WINDOW = 30.0  # seconds of the rate at which requests end, for those that must wait
LOG_INTERVAL = 10.0
RECENT_LOOKUPS = 1000  # requests of the shown prefix hit rate


class Readings:
    """What is shown of the recent past. `Metrics` fills the windows; times are seconds of its clock."""

    def __init__(self, scheduler: Scheduler, store: Store, model_name: str, engine: str, now: float) -> None:
        self.scheduler, self.store, self.model_name, self.engine = scheduler, store, model_name, engine
        self.latencies = {name: Percentiles(WINDOW) for name in ("ttft", "itl", "e2e", "queue")}
        self.finished_rate = Rate(FINISHED_WINDOW, now)
        self.prompt_rate, self.generation_rate = Rate(RATE_WINDOW, now), Rate(RATE_WINDOW, now)
        self.lookups: deque[tuple[int, int]] = deque(maxlen=RECENT_LOOKUPS)  # tokens asked for, tokens found
        self._start = self._logged_at = now
        self._logged, self._logged_idle = (0.0, 0.0, 0.0), True

    @property
    def kv_cache_usage(self) -> float:
        pool = self.scheduler.pool
        return (pool.num_usable - pool.num_free) / pool.num_usable

    @property
    def hit_rate(self) -> float:
        queries = sum(asked for asked, _ in self.lookups)
        return sum(found for _, found in self.lookups) / queries if queries else 0.0

    def snapshot(self, now: float) -> dict[str, Any]:
        pool, scheduler, get = self.scheduler.pool, self.scheduler, self.store.get
        return {
            "server_load": scheduler.num_running + scheduler.num_waiting,
            "model": self.model_name,
            "uptime_s": round(now - self._start, 3),
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "max_num_seqs": scheduler.max_num_seqs,
            "kv_cache_usage": self.kv_cache_usage,
            "kv_blocks": {"used": pool.num_usable - pool.num_free, "total": pool.num_usable},
            "prefix_cache": {
                "queries": int(get("prefix_cache_queries")),
                "hits": int(get("prefix_cache_hits")),
                "hit_rate": self.hit_rate,
            },
            "tokens_per_second": {
                "prompt": round(self.prompt_rate.per_second(now), 1),
                "generation": round(self.generation_rate.per_second(now), 1),
            },
            "latency_ms": {name: _percentiles(window, now) for name, window in self.latencies.items()},
            "totals": {
                "prompt_tokens": int(get("prompt_tokens")),
                "generation_tokens": int(get("generation_tokens")),
                "requests": int(sum(self.store.numbers["request_success"].values())),
                "preemptions": int(get("num_preemptions")),
            },
            "window_s": WINDOW,
        }

    def log_line(self, now: float) -> str | None:
        elapsed = now - self._logged_at
        if elapsed < LOG_INTERVAL:
            return None
        get, scheduler = self.store.get, self.scheduler
        counts = (get("prompt_tokens"), get("generation_tokens"), get("num_preemptions"))
        prompt, generated, preempted = (new - old for new, old in zip(counts, self._logged, strict=True))
        idle = not (prompt or generated or scheduler.num_running or scheduler.num_waiting)
        was_idle = self._logged_idle
        self._logged_at, self._logged, self._logged_idle = now, counts, idle
        if idle and was_idle:
            return None
        parts = [
            f"Avg prompt throughput: {prompt / elapsed:.1f} tokens/s",
            f"Avg generation throughput: {generated / elapsed:.1f} tokens/s",
            f"Running: {scheduler.num_running} reqs",
            f"Waiting: {scheduler.num_waiting} reqs",
            *([f"Preemptions: {preempted:.0f}"] if preempted else []),
            f"GPU KV cache usage: {self.kv_cache_usage * 100:.1f}%",  # the words that users' scripts look for
            f"Prefix cache hit rate: {self.hit_rate * 100:.1f}%",
        ]
        return f"Engine {self.engine:0>3}: {', '.join(parts)}"


def _percentiles(window: Percentiles, now: float) -> dict[str, float] | None:
    found = window.at(now, 0.5, 0.9, 0.99)
    names = ("p50", "p90", "p99")
    return None if found is None else {name: round(s * 1e3, 3) for name, s in zip(names, found, strict=True)}
