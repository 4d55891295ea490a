"""Writes deploy/grafana.json, a Grafana dashboard of the metrics in octavo.observe.catalogue."""

import json
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parent.parent / "deploy" / "grafana.json"
SELECT = '{model_name=~"$model_name", engine=~"$engine"}'
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS, HEIGHT = 3, 8

Query = tuple[str, str]  # legend, expression


def rate(name: str, by: str = "", where: str = SELECT) -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate(octavo:{name}_total{where}[$__rate_interval]))"


def gauge(name: str) -> str:
    return f"sum(octavo:{name}{SELECT})"


def latency(name: str) -> list[Query]:
    buckets = f"sum by (le) (rate(octavo:{name}_seconds_bucket{SELECT}[$__rate_interval]))"
    return [(f"p{share}", f"histogram_quantile({share / 100}, {buckets})") for share in (50, 90, 99)]


def heat(name: str) -> str:
    return f"sum by (le) (increase(octavo:{name}_bucket{SELECT}[$__rate_interval]))"


def hit_rate(found: str, asked: str) -> str:
    return f"{rate(found)} / {rate(asked)}"


ROWS: dict[str, list[tuple[str, str, list[Query]]]] = {  # row -> (title, unit, queries)
    "Load": [
        (
            "Requests",
            "short",
            [("running", gauge("num_requests_running")), ("waiting", gauge("num_requests_waiting"))],
        ),
        (
            "Tokens per second",
            "short",
            [("generated", rate("generation_tokens")), ("prompt", rate("prompt_tokens"))],
        ),
        (
            "Finished requests per second",
            "reqps",
            [("{{finished_reason}}", rate("request_success", "finished_reason"))],
        ),
    ],
    "Latency": [
        ("Time to first token", "s", latency("time_to_first_token")),
        ("Time between tokens", "s", latency("inter_token_latency")),
        ("Whole request", "s", latency("e2e_request_latency")),
        ("In the queue", "s", latency("request_queue_time")),
        ("Prefill", "s", latency("request_prefill_time")),
        ("Decode", "s", latency("request_decode_time")),
    ],
    "KV cache": [
        ("KV cache in use", "percentunit", [("in use", f"avg(octavo:kv_cache_usage_perc{SELECT})")]),
        ("Prefix cache hit rate", "percentunit", [("hits", hit_rate("prefix_cache_hits", "prefix_cache_queries"))]),
        ("Preemptions per second", "short", [("preemptions", rate("num_preemptions"))]),
    ],
    "Requests": [
        ("Prompt tokens", "short", [("{{le}}", heat("request_prompt_tokens"))]),
        ("Generated tokens", "short", [("{{le}}", heat("request_generation_tokens"))]),
        ("Tokens in a step", "short", [("{{le}}", heat("iteration_tokens_total"))]),
    ],
    "Server": [
        (
            "HTTP requests per second",
            "reqps",
            [("{{handler}} {{status}}", "sum by (handler, status) (rate(http_requests_total[$__rate_interval]))")],
        ),
        (
            "Refused and failed per second",
            "short",
            [
                ("refused: {{reason}}", rate("admission_rejections", "reason")),
                ("corrupted", rate("corrupted_requests")),
                (
                    "compiled while serving",
                    rate("kernel_compilations", where=SELECT[:-1] + ', when="serving"}'),
                ),
            ],
        ),
        ("Memory of the processes", "bytes", [("{{process}}", f"octavo:process_memory_bytes{SELECT}")]),
        ("Seconds of the start", "s", [("{{phase}}", f"octavo:startup_time_seconds{SELECT}")]),
    ],
}  # fmt: skip


def board() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, graphs in ROWS.items():
        panels.append({"type": "row", "title": row, "id": len(panels) + 1, "gridPos": _at(0, y, 24, 1), "panels": []})
        y += 1
        for i, (title, unit, queries) in enumerate(graphs):
            place = _at(i % COLUMNS * (24 // COLUMNS), y + i // COLUMNS * HEIGHT, 24 // COLUMNS, HEIGHT)
            panels.append(_panel(len(panels) + 1, title, unit, queries, place))
        y += -(-len(graphs) // COLUMNS) * HEIGHT
    return {
        "uid": "octavo",
        "title": "Octavo",
        "tags": ["octavo", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("model_name", "Model"),
                _variable("engine", "Engine"),
            ]
        },
        "panels": panels,
    }


def _variable(label: str, title: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(octavo:num_requests_running, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(number: int, title: str, unit: str, queries: list[Query], place: dict[str, int]) -> dict[str, Any]:
    heatmap = queries[0][0] == "{{le}}"
    target = {"datasource": SOURCE, "format": "heatmap" if heatmap else "time_series"}
    return {
        "id": number,
        "type": "heatmap" if heatmap else "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {} if heatmap else {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {**target, "refId": chr(ord("A") + i), "legendFormat": legend, "expr": expression}
            for i, (legend, expression) in enumerate(queries)
        ],
    }


def text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text(), encoding="utf-8")
