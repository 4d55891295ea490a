"""The tables of a report, and how its numbers are written and called."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from octavo.bench.measures import TITLES

SHORT = {"client_queue_time": "client queue time"}
LABELS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "elapsed_time": "Duration (s)",
    "tokenization_time": "Tokenization (s)",
    "num_requests": "Requests",
    "num_prompts": "Requests",
    "total_input_tokens": "Input tokens",
    "total_prompt_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "total_num_tokens": "Tokens",
    "request_throughput": "Requests/s",
    "requests_per_second": "Requests/s",
    "request_goodput": "Goodput (requests/s)",
    "output_throughput": "Output tokens/s",
    "output_tokens_per_second": "Output tokens/s",
    "tokens_per_second": "Tokens/s",
    "total_token_throughput": "Tokens/s",
    "max_output_tokens_per_s": "Most output tokens in a second",
    "max_concurrent_requests": "Most requests at once",
    "avg_latency": "Mean latency of a batch (s)",
    "tokens_per_chunk": "Tokens in a chunk",
    "max_concurrency": "Most requests allowed at once",
    "request_rate": "Request rate asked for (requests/s)",
    "input_len": "Tokens of a prompt",
    "output_len": "Tokens of an answer",
    "batch_size": "Requests in a batch",
    "metric": "Metric",
    "a": "First",
    "b": "Second",
    "ratio": "Ratio",
    "low": "Low",
    "high": "High",
    "verdict": "Second is",
    "caches": "Caches",
    "phase": "Phase",
    "seconds": "Seconds",
    "attainment": "Share that met the objectives",
    "client_was_limit": "The client was the limit",
    "highest_rate": "Highest rate (requests/s)",
    "num_iters": "Runs of each row",
    "output_tokens": "Output tokens",
    "input_tokens": "Tokens of a prompt",
    "batch_seconds": "Time of a batch (s)",
    "cold_batch_seconds": "Time of the cold batch (s)",
    "cold_ttft_ms": "Cold TTFT (ms)",
    "decode_of_limit": "Decode, share of the limit",
    "mean_tokenization_ms": "Tokenization (ms)",
    "mean_queue_ms": "Queue (ms)",
    "mean_prefill_ms": "Prefill (ms)",
    "mean_first_token_ms": "First token (ms)",
    "mean_decode_ms": "Decode (ms)",
    "mean_detokenization_ms": "Detokenization (ms)",
    "mean_whole_ms": "Whole (ms)",
    "mean_decode_token_ms": "Decode a token (ms)",
}
LABELS |= {
    f"avg_{kind}_{name}_time": f"Mean {kind} start{end} (s)"
    for kind in ("cold", "warm")
    for name, end in (("startup", ""), ("first_token", " to the first token"))
}
HEADLINES = (
    *("avg_cold_startup_time", "avg_warm_startup_time", "avg_cold_first_token_time", "avg_warm_first_token_time"),
    *("output_throughput", "output_tokens_per_second", "request_throughput", "requests_per_second", "request_goodput"),
    *("avg_latency", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "median_e2el_ms", "failed"),
)
APART = (
    "num_varied",
    "configuration",
    "versions",
    "roofline",
    "self_check",
    "rows",
    "requests",
    "definitions",
    "server",
    "errors",
)


def parted(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [pair for pair in found["kinds"].items() if pair[1]["parts"]] or [("all", found["total"])]


def part_name(part: Mapping[str, Any]) -> str:
    name = str(part["name"])
    return f"host: {name}" if name in ("plan", "prepare", "commit", "outputs", "wait") else name


def columns(names: Sequence[str], rows: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f'<td data-key="{escape(key)}">{cell}</td>' for cell in cells)
        + "</tr>"
        for label, key, cells in rows
    )
    return f"<div class='scroll'><table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def roofline_table(result: Mapping[str, Any]) -> str:
    found = result.get("roofline")
    if not isinstance(found, dict):
        return ""
    kinds = list(found["kinds"].items())
    lines: list[tuple[str, list[str]]] = [
        ("Steps", [f"{kind['steps']:,}" for _, kind in kinds]),
        ("Tokens a step", [f"{kind['tokens'] / kind['steps']:,.1f}" for _, kind in kinds]),
        ("MB moved a step", [f"{kind['bytes'] / kind['steps'] / 1e6:,.1f}" for _, kind in kinds]),
        ("GFLOP a step", [f"{kind['flops'] / kind['steps'] / 1e9:,.2f}" for _, kind in kinds]),
        ("GB/s", [f"{kind['bytes_per_second'] / 1e9:,.2f}" for _, kind in kinds]),
        ("GFLOP/s", [f"{kind['flops_per_second'] / 1e9:,.1f}" for _, kind in kinds]),
        ("Limit a step (ms)", [f"{1e3 * kind['limit_seconds'] / kind['steps']:,.3f}" for _, kind in kinds]),
        ("Measured a step (ms)", [f"{1e3 * kind['seconds'] / kind['steps']:,.3f}" for _, kind in kinds]),
        ("Limited by", [str(kind["limited_by"]) for _, kind in kinds]),
        ("Reached of the limit", [f"{kind['achieved_share']:.1%}" for _, kind in kinds]),
    ]
    with_parts = parted(found)
    for number, part in enumerate(with_parts[0][1]["parts"]):
        cells = [kind["parts"][number] for _, kind in with_parts]
        lines.append((part_name(part), [f"{cell['ms']:,.3f} ms, {cell['share']:.1%}" for cell in cells]))
    machine = found["machine"]
    note = (
        f"{machine['name']}, {machine['dtype']}: reads {found['bandwidth'] / 1e9:,.1f} GB/s and computes "
        f"{found['flops'] / 1e9:,.0f} GFLOP/s, measured {machine['measured_at']}. The limit is the longer of moving "
        f"the bytes and of computing the FLOPs. Parts come from {found['parts_from']}."
    )
    rows = [(label, "", [escape(cell) for cell in cells]) for label, cells in lines]
    table = columns([name for name, _ in kinds], rows)
    return f"<section><h2>Roofline</h2><p>{escape(note)}</p>{table}</section>"


def tiles(result: Mapping[str, Any]) -> str:
    keys = [key for key in HEADLINES if is_number(result.get(key)) and (key != "failed" or result[key])]
    tiles = "".join(
        f'<div class="tile" data-key="{key}"><b>{shown(result[key])}</b><span>{escape(label_of(key))}</span></div>'
        for key in keys[:8]
    )
    return f'<div class="tiles">{tiles}</div>' if tiles else ""


def differences(result: Mapping[str, Any]) -> str:
    """What a comparison says of settings in which the sides differ."""
    found = result.get("settings_differ") or {}
    rows = [(str(path), [raw(value) for value in values]) for path, values in found.items()]
    table = columns(["First", "Second"], [(path, path, cells) for path, cells in rows])
    return f"<section><h2>Settings that differ</h2>{table}</section>" if rows else ""


def rows_table(rows: Sequence[Mapping[str, Any]], title: str = "Rows") -> str:
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, dict | list)))
    head = "".join(f'<th scope="col">{escape(label_of(key))}</th>' for key in keys)
    body = "".join("<tr>" + "".join(_cell(key, row.get(key)) for key in keys) + "</tr>" for row in rows)
    return (
        f"<section><h2>{escape(title)}</h2><div class='scroll'><table class='rows'><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _cell(key: str, value: Any) -> str:
    kind = " class='text'" if isinstance(value, str) else ""
    return f'<td{kind} data-key="{escape(key)}">{shown(value)}</td>'


def latency_table(result: Mapping[str, Any]) -> str:
    metrics = [name for name in TITLES if is_number(result.get(f"mean_{name}_ms"))]
    if not metrics:
        return ""
    percents = sorted({percent for name in metrics for percent in percents_of(result, name)})
    columns = [("Mean", "mean"), ("Median", "median"), ("Std", "std"), *((f"P{p:g}", f"p{p:g}") for p in percents)]
    head = "".join(f'<th scope="col">{title}</th>' for title, _ in columns)
    body = "".join(
        f'<tr><th scope="row" title="{escape(TITLES[name])}">{escape(SHORT.get(name, name.upper()))}</th>'
        + "".join(
            f'<td data-key="{kind}_{name}_ms">{shown(result.get(f"{kind}_{name}_ms"))}</td>' for _, kind in columns
        )
        + "</tr>"
        for name in metrics
    )
    return (
        f"<section><h2>Latencies in milliseconds</h2><div class='scroll'><table><thead><tr><td></td>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )


def scalar_table(result: Mapping[str, Any]) -> str:
    latencies = set(latency_keys([result]))
    environment = {"date", "model_id", "tokenizer_id", "platform", "processor", "cores", "command", "kind", "label"}
    skipped = latencies | environment | set(APART) | {"prefix_cache", "backend"}
    items = [(k, v) for k, v in result.items() if k not in skipped and not isinstance(v, dict | list) and v is not None]
    return _pairs("Figures", [(label_of(key), key, value) for key, value in items])


def environment(result: Mapping[str, Any]) -> str:
    about = [
        (name, name, result[name])
        for name in ("command", "date", "model_id", "platform", "processor", "cores", "prefix_cache")
        if result.get(name) is not None
    ]
    about += [(name, name, version) for name, version in (result.get("versions") or {}).items()]
    about += [(f"server: {path}", path, value) for path, value in flat(result.get("server") or {})]
    definitions = str(result.get("definitions") or "")
    said = f"<section><h2>Definitions</h2><p class='definitions'>{escape(definitions)}</p></section>"
    return _pairs("Environment", about) + (said if definitions else "")


def settings(result: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<div><dt>{escape(path)}</dt><dd data-key="{escape(path)}">{raw(value)}</dd></div>'
        for path, value in flat(result.get("configuration") or {})
    )
    return f"<section><h2>Settings</h2><dl>{rows}</dl></section>" if rows else ""


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested objects by their dotted path; a list of named objects becomes their names."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "id" in item for item in value):
        return [(path, ", ".join(str(item["id"]) for item in value))]
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flat(item, f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def _pairs(title: str, rows: Sequence[tuple[str, str, Any]]) -> str:
    if not rows:
        return ""
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td data-key="{escape(key)}">{shown(value)}</td></tr>'
        for label, key, value in rows
    )
    return f"<section class='pairs'><h2>{title}</h2><table><tbody>{body}</tbody></table></section>"


def latency_keys(results: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for result in results for key in result)
    return [key for name in TITLES for key in keys if key.endswith(f"_{name}_ms")]


def percents_of(result: Mapping[str, Any], name: str) -> dict[float, float]:
    """Milliseconds by percentile, from keys such as p99_ttft_ms."""
    found = {}
    for key, value in result.items():
        if key.startswith("p") and key.endswith(f"_{name}_ms") and isinstance(value, int | float):
            try:
                found[float(key[1 : -len(f"_{name}_ms")])] = float(value)
            except ValueError:
                continue
    return dict(sorted(found.items()))


def label_of(key: str) -> str:
    if key in LABELS:
        return LABELS[key]
    name, found, where = key.partition(" [")
    if found:  # a metric of one row
        return f"{label_of(name)} [{where}"
    for name in TITLES:
        if key.endswith(f"_{name}_ms"):
            kind = key[: -len(f"_{name}_ms")]
            return f"{kind.capitalize()} {SHORT.get(name, name.upper())} (ms)"
    return key


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def raw(value: Any) -> str:
    return "–" if value is None else escape(str(value) if isinstance(value, str) else json.dumps(value))


def shown(value: Any) -> str:
    """Text for a cell; two decimals, as the terminal has them."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.2f}" if not 1e-6 < abs(value) < 0.01 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escape(json.dumps(value) if isinstance(value, dict | list | bool) else str(value))
