"""`octavo bench compare`: how one side's figures stand to another's, with confidence intervals; never loads torch."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from octavo.bench import report, results
from octavo.bench.report_tables import flat
from octavo.bench.samples import Values, lower_is_better, values_of
from octavo.errors import InvalidConfig

SAME = (  # what must be equal for a comparison to mean something; dotted paths into a result
    *("model_id", "input_len", "output_len", "batch_size", "n", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "goodput_slos_ms", "total_input_tokens", "total_output_tokens", "num_requests"),
    *("processor", "cores", "platform", "roofline.machine.name", "configuration.model.seed"),
)
SAME_UNDER = ("configuration.workload.", "configuration.load.")
NOT_COMPARED = (  # where and by whom, not what
    *("configuration.target.port", "configuration.target.base_url", "configuration.target.model"),
    *("configuration.load.clients", "configuration.model.model"),
)


def compare(
    *files: Annotated[Path, Parameter(name="RESULT.json")],
    to: Annotated[tuple[Path, ...], Parameter(name="--to", consume_multiple=True, negative_iterable=())] = (),
    metrics: str = "",
    confidence: float = 95.0,
    resamples: int = 2000,
    seed: int = 0,
    fail_below: float | None = None,
    output_json: Path | None = None,
    output_html: Path | None = None,
) -> None:
    """Ratio of the second result's figures to the first one's, with a confidence interval by bootstrap.

    octavo bench compare A.json B.json, or several runs a side: octavo bench compare A1.json A2.json --to B1.json B2.json.
    An interval comes from the times of single requests or rounds in the files (bench serve: --detailed) and, with
    several runs a side, from the differences between runs too. Exit status 1: a metric is worse than --fail-below.

    Parameters
    ----------
    files
        Results of one octavo bench command: A.json B.json, or all of the first side and --to for the second.
    to
        Results of the second side, where a side has several runs: A1.json A2.json --to B1.json B2.json.
    metrics
        Only these, such as output_throughput,median_ttft_ms; all that both sides have when not given.
    confidence
        Percent of the interval.
    resamples
        Samples of the bootstrap.
    seed
        The same number draws the same samples.
    fail_below
        Exit with 1 where the whole interval of a metric's performance lies below this share of the first side's (0.95:
        more than 5 % slower). Performance is the ratio of throughputs, and the inverse ratio of times.
    output_json
        File for the comparison.
    output_html
        File for the comparison as one page.
    """  # noqa: E501
    if not 50 <= confidence < 100:
        raise InvalidConfig(f"confidence={confidence} is not allowed: it must be from 50 to below 100 percent.")
    if not 100 <= resamples <= 100_000:
        raise InvalidConfig(f"resamples={resamples} is not allowed: it must be from 100 to 100000.")
    if fail_below is not None and not 0 < fail_below <= 10:
        raise InvalidConfig(f"fail_below={fail_below} is not allowed: it must be above 0 and at most 10.")
    first, second = _sides(files, to)
    result = compared(first, second, _names(metrics), confidence, resamples, seed)
    worse = failures(result["rows"], fail_below) if fail_below is not None else []
    result |= {"fail_below": fail_below, "failed_metrics": worse}
    show(result)
    if output_json:
        results.write_json(output_json, result)
    if output_html:
        report.write(output_html, result)
    if worse:
        print(f"Below {fail_below:g} of the first side: {', '.join(worse)}.", file=sys.stderr)
        sys.exit(1)


Side = list[dict[str, Any]]


def _sides(files: Sequence[Path], to: Sequence[Path]) -> tuple[Side, Side]:
    if not to and len(files) != 2:
        raise InvalidConfig(
            f"{len(files)} file{'s' * (len(files) != 1)} without --to: two are needed.",
            "Give two files, or several and --to with those of the second side.",
        )
    if to and not files:
        raise InvalidConfig("The first side has no file.", "Name its files before --to.")
    sides = (list(files), list(to)) if to else ([files[0]], [files[1]])
    first, second = ([result for path in side for result in report.read(path)] for side in sides)
    kinds = {report.kind_of(result) for result in (*first, *second)}
    if len(kinds) > 1 or kinds == {"result"} or kinds == {"compare"}:
        raise InvalidConfig(
            f"Results of {', '.join(sorted(kinds))} cannot be compared.", "Give results of one octavo bench command."
        )
    return first, second


def compared(
    first: Side, second: Side, names: Sequence[str], confidence: float, resamples: int, seed: int
) -> dict[str, Any]:
    """
    Raises:
        InvalidConfig: no metric that both sides have, or an unknown one asked for.
    """
    a, b = values_of(first), values_of(second)
    shared = [metric for metric in a if metric in b]
    unknown = [name for name in names if name not in {metric.partition(" ")[0] for metric in shared}]
    if unknown or not shared:
        there_are = ", ".join(dict.fromkeys(metric.partition(" ")[0] for metric in shared)) or "none"
        raise InvalidConfig(f"--metrics {unknown[0] if unknown else ''}: both sides have {there_are}.")
    chosen = [metric for metric in shared if not names or metric.partition(" ")[0] in names]
    rows = [_row(metric, a[metric], b[metric], confidence, resamples, seed) for metric in chosen]
    return {
        "kind": "compare",
        "compared": report.kind_of(first[0]),
        "model_id": second[0].get("model_id"),
        "rows": rows,
        "confidence": confidence,
        "resamples": resamples,
        "seed": seed,
        "runs": [len(first), len(second)],
        "failed_requests": [sum(result.get("failed") or 0 for result in side) for side in (first, second)],
        "workload_differs": workload_differs([*first, *second]),
        "settings_differ": settings_differ(first, second),
        "date": results.now(),
        **results.environment(),
    }


def _row(metric: str, a: Values, b: Values, confidence: float, resamples: int, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"metric": metric, "a": a.figure, "b": b.figure, "ratio": None, "low": None, "high": None}
    if not a.figure:
        return row | {"verdict": "no ratio"}
    row["ratio"] = ratio = b.figure / a.figure
    if min(a.count, b.count) < 2:
        return row | {"verdict": "no interval"}
    rng = np.random.default_rng(seed)
    below, above = a.resampled(resamples, rng), b.resampled(resamples, rng)
    tail = (100 - confidence) / 2
    low, high = (float(value) for value in np.percentile(above / np.maximum(below, 1e-300), [tail, 100 - tail]))
    better = ratio < 1 if lower_is_better(metric) else ratio > 1
    verdict = "unclear" if low <= 1 <= high else "better" if better else "worse"
    return row | {"low": low, "high": high, "verdict": verdict, "values": [a.count, b.count]}


def failures(rows: Sequence[Mapping[str, Any]], least: float) -> list[str]:
    """Metrics whose performance, by all of its interval, is below `least` of the first side's."""
    found = []
    for row in rows:
        if row["ratio"] is None:
            continue
        if lower_is_better(row["metric"]):
            best = row["ratio"] if row["low"] is None else row["low"]
            performance = 1 / best if best > 0 else float("inf")
        else:
            performance = row["ratio"] if row["high"] is None else row["high"]
        if performance < least:
            found.append(str(row["metric"]))
    return found


