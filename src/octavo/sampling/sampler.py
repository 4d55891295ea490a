"""From logits to tokens: the features in their order, then the largest logit or a draw, and the logprobs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.errors import InvalidConfig
from octavo.sampling.bad_words import BadWords
from octavo.sampling.base import LogitsProcessor, Rows
from octavo.sampling.bias import AllowedTokens, LogitBias
from octavo.sampling.bitmask import Bitmasks, apply_masks
from octavo.sampling.blocks import argmax
from octavo.sampling.draw import draw, mix, uniforms
from octavo.sampling.logprobs import LOGPROBS_MODES, WHOLE_VOCABULARY, token_logprobs
from octavo.sampling.min_p import MinP
from octavo.sampling.min_tokens import MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.temperature import Temperature
from octavo.sampling.thinking import ThinkingBudget
from octavo.sampling.top_k_top_p import TopKTopP
from octavo.types import TokenLogprobs

# In the order in which they act: a new feature is a file here, a line in this list and its field in SamplingParams.
PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    AllowedTokens,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
    Temperature,
    MinP,
    TopKTopP,
    ThinkingBudget,  # last: what ends a thought is not ruled out by anything
)
PROMPT_ROWS = 64  # prompt positions looked at together: bounds the memory of intermediate results


@dataclass(slots=True)
class Sampled:
    """What `Sampler.sample` found for R rows.

    `logprobs` is empty when no row asked, else has None for the rows that did not. `faults` says by row
    why its request cannot go on; such a row's token is 0.
    """

    tokens: Tensor  # [R] int64
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples for sequences in slots. What a row gets depends on its own logits, request and position alone.

    Raises:
        InvalidConfig: an unknown `logprobs_mode`.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise InvalidConfig(f"logprobs_mode={logprobs_mode!r} is not one of {', '.join(LOGPROBS_MODES)}.")
        self.device = torch.device(device)
        self.as_logits = logprobs_mode.endswith("_logits")
        self.processed = logprobs_mode.startswith("processed_")
        self.processors = [processor(num_slots, vocab_size, self.device) for processor in PROCESSORS]
        self.random: set[int] = set()  # slots that are not greedy
        self.mixed_seeds = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        self.num_logprobs: dict[int, int] = {}  # by slot, of those that ask

    def add(self, admit: Admit) -> None:
        """A sequence takes over a slot; one that returns after a preemption brings its generated tokens in `admit`."""
        slot, params = admit.slot, admit.request.params
        self.random.discard(slot)
        if not params.greedy:
            self.random.add(slot)
            self.mixed_seeds[slot] = mix(torch.tensor(admit.request.seed))
        self.num_logprobs.pop(slot, None)
        if params.logprobs is not None:
            self.num_logprobs[slot] = params.logprobs
        for processor in self.processors:
            processor.add(admit)

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Tensor | Sequence[int],
        masks: Bitmasks | None = None,
    ) -> Sampled:
        """One token a row. `logits` [R, V] float32 is overwritten.

        Row i is of slot slots[i], and its token will stand at position positions[i] of the sequence. `masks` say, by
        slot, which tokens may be taken this time.
        """
        rows = Rows(slots, self.device)
        positions = torch.as_tensor(positions, dtype=torch.int64, device=self.device)
        asked = rows.having(self.num_logprobs)
        seen = logits.index_select(0, rows.indices(asked)) if asked and not self.processed else None
        peaks = logits.amax(-1)
        if masks:
            apply_masks(logits, slots, masks)
        for processor in self.processors:
            processor.apply(logits, rows)
        best, tokens = argmax(logits)
        self._draw(logits, rows, positions, tokens)
        failed = ~(peaks.isfinite() & best.isfinite())
        tokens.masked_fill_(failed, 0)
        rows_failed = failed.nonzero()[:, 0].tolist()
        faults = {row: describe_fault(float(peaks[row]), int(positions[row])) for row in rows_failed}
        for processor in self.processors:
            processor.accept(rows, tokens)
        if not asked:
            return Sampled(tokens, [], faults)
        if seen is None:
            seen = logits.index_select(0, rows.indices(asked))
        logprobs = self._logprobs(seen, tokens, rows, asked)
        return Sampled(tokens, [None if row in faults else logprobs.get(row) for row in range(len(slots))], faults)

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
        """Of the prompt tokens `targets` [T] int64, given the logits [T, V] float32 of the positions before them.

        k as `SamplingParams.prompt_logprobs`. Nothing processes prompt positions: they are raw in every mode.
        """
        return [
            entry
            for part, tokens in zip(torch.split(logits, PROMPT_ROWS), torch.split(targets, PROMPT_ROWS), strict=True)
            for entry in token_logprobs(part, tokens, [k] * len(tokens), self.as_logits)
        ]

    def _draw(self, logits: Tensor, rows: Rows, positions: Tensor, tokens: Tensor) -> None:
        """Replace `tokens` of the rows that are not greedy by random ones."""
        if mine := rows.having(self.random):
            at = rows.indices(mine)
            part = logits if len(mine) == len(logits) else logits.index_select(0, at)
            tokens[at] = draw(part, uniforms(self.mixed_seeds[rows.slots_of(mine)], positions[at]))

    def _logprobs(self, seen: Tensor, tokens: Tensor, rows: Rows, asked: list[int]) -> dict[int, TokenLogprobs]:
        """By row, from the logits [len(asked), V]; rows that ask for the whole vocabulary burden no others."""
        ks = [self.num_logprobs[rows.slots[row]] for row in asked]
        found: dict[int, TokenLogprobs] = {}
        for whole in (False, True):
            group = [i for i, k in enumerate(ks) if (k == WHOLE_VOCABULARY) == whole]
            if group:
                part = seen if len(group) == len(asked) else seen.index_select(0, rows.indices(group))
                at = [asked[i] for i in group]
                entries = token_logprobs(part, tokens[rows.indices(at)], [ks[i] for i in group], self.as_logits)
                found.update(zip(at, entries, strict=True))
        return found


def describe_fault(peak: float, position: int) -> str:
    if math.isnan(peak):
        return f"The model's logits at position {position} are not numbers (NaN)."
    if peak == math.inf:
        return f"The model's logits at position {position} are infinite."
    return (
        f"No token can be generated at position {position}: structured_outputs, allowed_token_ids, bad_words and "
        "min_tokens together, or the model itself, rule out every one."
    )
