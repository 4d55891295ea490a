"""OpenTelemetry: one `llm_request` span for each sequence, with the attributes that vLLM gives it.

The SDK is an extra; it is loaded when traces are asked for, and only then.
"""

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from octavo import env
from octavo.errors import InvalidConfig
from octavo.observe.requests import Record
from octavo.types import FinishReason
from octavo.version import __version__

EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


class Traces:
    """Append an instance to `Metrics.on_finished`.

    Spans are sent by a thread of the SDK, in batches; a collector that is away costs spans and nothing else.

    Args:
        endpoint: where the OTLP collector listens, `http://host:4317` (`.../v1/traces` for http/protobuf).
        clock: the metrics' clock; its times are turned into those of the wall.
        exporter: another place to send to, instead of `endpoint`.

    Raises:
        InvalidConfig: the extra is not installed, or a protocol that is neither grpc nor http/protobuf.
    """

    def __init__(
        self, endpoint: str, model_name: str = "", clock: Callable[[], float] = time.monotonic, exporter: Any = None
    ) -> None:
        self.model_name, self.clock = model_name, clock
        protocol = env.otlp_protocol()
        if protocol not in EXPORTERS:
            raise InvalidConfig(
                f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol} is not allowed: it must be grpc or http/protobuf."
            )
        try:
            self._api = import_module("opentelemetry.trace")
            sdk = import_module("opentelemetry.sdk.trace")
            export = import_module("opentelemetry.sdk.trace.export")
            resources = import_module("opentelemetry.sdk.resources")
            self._traceparent = import_module("opentelemetry.trace.propagation.tracecontext")
            if exporter is None:
                exporter = import_module(EXPORTERS[protocol]).OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise InvalidConfig(
                f"otlp_traces_endpoint={endpoint} needs OpenTelemetry, and {error.name} is not installed.",
                "pip install 'octavo[otel]'",
            ) from None
        resource = resources.Resource.create({"service.name": "octavo", "service.version": __version__})
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")

    def __call__(self, record: Record) -> None:
        wall = time.time() - self.clock()  # what to add to the clock
        parent = None
        if record.traceparent:
            propagator = self._traceparent.TraceContextTextMapPropagator()
            parent = propagator.extract({"traceparent": record.traceparent})
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=self._api.SpanKind.SERVER,
            start_time=int((record.arrived_at + wall) * 1e9),
            attributes=self._attributes(record),
        )
        if record.reason is FinishReason.ERROR:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(int(((record.finished_at or record.arrived_at) + wall) * 1e9))

    def startup(self, phases: Mapping[str, float]) -> None:
        """One span for the start that just ended, a child for each phase; `phases` are seconds, in their order."""
        end = time.time()
        begin = end - sum(phases.values())
        whole = self._tracer.start_span("startup", start_time=int(begin * 1e9))
        context = self._api.set_span_in_context(whole)
        for name, seconds in phases.items():
            span = self._tracer.start_span(name, context=context, start_time=int(begin * 1e9))
            begin += seconds
            span.end(int(begin * 1e9))
        whole.end(int(end * 1e9))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def _attributes(self, record: Record) -> dict[str, str | int | float]:
        params = record.request.params
        found: dict[str, str | int | float | None] = {
            "gen_ai.response.model": self.model_name,
            "gen_ai.request.id": record.request.id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_generated,
            "gen_ai.latency.time_in_queue": record.queue_time,
            "gen_ai.latency.time_to_first_token": record.time_to_first_token,
            "gen_ai.latency.e2e": record.e2e,
            "gen_ai.latency.time_in_model_prefill": record.prefill_time,
            "gen_ai.latency.time_in_model_decode": record.decode_time,
            "gen_ai.latency.time_in_model_inference": record.inference_time,
        }
        return {name: value for name, value in found.items() if value is not None}
