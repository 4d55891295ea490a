"""What a running server tells its operators: log lines as JSON, requests, throughput, metrics by prefix, traces."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import tiny_models
import tiny_tokenizers
from server_process import TINY_FLAGS, ServerProcess, running_server

SHORT_INTERVAL = """
import sys

if "octavo.engine.process" in sys.orig_argv:
    from octavo.observe import readings

    readings.LOG_INTERVAL = 0.5
"""
SAID = {"prompt": "some words of a secret", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An OTLP collector in this process; `spans` is what came."""

    def __init__(self) -> None:
        grpc = pytest.importorskip("grpc", reason="the extra otel is not installed")
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
        messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        self.spans: list[Any] = []
        self.came = threading.Event()
        collector = self

        class Service(service.TraceServiceServicer):  # type: ignore[name-defined,misc]
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                collector.came.set()
                return messages.ExportTraceServiceResponse()

        self.server = grpc.server(ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(Service(), self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.stop(0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("output")
    model = tiny_models.save(tiny_models.oracle(), folder / "model")
    tiny_tokenizers.f_bpe(model)
    code = folder / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(SHORT_INTERVAL)
    flags = (
        "--log-format=json",
        "--metrics-prefix=octavo,vllm",
        "--enable-log-requests",
        f"--otlp-traces-endpoint=http://127.0.0.1:{collector.port}",
    )
    environment = {
        "PYTHONPATH": os.pathsep.join([str(code), *filter(None, sys.path)]),
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with running_server(model, *TINY_FLAGS, *flags, folder=folder, environment=environment) as process:
        headers = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = httpx.post(process.url + "/v1/completions", json=SAID, headers=headers, timeout=30)
        assert answer.status_code == 200
        yield process


def entries(server: ServerProcess, what: str, seconds: float = 10.0) -> list[dict[str, Any]]:
    """The JSON lines whose message has `what`, as soon as there is one; every line of the log must be JSON."""
    deadline = time.monotonic() + seconds
    while True:
        lines = server.log.split("\n")[:-1]
        found = [entry for entry in map(json.loads, lines) if what in entry["message"]]
        if found:
            return found
        assert time.monotonic() < deadline, f"nothing about {what!r} in {server.log}"
        time.sleep(0.05)


def test_every_line_is_json_with_its_place(server: ServerProcess) -> None:
    (ready,) = entries(server, "is ready at")
    assert {"time", "level", "message", "logger", "file", "line", "pid", "process"} <= set(ready)
    assert ready["process"] == "api-0" and ready["level"] == "INFO"


def test_requests_are_logged_without_their_text(server: ServerProcess) -> None:
    (received,) = entries(server, "Received request 'cmpl-mine-1")
    assert received["process"] == "api-0" and received["num_prompt_tokens"] > 0
    assert "max_tokens=12" in received["message"]
    (finished,) = entries(server, "Finished request")
    assert finished["process"] == "engine" and finished["finish_reason"] == "length"
    assert finished["num_generated_tokens"] == 12 and "mine-1" in finished["request_id"]
    assert "secret" not in server.log


def test_the_line_of_throughput(server: ServerProcess) -> None:
    httpx.post(server.url + "/v1/completions", json=SAID, timeout=30)
    line = entries(server, "Avg generation throughput")[0]
    assert line["process"] == "engine" and line["message"].startswith("Engine 000: Avg prompt throughput: ")
    for part in (" tokens/s, Running: ", " reqs, Waiting: ", " reqs, GPU KV cache usage: ", "Prefix cache hit rate: "):
        assert part in line["message"]


def test_metrics_under_both_prefixes(server: ServerProcess) -> None:
    text = httpx.get(server.url + "/metrics").text
    for prefix in ("octavo", "vllm"):
        for name in ("num_requests_running", "time_to_first_token_seconds_bucket", "generation_tokens_total"):
            assert f"\n{prefix}:{name}{{" in text, (prefix, name)
    assert "\nhttp_requests_total{" in text
    ours = [line.removeprefix("octavo:") for line in text.splitlines() if line.startswith("octavo:")]
    theirs = [line.removeprefix("vllm:") for line in text.splitlines() if line.startswith("vllm:")]
    assert sorted(ours) == sorted(theirs) and ours


def test_spans_reach_the_collector(server: ServerProcess, collector: Collector) -> None:
    deadline = time.monotonic() + 10
    while not (spans := [span for span in collector.spans if span.trace_id.hex() == TRACE]):
        assert collector.came.wait(max(0.0, deadline - time.monotonic())), "no span came"
        collector.came.clear()
    (span,) = spans
    assert span.name == "llm_request" and span.parent_span_id.hex() == PARENT
    values = {pair.key: pair.value for pair in span.attributes}
    assert values["gen_ai.usage.completion_tokens"].int_value == 12
    assert values["gen_ai.latency.time_in_queue"].double_value >= 0
    assert "startup" in {span.name for span in collector.spans}
