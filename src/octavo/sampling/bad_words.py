"""`bad_words`: a token that would complete a forbidden token sequence in the generated text is ruled out."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.core.step import Admit
from octavo.sampling.base import NEVER, LogitsProcessor, Rows, generated, in_vocabulary

_NOTHING = -1  # no token has been generated there
_ANY = -2  # a word shorter than the longest does not look there


class BadWords(LogitsProcessor):
    """A word is its first tokens, compared with the last ones generated, and the token to rule out when they agree.

    Prompt tokens do not count: a word that begins in the prompt may be completed.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.recent = torch.empty(num_slots, 0, dtype=torch.int64, device=device)  # last tokens generated
        self.firsts: dict[int, Tensor] = {}  # by slot: [words, recent.shape[1]]
        self.lasts: dict[int, Tensor] = {}  # by slot: [words]

    def add(self, admit: Admit) -> None:
        slot = admit.slot
        words = [word for word in admit.request.bad_words if len(in_vocabulary(word, self.vocab_size)) == len(word) > 0]
        self.firsts.pop(slot, None)
        if not words:
            return
        self._widen(max(len(word) for word in words) - 1)
        width = self.recent.shape[1]
        firsts = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
        self.firsts[slot] = torch.tensor(firsts, dtype=torch.int64, device=self.device)
        self.lasts[slot] = torch.tensor([word[-1] for word in words], device=self.device)
        recent = [_NOTHING] * width + list(generated(admit))
        self.recent[slot] = torch.tensor(recent[len(recent) - width :], dtype=torch.int64, device=self.device)

    def _widen(self, width: int) -> None:
        more = width - self.recent.shape[1]
        if more > 0:
            self.recent = pad(self.recent, (more, 0), value=_NOTHING)
            self.firsts = {slot: pad(firsts, (more, 0), value=_ANY) for slot, firsts in self.firsts.items()}

    def apply(self, logits: Tensor, rows: Rows) -> None:
        if not (mine := rows.having(self.firsts)):
            return
        at, firsts = rows.flatten(mine, [self.firsts[rows.slots[row]] for row in mine])
        lasts = torch.cat([self.lasts[rows.slots[row]] for row in mine])
        completes = ((firsts == self.recent[rows.index[at]]) | (firsts == _ANY)).all(-1)
        # Several words may share their last token: sums do not overwrite one another.
        logits.index_put_((at, lasts), torch.where(completes, NEVER, 0.0), accumulate=True)

    def accept(self, rows: Rows, tokens: Tensor) -> None:
        if self.recent.shape[1] and rows.having(self.firsts):
            self.recent[rows.index] = torch.cat([self.recent[rows.index][:, 1:], tokens[:, None]], dim=1)
