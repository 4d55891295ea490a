"""`logit_bias` adds to chosen logits; `allowed_token_ids` leaves no others."""

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.sampling.base import NEVER, LogitsProcessor, Rows, in_vocabulary


class LogitBias(LogitsProcessor):
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.ids: dict[int, Tensor] = {}  # by slot, unique
        self.values: dict[int, Tensor] = {}

    def add(self, admit: Admit) -> None:
        bias = admit.request.params.logit_bias or {}
        ids = in_vocabulary(bias, self.vocab_size)
        self.ids.pop(admit.slot, None)
        if ids:
            self.ids[admit.slot] = torch.tensor(ids, device=self.device)
            values = [bias[token] for token in ids]
            self.values[admit.slot] = torch.tensor(values, dtype=torch.float32, device=self.device)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        if not (mine := rows.having(self.ids)):
            return
        at, ids = rows.flatten(mine, [self.ids[rows.slots[row]] for row in mine])
        logits[at, ids] += torch.cat([self.values[rows.slots[row]] for row in mine])


class AllowedTokens(LogitsProcessor):
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.ids: dict[int, Tensor] = {}

    def add(self, admit: Admit) -> None:
        allowed = admit.request.params.allowed_token_ids
        self.ids.pop(admit.slot, None)
        if allowed is not None:
            ids = in_vocabulary(allowed, self.vocab_size)
            self.ids[admit.slot] = torch.tensor(ids, dtype=torch.int64, device=self.device)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        if not (mine := rows.having(self.ids)):
            return
        at, ids = rows.flatten(mine, [self.ids[rows.slots[row]] for row in mine])
        kept = logits[at, ids]
        logits.index_fill_(0, rows.indices(mine), NEVER)
        logits[at, ids] = kept
