"""Writes docs/metrics.md from the catalogue of metrics."""

from pathlib import Path

from octavo.observe.catalogue import METRICS, UP_TO_MODEL_LEN, Metric

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """# Metrics

`GET /metrics` answers with Prometheus text for the whole server, however many API processes run. Names and buckets
are those of vLLM with the prefix `octavo:`; `--metrics-prefix octavo,vllm` serves each metric under both, for
dashboards and gateways that read `vllm:` only. `--metrics-key` is a key for the scraper alone, `--metrics-open` needs
none.

Every prefixed metric has the labels `model_name` (the first served name) and `engine`. Counters end in `_total`.
Besides these there are `process_*` and `python_*` of the engine process. This page is written by `scripts/metrics.py`
from `src/octavo/observe/catalogue.py`.

What is counted: a request with n > 1 is n sequences, and every histogram but `request_params_n` and
`request_max_num_generation_tokens` counts sequences. Prompt tokens are counted once, with the first token, however
often a sequence is preempted; a prefix hit is what the first admission found. Latencies begin when the API process
hands the request over, after its prompt was tokenized, and include the queue.

| metric | kind | labels | meaning | buckets |
| --- | --- | --- | --- | --- |
"""

TAIL = """
Metrics of vLLM that are not here belong to parts that Octavo does not have: `external_prefix_cache_*`, `mm_cache_*`,
`kv_offload_*`, `lora_requests_info`, `spec_decode_*`, `engine_sleep_state`, `estimated_*_per_gpu_total`,
`kv_block_*_seconds`.

`GET /load` answers the engine's state at a glance as JSON (running, waiting, KV use, prefix hits, tokens per second,
latency percentiles over the last minute); the page at `/` draws it. The log has a line every ten seconds while there is
work (`--disable-log-stats` leaves it out); `--log-format json` makes every line an object, and `--enable-log-requests`
logs each request without its text.

## Traces

`--otlp-traces-endpoint http://collector:4317` (with `pip install 'octavo[otel]'`) sends one span `llm_request` a
sequence, with vLLM's attributes (`gen_ai.request.*`, `gen_ai.usage.*`, `gen_ai.latency.*`), as a child of the request's
`traceparent`, and one span for each phase of the start. `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` chooses `grpc` or
`http/protobuf`.
"""


def page() -> str:
    return HEAD + "".join(_row(metric) for metric in METRICS) + TAIL


def _row(metric: Metric) -> str:
    name = f"octavo:{metric.name}" if metric.prefixed else metric.name
    suffix = "_total" if metric.kind == "counter" else ""
    labels = ", ".join("the options" if label == "..." else f"`{label}`" for label in metric.labels)
    buckets = " ".join(map(str, metric.buckets))
    if metric.kind == "histogram" and metric.buckets == UP_TO_MODEL_LEN:
        buckets = "1 2 5 10 20 ... to max_model_len"
    return f"| `{name}{suffix}` | {metric.kind} | {labels} | {metric.help} | {buckets} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
