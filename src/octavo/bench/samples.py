"""The values behind a result's figures, for comparisons: of requests, of rounds, or one a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.bench.report_figures import raw_of
from octavo.bench.report_tables import is_number

Statistic = Callable[[Any, int], Any]  # of an array along an axis, as numpy has them
THROUGHPUTS = (
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("requests_per_second", "output_tokens_per_second", "tokens_per_second", "highest_rate"),
)
SMALLER_IS_BETTER = ("_ms", "seconds", "latency", "failed")
LEAST_FOR_P99 = 100  # of fewer values it is the largest one, whatever that was
STATISTICS: dict[str, Statistic] = {
    "mean": lambda values, axis: np.mean(values, axis=axis),
    "median": lambda values, axis: np.median(values, axis=axis),
    "p99": lambda values, axis: np.percentile(values, 99, axis=axis),
}


@dataclass(slots=True)
class Values:
    """One metric of one side: `runs` has the values of each run; `statistic` makes the figure of them all."""

    statistic: Statistic
    runs: list[list[float]] = field(default_factory=list)

    @property
    def figure(self) -> float:
        return float(self.statistic(np.concatenate([np.asarray(run, dtype=float) for run in self.runs]), 0))

    @property
    def count(self) -> int:
        return sum(len(run) for run in self.runs)

    def resampled(self, times: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """The figure of `times` samples drawn with replacement: runs where there are several, then values of them."""
        runs = [np.asarray(run, dtype=float) for run in self.runs]
        if len(runs) == 1:
            picks = rng.integers(0, len(runs[0]), (times, len(runs[0])))
            return np.asarray(self.statistic(runs[0][picks], 1))
        found = np.empty(times)
        for number in range(times):
            chosen = [runs[place] for place in rng.integers(0, len(runs), len(runs))]
            drawn = [run[rng.integers(0, len(run), len(run))] for run in chosen]
            found[number] = self.statistic(np.concatenate(drawn), 0)
        return found


def lower_is_better(metric: str) -> bool:
    return metric.partition(" ")[0].endswith(SMALLER_IS_BETTER)


def values_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """Every metric that a side's runs have, in the order in which they first have it."""
    found: dict[str, Values] = {}
    for result in results:
        for metric, statistic, values in _metrics(result):
            if values:
                found.setdefault(metric, Values(statistic)).runs.append(values)
    return {metric: values for metric, values in found.items() if len(values.runs) == len(results)}


def _metrics(result: Mapping[str, Any]) -> list[tuple[str, Statistic, list[float]]]:
    mean = STATISTICS["mean"]
    found = [(name, mean, [float(result[name])]) for name in THROUGHPUTS if is_number(result.get(name))]
    if "avg_latency" in result and isinstance(result.get("latencies"), list):
        found.append(("avg_latency", mean, [float(value) for value in result["latencies"]]))
        tokens = result.get("total_output_tokens", 0) / max(1, len(result["latencies"]))
        found = [one for one in found if one[0] != "output_throughput"]
        # Equal batches, so the mean of their times has the throughput in it; a round is what varies.
        found.append(("output_throughput", mean, [tokens / value for value in result["latencies"]]))
    for name in ("cold_startup", "cold_first_token", "warm_startup", "warm_first_token"):
        found.append((f"avg_{name}_seconds", mean, [float(value) for value in result.get(f"{name}_times") or ()]))
    raw = raw_of(result)
    for name in ("ttft", "tpot", "e2el"):
        for kind, statistic in STATISTICS.items():
            key = f"{kind}_{name}_ms"
            if kind == "p99" and len(raw.get(name) or ()) in range(1, LEAST_FOR_P99):
                continue
            if raw.get(name):
                found.append((key, statistic, raw[name]))
            elif is_number(result.get(key)) and result[key] > 0:
                found.append((key, mean, [float(result[key])]))
    for kind in STATISTICS:  # chunks of one answer are not independent, so their figures have no interval
        if is_number(result.get(f"{kind}_itl_ms")) and result[f"{kind}_itl_ms"] > 0:
            found.append((f"{kind}_itl_ms", mean, [float(result[f"{kind}_itl_ms"])]))
    for row in result.get("rows") or ():
        varied = ", ".join(f"{name}={value}" for name, value in list(row.items())[: result.get("num_varied", 1)])
        samples = row.get("samples") or {
            name: [value]
            for name, value in row.items()
            if is_number(value) and (name in THROUGHPUTS or name.endswith("_ms")) and result.get("kind") == "sweep"
        }
        for name, values in samples.items():
            found.append((f"{name} [{varied}]", mean, [float(value) for value in values]))
    return found
