"""The figures of a report, from the keys of a benchmark's result."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.bench import charts
from octavo.bench.charts import Bar, Series
from octavo.bench.measures import TITLES, percentile
from octavo.bench.report_tables import LABELS, is_number, label_of, part_name, parted, percents_of

MOST_TIMELINE_ROWS = 280
MOST_DECADES = 1e4  # between the ends of an axis; what is less lies at its end
THROUGHPUTS = ("output_throughput", "total_token_throughput", "tokens_per_second", "request_throughput")


def raw_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds of every request, where a result has them, in order: ttft, tpot, itl, e2el; `rows` in seconds."""
    found = result.get("requests") if isinstance(result.get("requests"), dict) else result
    if not isinstance(found, Mapping) or "start_times" not in found:
        return {}
    columns = [found.get(name) or [] for name in ("start_times", "ttfts", "latencies")]
    queued = found.get("queue_times") or [0.0] * len(columns[0])
    tokens = found.get("output_lens") or [0] * len(columns[0])
    rows = [row for row in zip(*columns, queued, tokens, strict=False) if row[1] is not None and row[2] is not None]
    return {
        "rows": sorted(rows),
        "ttft": sorted(1e3 * row[1] for row in rows),
        "e2el": sorted(1e3 * row[2] for row in rows),
        "tpot": sorted(1e3 * (row[2] - row[1]) / (row[4] - 1) for row in rows if row[4] > 1),
        "itl": sorted(
            1e3 * gap
            for gaps, whole in zip(found.get("itls") or (), columns[2], strict=False)
            if whole is not None  # a request that failed is in no figure
            for gap in gaps
        ),
    }


