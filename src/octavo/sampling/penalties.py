"""`repetition_penalty` over prompt and generated tokens; `presence_penalty` and `frequency_penalty` over generated."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.core.step import Admit
from octavo.sampling.base import LogitsProcessor, Rows, generated, in_vocabulary


class Penalties(LogitsProcessor):
    """Only logits of tokens that occurred are read and written: a row costs its length, not the vocabulary.

    A slot lists the tokens that occurred, each with how often it was generated; a token may be listed
    several times and then has the same count everywhere.

    Repetition (Keskar et al. 2019, as in Hugging Face): positive logits are divided, others multiplied.
    Frequency subtracts penalty * count, presence subtracts the penalty once (OpenAI's definition).
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.lengths: dict[int, int] = {}  # by slot: how many entries of its row below are filled
        self.tokens = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(num_slots, 0, dtype=torch.int32, device=device)
        self.repetition, self.presence, self.frequency = torch.zeros(3, num_slots, 1, device=device)

    def add(self, admit: Admit) -> None:
        params, slot = admit.request.params, admit.slot
        self.lengths.pop(slot, None)
        if params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0:
            return
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        counts = dict.fromkeys(in_vocabulary(admit.request.prompt_token_ids, self.vocab_size), 0)
        for token in in_vocabulary(generated(admit), self.vocab_size):
            counts[token] = counts.get(token, 0) + 1
        self.lengths[slot] = length = len(counts)
        self._reserve(length)
        self.tokens[slot, :length] = torch.tensor(list(counts), dtype=torch.int64)
        self.counts[slot, :length] = torch.tensor(list(counts.values()), dtype=torch.int32)

    def _reserve(self, length: int) -> None:
        width = self.tokens.shape[1]
        if length > width:
            more = max(length, 2 * width, 64) - width
            self.tokens, self.counts = pad(self.tokens, (0, more)), pad(self.counts, (0, more))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        mine = [row for row in rows.having(self.lengths) if self.lengths[rows.slots[row]]]
        if not mine:
            return
        slots, at = rows.slots_of(mine), rows.indices(mine)[:, None]
        lengths = [self.lengths[rows.slots[row]] for row in mine]
        tokens, counts = self.tokens[slots, : max(lengths)], self.counts[slots, : max(lengths)]
        if min(lengths) < max(lengths):  # shorter rows repeat their first entry, which then is written several times
            beyond = torch.arange(max(lengths), device=self.device) >= rows.indices(lengths)[:, None]
            tokens = torch.where(beyond, tokens[:, :1], tokens)
            counts = torch.where(beyond, counts[:, :1], counts)
        values, repetition = logits[at, tokens], self.repetition[slots]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at, tokens] = values - self.frequency[slots] * counts - self.presence[slots] * (counts > 0)

    def accept(self, rows: Rows, tokens: Tensor) -> None:
        if not (mine := rows.having(self.lengths)):
            return
        slots, lengths = rows.slots_of(mine), [self.lengths[rows.slots[row]] for row in mine]
        self._reserve(max(lengths) + 1)
        tokens = tokens if len(mine) == len(tokens) else tokens[rows.indices(mine)]
        ends = rows.indices(lengths)
        self.tokens[slots, ends] = tokens
        self.counts[slots, ends] = 0
        for row in mine:
            self.lengths[rows.slots[row]] += 1
        width = max(lengths) + 1
        beyond = torch.arange(width, device=self.device) > ends[:, None]
        same = (self.tokens[slots, :width] == tokens[:, None]) & ~beyond
        # The listed count, zero at the new entry, is the same at all other places of this token.
        counts = self.counts[slots, :width]
        new = (counts * same).amax(-1, keepdim=True) + 1
        self.counts[slots, :width] = torch.where(same, new.to(torch.int32), counts)
