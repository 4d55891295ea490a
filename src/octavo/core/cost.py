"""Bytes, FLOPs and time of a step, from a model's shape and a machine's figures; planning and reports read them."""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.memory import kv_bytes_per_token
from octavo.model_spec import ModelSpec

LOGIT_PASSES = 4  # times that a row of float32 logits is written or read while a token is chosen
FEW_ROWS = 16
OVERLAP = 1.5


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights by how a step reads them: `body` whole, `experts` by who is chosen, `embedding` row by row."""

    body: int
    experts: int
    embedding: int
    head: int
    tied: bool

    @property
    def total(self) -> int:
        return self.body + self.experts + self.embedding + (0 if self.tied else self.head)


@dataclass(frozen=True, slots=True)
class Work:
    """What one step moves and computes. Bytes of weights and cache, FLOPs of linear layers and of attention."""

    weight_bytes: float
    cache_bytes: float
    logit_bytes: float
    linear_flops: float
    attention_flops: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device reaches, in bytes/s, FLOP/s and seconds.

    `cache_bandwidth` and `attention_flops` are those of attention, whose reads are scattered over blocks and whose
    products are small. A layer costs `few_seconds` beside its reads and products in steps of up to FEW_ROWS rows,
    which run in fewer launches, and `many_seconds` in others; a step costs `step_seconds`, and a request
    `first_seconds` once on its way in and out.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    cache_bandwidth: float
    flops: float
    attention_flops: float
    few_seconds: float
    many_seconds: float
    step_seconds: float
    first_seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where a step's seconds go; `seconds` is their sum."""

    weights: float
    cache: float
    compute: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.weights + self.cache + self.compute + self.overhead

    @property
    def limit(self) -> str:
        """The resource that takes most of the step."""
        parts = {
            "bandwidth (weights)": self.weights,
            "bandwidth (KV cache)": self.cache,
            "compute": self.compute,
            "host and launches": self.overhead,
        }
        return max(parts, key=lambda name: parts[name])


def parameters(spec: ModelSpec) -> Parameters:
    """Norms are left out: a thousandth of all. Biases likewise."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    attention = 2 * hidden * (heads + spec.num_kv_heads * spec.head_dim)
    moe = spec.moe
    sparse = len(moe.layers) if moe else 0
    body = spec.num_layers * attention + (spec.num_layers - sparse) * 3 * hidden * spec.intermediate_size
    experts = 0
    if moe:
        body += sparse * moe.num_experts * hidden  # the routers
        experts = sparse * moe.num_experts * 3 * hidden * moe.intermediate_size
    table = spec.vocab_size * hidden
    return Parameters(body, experts, table, table, spec.tie_word_embeddings)


def step_work(
    spec: ModelSpec,
    chunks: Iterable[tuple[int, int]],
    *,
    sampled: int,
    weight_element_bytes: float,
    cache_element_bytes: float,
) -> Work:
    """The work of one step.

    Args:
        chunks: for each sequence (tokens computed, context length after them).
        sampled: rows that the head and the sampler see.

    A query attends to all keys up to its own position, or to those in its layer's window: FLOPs are
    4 * heads * head_dim for each pair. Of E experts with k chosen for a row, n rows touch E * (1 - (1 - k/E)^n) of
    them, if choices are even.
    """
    counts = parameters(spec)
    per_layer = kv_bytes_per_token(spec, 1) / spec.num_layers * cache_element_bytes
    pair = 4 * spec.num_heads * spec.head_dim
    num_tokens, cache_bytes, attention = 0, 0.0, 0.0
    windows = [(window, spec.layer_windows.count(window)) for window in spec.windows]
    for new, context in chunks:
        num_tokens += new
        for window, layers in windows:
            reach = context if window is None else min(context, window + new)
            cache_bytes += layers * per_layer * (reach + new)
            pairs = new * reach - new * (new - 1) / 2 if window is None else new * min(context - (new - 1) / 2, window)
            attention += layers * pair * max(pairs, 0)
    active, touched = 0.0, 0.0
    if spec.moe:
        share = spec.moe.experts_per_token / spec.moe.num_experts
        active = counts.experts * share
        touched = counts.experts * (1 - (1 - share) ** num_tokens)
    weights = counts.body + touched + (counts.head if sampled else 0)
    return Work(
        weight_bytes=weights * weight_element_bytes,
        cache_bytes=cache_bytes,
        logit_bytes=LOGIT_PASSES * 4 * sampled * spec.vocab_size,
        linear_flops=2 * num_tokens * (counts.body + active) + 2 * sampled * counts.head,
        attention_flops=attention,
        num_tokens=num_tokens,
    )


def step_time(machine: Machine, spec: ModelSpec, work: Work) -> StepTime:
    """Seconds of a step.

    Reading the weights and multiplying with them overlap in part: together they take the 1.5-norm of both, which
    lies between the larger (all hidden) and the sum (nothing hidden) and fits what was measured best. Attention
    and launches come on top, as a layer's operations follow each other.
    """
    read = work.weight_bytes / machine.bandwidth
    products = work.linear_flops / machine.flops
    linear = (read**OVERLAP + products**OVERLAP) ** (1 / OVERLAP)
    share = read / (read + products) if read else 0.0
    layer = machine.few_seconds if work.num_tokens <= FEW_ROWS else machine.many_seconds
    return StepTime(
        weights=linear * share,
        cache=work.cache_bytes / machine.cache_bandwidth,
        compute=linear * (1 - share) + work.attention_flops / machine.attention_flops,
        overhead=spec.num_layers * layer + machine.step_seconds + work.logit_bytes / machine.bandwidth,
    )