def timeline(raw: Mapping[str, Any]) -> str:
    rows = raw.get("rows") or []
    if not rows:
        return ""
    step = -(-len(rows) // MOST_TIMELINE_ROWS)
    begin = min(start - queued for start, _, _, queued, _ in rows)
    bars: list[list[Bar]] = []
    for start, first, whole, queued, tokens in rows[::step]:
        told = (
            f"sent at {start - begin:.3f} s, first token after {1e3 * first:.1f} ms, {tokens} tokens in {whole:.3f} s"
        )
        row: list[Bar] = [(start - begin, first, 1, told), (start - begin + first, whole - first, 0, told)]
        if queued > 0.001:
            row.insert(0, (start - begin - queued, queued, 2, f"waited {queued:.3f} s for a place"))
        bars.append(row)
    names = ["tokens", "until the first token", "waiting in the client"]
    what = "requests" if step == 1 else f"every {step}th request"
    return charts.timeline(bars, names if any(r[3] > 0.001 for r in rows) else names[:2], "seconds", what)


def percentiles(result: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    series = []
    for name in ("ttft", "tpot", "itl", "e2el"):
        if values := raw.get(name):
            points = [(float(p), percentile(values, p)) for p in (*range(0, 100, 2), 99, 99.5, 100)]
            series.append(Series(name.upper(), points, dots=False))
        elif len(known := percents_of(result, name)) > 1:
            series.append(Series(name.upper(), list(known.items())))
    series = [one for one in series if any(y > 0 for _, y in one.points)]
    if not series:
        return ""
    least = max(y for one in series for _, y in one.points) / MOST_DECADES
    positive = [Series(s.name, [(x, max(y, least)) for x, y in s.points], dots=s.dots) for s in series]
    return charts.lines(positive, "percentile", "milliseconds", log_y=True)


def histogram(values: Sequence[float] | None, x_label: str, y_label: str) -> str:
    return charts.histogram(values, x_label, y_label) if values and len(values) > 1 else ""


def rows_figures(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if not rows:
        return []
    if {"phase", "seconds"} <= rows[0].keys():
        return [_start(kind, rows) for kind in dict.fromkeys(str(row.get("caches") or "") for row in rows)]
    if {"metric", "ratio", "low", "high"} <= rows[0].keys():
        found = [(label_of(str(r["metric"])), r["low"], r["ratio"], r["high"]) for r in rows if is_number(r["low"])]
        if not found:
            return []
        return [
            ("Ratios, with their confidence intervals", charts.intervals(found, "ratio of the second to the first"))
        ]
    count = result.get("num_varied", 1)
    varied = next(iter(rows[0]))
    if count > 1:
        return _curves(rows, list(rows[0])[:count])
    return [
        *_over(varied, rows),
        *throughput_figures(rows, [str(row.get(varied)) for row in rows], f", by {label_of(varied).lower()}"),
    ]


def _start(kind: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The phases of a cold or a warm start, one after another."""
    begin, bars = 0.0, []
    for row in rows:
        if str(row.get("caches") or "") == kind:
            seconds = float(row["seconds"])
            bars.append([(begin, seconds, 0, f"{row['phase']}: {seconds:.3f} s")])
            begin += seconds
    title = f"Phases of a {kind} start" if kind else "Phases of the start"
    return title, charts.timeline(bars, ["phase"], "seconds", "phases in their order")


def _curves(rows: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> list[tuple[str, str]]:
    """Median latencies over the throughput: a line for all rows that differ in the last varied option alone."""
    across, last = _throughput_of(rows), varied[-1]
    if across is None:
        return []
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(", ".join(f"{name}={row.get(name)}" for name in varied[:-1]), []).append(row)
    found = []
    for name in ("ttft", "tpot", "e2el"):
        key = f"median_{name}_ms"
        if all(is_number(row.get(key)) for row in rows):
            series = []
            for group, members in groups.items():
                points = sorted((row[across], row[key], str(row.get(last))) for row in members)
                series.append(Series(group, [(x, y) for x, y, _ in points], [label for _, _, label in points]))
            title = f"Throughput against {TITLES[name].lower()}, by {label_of(last).lower()}"
            found.append((title, charts.lines(series, LABELS[across].lower(), f"median {name.upper()} (ms)")))
    return found


def _over(varied: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The throughput over what was varied, where that is a number."""
    key = _throughput_of(rows)
    if key is None or len(rows) < 2 or not all(is_number(row[varied]) for row in rows):
        return []
    name, label = LABELS[key], label_of(varied).lower()
    points = sorted((row[varied], row[key]) for row in rows)
    return [(f"{name} by {label}", charts.lines([Series(name, points)], label, name.lower()))]


def _throughput_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    return next((key for key in THROUGHPUTS if all(is_number(row.get(key)) for row in rows)), None)


def throughput_figures(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], title: str = ""
) -> list[tuple[str, str]]:
    """Each latency over the throughput, a point a row, with its label."""
    across = _throughput_of(rows)
    if across is None or len(rows) < 2:
        return []
    found = []
    for name in ("ttft", "tpot", "itl", "e2el"):
        series: list[Series] = []
        for kind in ("median", "mean", "p99"):
            key = f"{kind}_{name}_ms"
            if all(is_number(row.get(key)) for row in rows) and not (kind == "mean" and series):
                points = sorted((row[across], row[key], label) for row, label in zip(rows, labels, strict=True))
                marks = [label for _, _, label in points] if not series else []
                series.append(Series(f"{kind} {name.upper()}", [(x, y) for x, y, _ in points], marks))
        if series:
            figure = charts.lines(series, LABELS[across].lower(), f"{name.upper()} (ms)")
            found.append((f"Throughput against {TITLES[name].lower()}{title}", figure))
    return found


def roofline_figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result.get("roofline")
    if not isinstance(found, dict):
        return []
    points = [(name, kind["flops"] / kind["bytes"], kind["flops_per_second"]) for name, kind in found["kinds"].items()]
    bars = [(name, [(part_name(part), part["share"]) for part in kind["parts"]]) for name, kind in parted(found)]
    return [
        ("How far from the limit", charts.roof(found["bandwidth"], found["flops"], points)),
        ("Where a step went", charts.stacked(bars, "percent of a step")),
    ]
