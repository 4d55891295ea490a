"""Validates and tokenizes what a user sends, once, for every entry point."""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.grammar import source as grammar
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.formats import ReasoningFormat
from octavo.text.tools.thinking import thinking
from octavo.types import Request, SamplingParams, Thinking

Prompt = str | Sequence[int] | Mapping[str, Any]

MAX_SALT = 128
NO_LISTS = (bytes, bytearray, memoryview, set, frozenset, Mapping)  # can be walked through, and are no token ids


@dataclass(frozen=True, slots=True)
class Parsed:
    """A prompt in its one form: text, or ids, or both; `salt` names the prefix cache it may share."""

    text: str | None
    token_ids: tuple[int, ...] | None
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """A user's request: its n sequences, and what is kept for the answer."""

    id: str
    text: str | None
    params: SamplingParams
    requests: tuple[Request, ...]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a flat list of integers is one prompt, any other list is several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _walk("A prompt is a string, token ids or a dictionary", prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def parse(prompt: Prompt) -> Parsed:
    """Read any accepted form of one prompt.

    Raises:
        InvalidRequest: an unknown form, key or type.
    """
    if isinstance(prompt, str):
        return Parsed(prompt, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    return Parsed(None, _ids(_walk("A prompt is a string, token ids or a dictionary", prompt)))


def _walk(allowed: str, values: object) -> list[Any]:
    if isinstance(values, Iterable) and not isinstance(values, NO_LISTS):
        with contextlib.suppress(TypeError):  # of an array without dimensions
            return list(values)
    raise InvalidRequest(f"{allowed}, not {type(values).__name__}.", param="prompt")


def _parse_mapping(prompt: Mapping[str, Any]) -> Parsed:
    unknown = {k for k, v in prompt.items() if v is not None} - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise InvalidRequest(
            f"Prompt keys {shown([*unknown])} are not supported: prompt, prompt_token_ids and cache_salt are.",
            param="prompt",
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt must be a string, not {type(text).__name__}.", param="prompt")
    if text is None and ids is None:
        raise InvalidRequest("A prompt dictionary needs the key prompt or prompt_token_ids.", param="prompt")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT):
        what = f"of {len(salt)} characters" if isinstance(salt, str) else f"of type {type(salt).__name__}"
        raise InvalidRequest(f"cache_salt {what} is not allowed: it must have 1 to {MAX_SALT}.", param="cache_salt")
    return Parsed(text, None if ids is None else _ids(_walk("prompt_token_ids is a list of integers", ids)), salt or "")


def _ids(values: list[Any]) -> tuple[int, ...]:
    if set(map(type, values)) == {int}:  # a tenth of the time, which counts for long prompts
        return tuple(values)
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidRequest(
                f"Token ids are integers; item {place} is {shown(value)} of type {type(value).__name__}.",
                param="prompt_token_ids",
            )
    return tuple(map(int, values))


class Inputs:
    """Turns prompts and parameters into `Request`s that can run, or refuses them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        default_params: SamplingParams,
        prefix_caching: bool,
        max_logprobs: int,
        seed: int,
        reasoning: ReasoningFormat | None = None,
        mark: str = "",
    ) -> None:
        """`reasoning` says how the model marks thoughts; `mark` tells the requests of several `Inputs` apart."""
        self.tokenizer = tokenizer
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.eos_token_ids, self.default_params = eos_token_ids, default_params
        self.prefix_caching, self.max_logprobs = prefix_caching, max_logprobs
        self.reasoning = reasoning
        self._mark = mark
        self._random = random.Random(f"{mark}{seed}" if mark else seed)
        self._ids = itertools.count()

    def group(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> Group:
        """Check one prompt with its parameters.

        Raises:
            InvalidRequest: it can never run; the message names value and limit.
        """
        parsed = parse(prompt)
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(params).__name__}.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequest(f"priority={shown(priority)} is not allowed: it must be an integer.", param="priority")
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise InvalidRequest(
                f"request_id={shown(request_id)} is not allowed: it must be a non-empty string.", param="request_id"
            )
        ids = self._token_ids(parsed)
        params = self._check_params(self._default_params(len(ids)) if params is None else params, len(ids))
        number = next(self._ids)
        name = str(number) if request_id is None else request_id
        # What runs inside is named by a number of our own, so that two users may send the same request id.
        inner = f"{name}#{self._mark}{number}"
        thought = self._thinking(params, ids)
        first_seed = self._random.getrandbits(63) if params.seed is None else params.seed
        bad_words = self._bad_words(params)
        # Logprobs of the prompt are the same for all samples: the first one brings them.
        others = dataclasses.replace(params, prompt_logprobs=None) if params.n > 1 else params
        requests = tuple(
            Request(
                id=f"{inner}.{index}",
                prompt_token_ids=ids,
                params=params if index == 0 else others,
                eos_token_ids=self.eos_token_ids,
                bad_words=bad_words,
                seed=(first_seed + index) % 2**63,  # the largest seed is followed by 0
                priority=priority,
                # Without prefix caching each request has a cache of its own, which only its n samples share.
                namespace="/" + parsed.salt if self.prefix_caching else inner,
                thinking=thought,
            )
            for index in range(params.n)
        )
        return Group(name, parsed.text, params, requests)

    def _token_ids(self, parsed: Parsed) -> tuple[int, ...]:
        ids = parsed.token_ids
        if ids is None:
            if self.tokenizer is None:
                raise InvalidRequest(
                    "A text prompt needs a tokenizer, and this engine runs without one.", param="prompt"
                )
            ids = tuple(self.tokenizer.encode(parsed.text or ""))
        if not ids:
            raise InvalidRequest("The prompt is empty: there is nothing to compute.", param="prompt")
        if len(ids) >= self.max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. The prompt has {len(ids)}, "
                "which leaves no room for output.",
                "Shorten the prompt or raise max_model_len.",
                param="prompt",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                f"Token id {shown(bad)} is outside the vocabulary: ids are 0 to {self.vocab_size - 1}.",
                param="prompt_token_ids",
            )
        return ids

    def _default_params(self, prompt_len: int) -> SamplingParams:
        """The model's own, whose max_tokens nobody asked for: it gives way to the context."""
        params, room = self.default_params, self.max_model_len - prompt_len
        return params if (params.max_tokens or 0) <= room else dataclasses.replace(params, max_tokens=room)

    def _check_params(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        room = self.max_model_len - prompt_len
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. The prompt has {prompt_len} and "
                f"max_tokens={params.max_tokens} asks for {prompt_len + params.max_tokens} in all.",
                f"Ask for max_tokens={room} or less.",
                param="max_tokens",
            )
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens={params.min_tokens} exceeds the {room} tokens of room.", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise InvalidRequest(
                        f"{name} has token id {token}: ids are 0 to {self.vocab_size - 1}.", param=name
                    )
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequest(f"{name} needs a tokenizer, and this engine runs without one.", param=name)
        if params.structured_outputs is not None:
            if self.tokenizer is None:
                raise InvalidRequest(
                    "structured_outputs needs a tokenizer, and this engine runs without one.",
                    param="structured_outputs",
                )
            grammar.check(params.structured_outputs)
        return dataclasses.replace(params, max_tokens=room) if params.max_tokens is None else params

    def _check_logprobs(self, name: str, value: int | None) -> None:
        limit = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        if value is not None and (value > limit or (value == -1 and self.max_logprobs != -1)):
            raise InvalidRequest(
                f"{name}={value} is not allowed: it must be 0 to max_logprobs={limit}.",
                "Raise max_logprobs when the engine starts (-1 lifts the limit).",
                param=name,
            )

    def _thinking(self, params: SamplingParams, prompt_ids: Sequence[int]) -> Thinking | None:
        """The thought of a request that limits it, or that something has to wait for the end of."""
        budget = params.thinking_token_budget
        if self.tokenizer is not None and self.reasoning is not None:
            if budget is None and params.structured_outputs is None:
                return None
            found = thinking(self.tokenizer, self.reasoning, prompt_ids, budget)
            if found.end or budget is None:
                return found
        if budget is not None:
            raise InvalidRequest(
                f"thinking_token_budget={budget} has nothing to limit: this model marks no thoughts that are known.",
                "Name how it marks them with reasoning_parser when the engine starts.",
                param="thinking_token_budget",
            )
        return None

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """A word is banned as it stands at the start of a text and as it stands after a space."""
        if not params.bad_words or self.tokenizer is None:
            return ()
        sequences: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if 0 < len(ids) <= (params.max_tokens or 0):  # a longer one cannot come about
                    sequences[ids] = None
        return tuple(sequences)
