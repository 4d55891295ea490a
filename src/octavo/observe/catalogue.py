"""Every metric that Octavo serves: name, kind, labels, buckets. docs/metrics.md is written from it."""

from dataclasses import dataclass
from typing import Literal

REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # seconds
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEW = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
HTTP = (0.1, 0.5, 1)
HTTP_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
UP_TO_MODEL_LEN = ()  # 1, 2, 5, 10, ... up to max_model_len: known when the engine is

OWN_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` come after `model_name` and `engine`; a metric that is not `prefixed` has only its own."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    prefixed: bool = True

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (*OWN_LABELS, *self.labels) if self.prefixed else self.labels


METRICS = (
    Metric("num_requests_running", "gauge", "Sequences that have a slot on the device."),
    Metric("num_requests_waiting", "gauge", "Sequences that wait for one."),
    Metric("step_running_seconds", "gauge", "How long the step at work has run; 0 between steps."),
    Metric("num_requests_waiting_by_reason", "gauge", "Waiting sequences by what they wait for.", ("reason",)),
    Metric("kv_cache_usage_perc", "gauge", "Share of the KV blocks in use, 0 to 1; free cached blocks are not in use."),
    Metric("cache_config_info", "gauge", "Always 1; the labels are the KV cache's options.", ("...",)),
    Metric("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("prefix_cache_hits", "counter", "Prompt tokens found there."),
    Metric("num_preemptions", "counter", "Times a sequence gave its blocks up for another."),
    Metric("prompt_tokens", "counter", "Prompt tokens of requests whose first token came, cached ones included."),
    Metric("generation_tokens", "counter", "Tokens generated."),
    Metric("prompt_tokens_by_source", "counter", "Prompt tokens by where their KV came from.", ("source",)),
    Metric("prompt_tokens_cached", "counter", "Prompt tokens whose KV was found in the prefix cache."),
    Metric("prompt_tokens_cached_by_source", "counter", "The same, by the memory that held them.", ("source",)),
    Metric("request_success", "counter", "Finished sequences by how they ended.", ("finished_reason",)),
    Metric("admission_rejections", "counter", "Requests refused because the queue was full.", ("reason",)),
    Metric("corrupted_requests", "counter", "Sequences ended because their logits were not numbers."),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a finished sequence.", (), UP_TO_MODEL_LEN),
    Metric("request_generation_tokens", "histogram", "Generated tokens of a finished sequence.", (), UP_TO_MODEL_LEN),
    Metric(
        "request_max_num_generation_tokens",
        "histogram",
        "Generated tokens of the longest of a request's n sequences.",
        (),
        UP_TO_MODEL_LEN,
    ),
    Metric("request_params_max_tokens", "histogram", "max_tokens of a finished sequence.", (), UP_TO_MODEL_LEN),
    Metric(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens of a finished sequence that were computed, not found in the prefix cache.",
        (),
        UP_TO_MODEL_LEN,
    ),
    Metric("request_params_n", "histogram", "n of a finished request.", (), FEW),
    Metric("request_num_preemptions", "histogram", "Preemptions of a finished sequence.", (), PREEMPTIONS),
    Metric("iteration_tokens_total", "histogram", "Tokens computed in one step.", (), STEP),
    Metric("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.", (), FIRST_TOKEN),
    Metric("inter_token_latency_seconds", "histogram", "From one token to the next, for each token.", (), TOKEN),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time from token to token, for each finished sequence of two tokens or more.",
        (),
        TOKEN,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "From arrival to end.", (), REQUEST),
    Metric("request_queue_time_seconds", "histogram", "From arrival to a slot.", (), REQUEST),
    Metric("request_inference_time_seconds", "histogram", "From a slot to the last token.", (), REQUEST),
    Metric("request_prefill_time_seconds", "histogram", "From a slot to the first token.", (), REQUEST),
    Metric("request_decode_time_seconds", "histogram", "From the first token to the last.", (), REQUEST),
    Metric("startup_time_seconds", "gauge", "Seconds of each phase of the start.", ("phase",)),
    Metric("kernel_compilations", "counter", "Kernels compiled, at the start or, a fault, while serving.", ("when",)),
    Metric("process_memory_bytes", "gauge", "Resident memory of each process of the server.", ("process",)),
    Metric("http_requests", "counter", "HTTP requests by route.", ("handler", "method", "status"), prefixed=False),
    Metric(
        "http_request_duration_seconds",
        "histogram",
        "Time to the end of the answer, by route.",
        ("handler", "method"),
        HTTP,
        False,
    ),
    Metric(
        "http_request_duration_highr_seconds",
        "histogram",
        "The same over all routes, in finer steps.",
        (),
        HTTP_FINE,
        False,
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def up_to(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... as far as `most`.

    >>> up_to(40)
    (1, 2, 5, 10, 20)
    """
    found: list[int] = []
    scale = 1
    while scale <= most:
        found += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return tuple(found)
