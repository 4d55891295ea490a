"""One answer on its way through a grammar: when the grammar rules, what may end the text, and what has gone wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.grammar.base import Backend, Masks
from octavo.text.tools.thinking import ThoughtState
from octavo.types import Request


class State:
    """Told every token of one sequence, in order; it survives preemption, since the host keeps it.

    A thought that comes before the answer is not the grammar's. `finished`: the answer is complete and nothing can
    follow. `error` says why the sequence cannot go on.
    """

    def __init__(self, backend: Backend, grammar: Any, request: Request, vocab_size: int) -> None:
        self.matcher = backend.matcher(grammar)
        self.finished = False
        stops = {token for token in request.stop_token_ids if token < vocab_size}
        self.eos = sorted(token for token in request.eos_token_ids if token < vocab_size)
        self.ends = sorted(stops) or self.eos
        self.user_ends = sorted(stops - request.eos_token_ids)
        self.may_end, self.ends_first = False, bool(stops)
        thinking = request.thinking
        self.thought = None if thinking is None or thinking.closed else ThoughtState(thinking)
        self.begin = -1  # the token with which a thought may begin in place of the answer
        if thinking is not None and self.thought is not None and not thinking.opened:
            if len(thinking.begin) == 1:
                self.begin = thinking.begin[0]
            else:
                self.thought = None

    @property
    def error(self) -> str:
        return self.matcher.error

    @property
    def rules(self) -> bool:
        """Whether the next token is the grammar's affair."""
        return not (self.finished or self.error or (self.thought is not None and self.begin < 0))

    def accept(self, token_id: int) -> None:
        if self.finished or self.error:
            return
        if self.thought is not None:
            if self.begin >= 0 and token_id != self.begin:
                self.thought = None
            else:
                self.thought.feed(token_id)
                if not self.thought.inside and self.begin < 0:
                    self.thought = None
                self.begin = -1
                return
        self.begin = -1
        if self.may_end and token_id in self.ends:
            self.finished = True  # by the token itself
            return
        self.matcher.accept(token_id)
        self.may_end, self.finished = self.matcher.is_finished()


def fill(backend: Backend, states: Sequence[State], masks: Masks) -> None:
    """Row i of `masks` for states[i], each of which `rules`.

    What ends the text is allowed exactly where the grammar may end. Two cases give way: an end that the grammar needs
    as text and has no way round; and `ignore_eos`, as end-of-sequence ids count where nothing else is left.
    """
    backend.fill([state.matcher for state in states], masks)
    for state, words in zip(states, masks, strict=True):
        _rule_ends(state, words)
        if state.begin >= 0:
            _set(words, [state.begin])


def _rule_ends(state: State, words: Any) -> None:
    if state.may_end:
        if state.ends_first:
            _set(words, state.ends)
        elif not words.any():
            _set(words, state.eos)
    elif state.user_ends:
        before = words.copy()
        for token in state.user_ends:
            words[token >> 5] &= ~_bit(token)
        if not words.any():
            words[:] = before


def _set(words: Any, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        words[token >> 5] |= _bit(token)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)
