"""`min_p`: tokens less likely than this fraction of the most likely one are ruled out (Nguyen et al. 2024)."""

import math

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.sampling.base import NEVER, LogitsProcessor, Rows, editing


class MinP(LogitsProcessor):
    """A ratio of probabilities is a difference of logits, so no softmax is needed. The most likely token stays."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.active: set[int] = set()
        self.log_min_p = torch.zeros(num_slots, 1, device=device)

    def add(self, admit: Admit) -> None:
        min_p = admit.request.params.min_p
        self.active.discard(admit.slot)
        if min_p > 0.0:
            self.active.add(admit.slot)
            self.log_min_p[admit.slot] = math.log(min_p)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        if not (mine := rows.having(self.active)):
            return
        with editing(logits, mine) as part:
            lowest = part.amax(-1, keepdim=True) + self.log_min_p[rows.slots_of(mine)]
            part.copy_(torch.where(part < lowest, NEVER, part))
