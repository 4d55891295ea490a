"""`top_k` leaves the k most likely tokens, `top_p` the fewest of those whose probabilities reach p."""

import math

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.sampling.base import NEVER, LogitsProcessor, Rows
from octavo.sampling.blocks import top

LISTED = (128, 4096)  # best tokens of a row that are listed, at first and at second try; then all are


class TopKTopP(LogitsProcessor):
    """First top-k, then top-p on what is left, renormalised: the order of Hugging Face and vLLM.

    A token is kept if the better ones have less than p together, so one is always kept. At equal logits
    lower ids come first: top_k=k leaves exactly k, and top_k=1 is greedy (Hugging Face and vLLM leave
    all that equal the k-th).
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.limits: dict[int, int] = {}  # by slot, of those with either feature; vocab_size without top_k
        self.top_p = torch.ones(num_slots, 1, dtype=torch.float64, device=device)

    def add(self, admit: Admit) -> None:
        params, slot = admit.request.params, admit.slot
        self.limits.pop(slot, None)
        if 0 < params.top_k < self.vocab_size or params.top_p < 1.0:
            self.limits[slot] = min(params.top_k or self.vocab_size, self.vocab_size)
            self.top_p[slot] = params.top_p if params.top_p < 1.0 else math.inf  # no rounding may cut the tail

    def apply(self, logits: Tensor, rows: Rows) -> None:
        waiting = rows.having(self.limits)
        for width in (*LISTED, self.vocab_size):
            now = [row for row in waiting if self._may_fit(rows.slots[row], width)]
            later = [row for row in waiting if not self._may_fit(rows.slots[row], width)]
            longer = self._keep(logits, rows, now, width) if now else []
            waiting = sorted(later + longer)

    def _may_fit(self, slot: int, width: int) -> bool:
        """Whether a list of this many tokens can hold all to keep: of `top_p` alone it is tried."""
        return self.limits[slot] <= width or self.limits[slot] == self.vocab_size

    def _keep(self, logits: Tensor, rows: Rows, mine: list[int], width: int) -> list[int]:
        """Edit the given rows, or return those of which `top_p` alone keeps more than a list of `width`."""
        limits = [self.limits[rows.slots[row]] for row in mine]
        at, limit, top_p = rows.indices(mine), rows.indices(limits)[:, None], self.top_p[rows.slots_of(mine)]
        part = logits if len(mine) == len(logits) else logits.index_select(0, at)
        values, ids = top(part, min(max(limits), width))
        width = values.shape[1]
        values = torch.where(torch.arange(width, device=logits.device) < limit, values, NEVER)
        probabilities = values.softmax(-1)
        free = [i for i, longest in enumerate(limits) if longest > width]
        if free:
            index = rows.indices(free)
            probabilities[index] = part.index_select(0, index).softmax(-1).gather(1, ids[index])
        probabilities = probabilities.double()
        reached = probabilities.cumsum(-1)
        values = torch.where(reached - probabilities < top_p, values, NEVER)
        longer: list[int] = []
        if free:
            short = (reached[:, -1:] < top_p) & (limit > width)
            longer = at[short[:, 0]].tolist()
            at, ids, values = at[~short[:, 0]], ids[~short[:, 0]], values[~short[:, 0]]
        if len(at) == len(logits):
            logits.fill_(NEVER)
        else:
            logits.index_fill_(0, at, NEVER)
        logits[at[:, None], ids] = values
        return longer