def workload_differs(side: Side) -> dict[str, list[Any]]:
    """What should be the same in all results and is not, by its path: the different values."""
    given = [dict(flat(result)) for result in side]
    paths = dict.fromkeys(path for found in given for path in found if path.startswith(SAME_UNDER) or path in SAME)
    found: dict[str, list[Any]] = {}
    for path in paths:
        values = list(dict.fromkeys(_text(one.get(path)) for one in given))
        counts_rounds = path.startswith("total_") and "avg_latency" in side[0]
        if len(values) > 1 and path not in NOT_COMPARED and not counts_rounds:
            found[path] = values
    return found


def settings_differ(first: Side, second: Side) -> dict[str, list[Any]]:
    """Settings of the engine or server and versions in which the sides differ: what a comparison is about."""
    given = []
    for result in (first[0], second[0]):
        engine = (result.get("sweep_settings") or {}).get("engine") or {}
        about = {"configuration": (result.get("configuration") or {}) | engine}
        given.append(dict(flat(about | (result.get("versions") or {}))))
    paths = dict.fromkeys(path for found in given for path in found)
    return {
        path: [_text(found.get(path)) for found in given]
        for path in paths
        if not path.startswith(SAME_UNDER)
        and path not in (*SAME, *NOT_COMPARED)
        and given[0].get(path) != given[1].get(path)
    }


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def show(result: Mapping[str, Any]) -> None:
    """Warnings first, then the table."""
    for path, values in result["workload_differs"].items():
        print(f"WARNING: not the same work or machine: {path} is {' and '.join(values)}.")
    if any(result["failed_requests"]):
        failed = " and ".join(str(count) for count in result["failed_requests"])
        print(f"WARNING: requests failed, {failed}: they are in no figure.")
    for path, values in result["settings_differ"].items():
        print(f"Differs: {path}: {values[0]} -> {values[1]}")
    percent = f"{result['confidence']:g} % interval"
    heads = ["Metric", "First", "Second", "Ratio", percent, "Second is"]
    lines = []
    for row in result["rows"]:
        interval = "-" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append([row["metric"], row["a"], row["b"], ratio, interval, row["verdict"]])
    results.table(heads, lines)
    if any(row["verdict"] == "unclear" for row in result["rows"]):
        print("unclear: the interval has 1 in it, so these values do not tell the sides apart.")
    if any(row["verdict"] == "no interval" for row in result["rows"]):
        print("no interval: one value a side; give several runs a side (--to).")
