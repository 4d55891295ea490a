"""`temperature` divides the logits; zero means greedy and is left to the sampler."""

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.sampling.base import LogitsProcessor, Rows


class Temperature(LogitsProcessor):
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.active: set[int] = set()
        self.values = torch.ones(num_slots, 1, device=device)

    def add(self, admit: Admit) -> None:
        temperature = admit.request.params.temperature
        self.active.discard(admit.slot)
        if temperature in (0.0, 1.0):
            self.values[admit.slot] = 1.0
        else:
            self.values[admit.slot] = temperature
            self.active.add(admit.slot)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        if rows.having(self.active):
            logits.div_(self.values[rows.index])  # one is exact, so the rows of others stay as they are
