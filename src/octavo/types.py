"""What a user sends and gets back, and what travels between the processes. No torch, no I/O."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.known import Elsewhere, knows
from octavo.structured_outputs import StructuredOutputsParams

logger = logging.getLogger("octavo")

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
INT64_MAX = 2**63 - 1
MAX_N = 16384
MAX_REPETITION_PENALTY = 1e6  # above it, or below its inverse, float32 logits may become infinite
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestOutputKind(Enum):
    CUMULATIVE = 0  # every output repeats all that came before
    DELTA = 1  # every output holds only what is new
    FINAL_ONLY = 2  # one output, at the end


_LATER = "it needs a part that Octavo does not have yet"
SAMPLING_ELSEWHERE = {
    "guided_decoding": Elsewhere("it is called structured_outputs"),
    "best_of": Elsewhere("sample n and choose by cumulative_logprob", (None, 1)),
    "use_beam_search": Elsewhere("there is no beam search; sample n > 1"),
    "length_penalty": Elsewhere("there is no beam search", (None, 1.0)),
    "early_stopping": Elsewhere("there is no beam search"),
    "logits_processors": Elsewhere("add a file to octavo/sampling instead", (None, [])),
    "logprob_token_ids": Elsewhere(_LATER),
    "prompt_logprob_token_ids": Elsewhere(_LATER),
    "prompt_logprob_token_ids_start": Elsewhere(_LATER, (None, 0)),
    "flat_logprobs": Elsewhere("logprobs are dictionaries here"),
    "stream_interval": Elsewhere("every step is reported", (None, 1)),
    "repetition_detection": Elsewhere(_LATER),
    "truncate_prompt_tokens": Elsewhere("truncate the token ids before sending them"),
    "truncation_side": Elsewhere("truncate the token ids before sending them", (None, "left", "right")),
    "watermarking": Elsewhere("there is no watermarking"),
    "routed_experts_prompt_start": Elsewhere(_LATER, (None, 0)),
    "trace_decode_token_ids": Elsewhere(_LATER),
    "skip_clone": Elsewhere("parameters are immutable here", (None, False, True)),
    "extra_args": Elsewhere("no extension reads them", (None, {})),
}


@knows(SAMPLING_ELSEWHERE)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. Names, defaults and rules are those that vLLM's users know.

    Raises:
        InvalidRequest: a value outside its range; the message names field, value and range.
        TypeError: an unknown keyword; the message names the nearest known one.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_reading_prefix_cache: bool | None = False
    thinking_token_budget: int | None = None
    """Most tokens of a thought, which is then ended as the model would have ended it; -1 is no limit."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer has to look like; a dictionary of the same names will do."""
    shown_token_ids: tuple[int, ...] = ()
    """Special tokens that stay in the text though the others are skipped: they mark calls and thoughts."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        if self.structured_outputs is not None:
            self._set(structured_outputs=StructuredOutputsParams.of(self.structured_outputs))
        if self.temperature < GREEDY_BELOW:
            if self.n > 1:
                raise _refuse("n", self.n, "1 with temperature 0 (greedy samples would all be the same)")
            self._set(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature=%s is raised to %s", self.temperature, MIN_TEMPERATURE)
            self._set(temperature=MIN_TEMPERATURE)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        self._set(
            n=_integer("n", self.n, 1, MAX_N),
            temperature=_number("temperature", self.temperature, 0.0, 2.0),
            top_p=_number("top_p", self.top_p, 0.0, 1.0, above_low=True),
            top_k=max(0, _integer("top_k", self.top_k, -1)),
            min_p=_number("min_p", self.min_p, 0.0, 1.0),
            presence_penalty=_number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            frequency_penalty=_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            repetition_penalty=_number(
                "repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
            ),
            min_tokens=_integer("min_tokens", self.min_tokens, 0),
        )
        if self.seed is not None:
            seed = _integer("seed", self.seed, -INT64_MAX - 1, INT64_MAX)
            self._set(seed=None if seed == -1 else seed)
        if self.max_tokens is not None:
            self._set(max_tokens=_integer("max_tokens", self.max_tokens, 1))
            if self.min_tokens > self.max_tokens:
                raise _refuse("min_tokens", self.min_tokens, f"0 to max_tokens={self.max_tokens}")
        if self.thinking_token_budget is not None:
            budget = _integer("thinking_token_budget", self.thinking_token_budget, -1)
            self._set(thinking_token_budget=None if budget == -1 else budget)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                value = 1 if value else None
            self._set(**{name: value if value is None else _integer(name, value, -1)})
        for name in FLAGS:
            value = getattr(self, name)
            if value is None and name == "skip_reading_prefix_cache":  # as vLLM writes False
                self._set(skip_reading_prefix_cache=False)
            elif not isinstance(value, bool):
                raise _refuse(name, value, "True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _refuse("output_kind", self.output_kind, "a RequestOutputKind")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            allowed = "a non-empty string or a list of them"
            words = (value,) if isinstance(value, str) else _items(name, value, allowed)
            if not all(isinstance(word, str) and word for word in words):
                raise _refuse(name, value, allowed)
            self._set(**{name: words})
        if self.stop and not self.detokenize:
            raise _refuse("stop", self.stop, "none with detokenize=False (stop strings are looked for in the text)")
        for name in ("stop_token_ids", "shown_token_ids"):
            self._set(**{name: _token_ids(name, getattr(self, name))})
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise _refuse("allowed_token_ids", [], "None or at least one token id")
            self._set(allowed_token_ids=ids)
        if self.logit_bias is not None:
            self._set(logit_bias=_logit_bias(self.logit_bias))


def _refuse(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name}={shown(value)} is not allowed: it must be {allowed}.", param=name)


def _number(name: str, value: object, low: float, high: float, above_low: bool = False) -> float:
    start = "" if math.isinf(low) else f" {'above' if above_low else 'from'} {low:g}"
    end = "" if math.isinf(high) else f" to {high:g}"
    allowed = f"a finite number{start}{end}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:  # of an integer
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
        raise _refuse(name, value, allowed)
    return number


def _integer(name: str, value: object, low: int, high: int = INT64_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        end = f" to {high}" if high < INT64_MAX else ""
        raise _refuse(name, value, f"an integer from {low}{end}")
    return int(value)


def _items(name: str, values: object, allowed: str) -> tuple[Any, ...]:
    """None is an empty list; text, bytes and dictionaries are no lists, though they can be walked through."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise _refuse(name, values, allowed)
    return tuple(values)


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_integer(name, value, 0) for value in _items(name, values, "a list of token ids")))


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise _refuse("logit_bias", bias, "a dictionary from token ids to numbers")
    result = {}
    for key, value in bias.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
            key = int(key)
        token = _integer("logit_bias", key, 0)
        number = _number("logit_bias", value, -math.inf, math.inf)
        result[token] = min(100.0, max(-100.0, number))
    return result


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a request's thought is marked, as token ids.

    `forced` ends a thought that takes longer than `budget` tokens; it ends with `end`. `opened`: the prompt ends
    inside a thought. `closed`: it ends behind one, so that none follows.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    forced: tuple[int, ...]
    opened: bool = False
    closed: bool = False
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, checked and resolved by `engine/inputs.py`; n > 1 becomes n of these.

    `params.max_tokens` is a number here. `seed` is the one to sample with, given or drawn.
    `bad_words` are token id sequences. Prefix blocks are shared inside a `namespace` only. The engine
    shares itself out between `tenant`s.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    priority: int = 0
    namespace: str = ""
    tenant: str = ""
    thinking: Thinking | None = None  # where something depends on it

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id that ends the text: the model's end-of-sequence ids unless ignored, and the user's."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.eos_token_ids

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need every position computed."""
        return self.params.prompt_logprobs is None and not self.params.skip_reading_prefix_cache


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one position: the token that stands there first, then the most likely ones, best first.

    `rank` is that of the first token, from 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(slots=True)
class Delta:
    """What a step changed for one sequence.

    `stop_reason` is the stop token id, or None for an end-of-sequence id. `prompt_logprobs` are of the
    tokens at prompt positions from `prompt_logprobs_start` on; positions may come again after a preemption.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs_start: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str = ""
    num_cached_tokens: int = 0
    completed: bool = False  # it stops because all is said: the last token is a part of the text


@dataclass(slots=True)
class Logprob:
    """`rank` is 1 for the most likely token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOfTokens = list[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One of the n texts of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: LogprobsOfTokens | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of a monotonic clock; `first_token_time` and `finished_time` are None before they happen."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far, or since the last time (`SamplingParams.output_kind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    lora_request: None = None
    kv_transfer_params: None = None
