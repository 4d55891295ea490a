"""OpenTelemetry spans: names, attributes and times of requests that a fake device served."""

import sys

import pytest

from fake_device import request
from octavo.errors import InvalidConfig
from octavo.observe.traces import Traces
from test_metrics import Watched, prompt


def watched_with_spans() -> tuple[Watched, Traces, "object"]:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="the extra otel is not installed"
    )
    watched, exporter = Watched(), memory.InMemorySpanExporter()
    traces = Traces("http://localhost:4317", "m", clock=watched.clock, exporter=exporter)
    watched.metrics.on_finished.append(traces)
    return watched, traces, exporter


def test_a_span_a_request() -> None:
    watched, traces, exporter = watched_with_spans()
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    watched.metrics.arrived(["a"], watched.clock.now - 0.5, f"00-{trace}-{parent}-01")
    watched.engine.scheduler.add(request("a", prompt(5), 3, temperature=0.5, top_p=0.9))
    watched.engine.scheduler.add(request("b", prompt(5, 1), 3))
    watched.engine.scheduler.abort("b")
    watched.run()
    traces.startup({"load": 2.0, "cache": 0.5})
    traces.close()
    spans = {span.attributes.get("gen_ai.request.id", span.name): span for span in exporter.get_finished_spans()}
    assert set(spans) == {"a", "b", "startup", "load", "cache"}
    span = spans["a"]
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    assert format(span.context.trace_id, "032x") == trace
    assert format(span.parent.span_id, "016x") == parent
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.0, abs=1e-3)
    latencies = {k.rpartition(".")[2]: v for k, v in span.attributes.items() if "latency" in k}
    assert latencies == pytest.approx(
        {
            "time_in_queue": 1.0,
            "time_to_first_token": 1.0,
            "e2e": 2.0,
            "time_in_model_prefill": 0.0,
            "time_in_model_decode": 1.0,
            "time_in_model_inference": 1.0,
        }
    )
    rest = {k.removeprefix("gen_ai."): v for k, v in span.attributes.items() if "latency" not in k}
    assert rest == {
        "response.model": "m",
        "request.id": "a",
        "request.n": 1,
        "request.max_tokens": 3,
        "request.top_p": 0.9,
        "request.temperature": 0.5,
        "usage.prompt_tokens": 5,
        "usage.completion_tokens": 3,
    }
    assert "gen_ai.latency.time_to_first_token" not in spans["b"].attributes
    assert spans["load"].parent.span_id == spans["startup"].context.span_id
    assert spans["cache"].start_time == spans["load"].end_time


def test_a_traceparent_that_is_none_begins_a_trace() -> None:
    watched, traces, exporter = watched_with_spans()
    watched.metrics.arrived(["a"], watched.clock.now, "not-a-traceparent\n")
    watched.engine.scheduler.add(request("a", prompt(5), 1))
    watched.run()
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfig, match=r"otlp_traces_endpoint=http://x:1 needs OpenTelemetry.*octavo\[otel\]"):
        Traces("http://x:1", "m")


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(InvalidConfig, match="carrier-pigeon"):
        Traces("http://x:1", "m")
