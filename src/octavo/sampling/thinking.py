"""`thinking_token_budget`: a thought that has taken its tokens is ended with the model's own mark."""

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.sampling.base import NEVER, LogitsProcessor, Rows, generated
from octavo.text.tools.thinking import ThoughtState
from octavo.types import Thinking


class ThinkingBudget(LogitsProcessor):
    """Leaves one token to choose from while the end mark of an overlong thought is written."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.thoughts: dict[int, _Thought] = {}  # by slot, of those with a budget

    def add(self, admit: Admit) -> None:
        slot, thinking = admit.slot, admit.request.thinking
        self.thoughts.pop(slot, None)
        if thinking is not None and thinking.budget is not None:
            thought = self.thoughts[slot] = _Thought(thinking, thinking.budget)
            for token in generated(admit):
                thought.accept(token)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        for row in rows.having(self.thoughts):
            token = self.thoughts[rows.slots[row]].forced
            if token is not None:
                logits[row] = NEVER
                logits[row, token] = 0.0

    def accept(self, rows: Rows, tokens: Tensor) -> None:
        for row in rows.having(self.thoughts):
            self.thoughts[rows.slots[row]].accept(int(tokens[row]))


class _Thought:
    """One sequence's thought against its budget."""

    def __init__(self, thinking: Thinking, budget: int) -> None:
        self.state = ThoughtState(thinking)
        self.ending, self.budget = thinking.forced, budget
        self.num_forced = 0

    @property
    def forced(self) -> int | None:
        """The one token that may come next, if the budget is used up."""
        over = self.num_forced or (self.state.inside and self.state.length >= self.budget)
        return self.ending[self.num_forced] if over else None

    def accept(self, token: int) -> None:
        forced = self.forced
        self.state.feed(token)
        if forced is not None and token == forced:
            self.num_forced = (self.num_forced + 1) % len(self.ending)
