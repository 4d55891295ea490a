"""`min_tokens`: what would end the text is ruled out until enough tokens have been generated."""

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.sampling.base import NEVER, LogitsProcessor, Rows, generated, in_vocabulary


class MinTokens(LogitsProcessor):
    """Rules out `Request.stop_token_ids`: with `ignore_eos` end-of-sequence ids are not among them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.ids: dict[int, Tensor] = {}
        self.missing: dict[int, int] = {}  # by slot: tokens still to generate before it may end

    def add(self, admit: Admit) -> None:
        request, slot = admit.request, admit.slot
        missing = request.params.min_tokens - len(generated(admit))
        ids = in_vocabulary(request.stop_token_ids, self.vocab_size)
        self.missing.pop(slot, None)
        if missing > 0 and ids:
            self.missing[slot] = missing
            self.ids[slot] = torch.tensor(ids, device=self.device)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        if mine := rows.having(self.missing):
            at, ids = rows.flatten(mine, [self.ids[rows.slots[row]] for row in mine])
            logits[at, ids] = NEVER

    def accept(self, rows: Rows, tokens: Tensor) -> None:
        for row in rows.having(self.missing):
            slot = rows.slots[row]
            self.missing[slot] -= 1
            if not self.missing[slot]:
                del self.missing[slot]
