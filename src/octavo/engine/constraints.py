"""Structured output in the loop: who waits for a grammar, and the masks of a step."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.core.step import Step, StepResult
from octavo.errors import InvalidRequest, OctavoError
from octavo.grammar.grammars import SECONDS, Grammars, too_slow
from octavo.grammar.state import State, fill
from octavo.sampling.bitmask import Bitmasks
from octavo.types import Request

Settled = Callable[[OctavoError | None], None]
"""Called once: the request is queued, or why it is not."""


@dataclass(slots=True, eq=False)
class Waiting:
    """The sequences of a request until their grammar is compiled."""

    requests: list[Request]
    grammar: "Future[Any]"
    settled: Settled
    since: float


@dataclass(slots=True)
class Rows:
    """The constrained rows of a step: of which chunk and slot, and whose."""

    chunks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=list)


NONE = Rows()


class Constraints:
    """All constrained sequences. Its methods belong to the loop's thread."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self.grammars, self.vocab_size = grammars, vocab_size
        self.waiting: list[Waiting] = []
        self._states: dict[str, State] = {}  # by request, from its admission to the queue to its end
        self._by_slot: dict[int, State] = {}
        self._masks = np.zeros((0, -(-vocab_size // 32)), np.int32)

    def __len__(self) -> int:
        """Sequences that wait for a grammar."""
        return sum(len(waiting.requests) for waiting in self.waiting)

    def compile(self, requests: list[Request], settled: Settled) -> None:
        """Keep them until `ready` gives them out."""
        params = requests[0].params.structured_outputs
        assert params is not None
        self.waiting.append(Waiting(requests, self.grammars.submit(params), settled, time.monotonic()))

    def ready(self, patience: float = 0.0) -> list[tuple[Waiting, OctavoError | None]]:
        """Those whose grammar is there, or which cannot have one; waits `patience` seconds for the first."""
        if patience and self.waiting:
            wait_for([waiting.grammar for waiting in self.waiting], patience, "FIRST_COMPLETED")
        now = time.monotonic()
        found = [w for w in self.waiting if w.grammar.done() or now - w.since > SECONDS]
        if found:
            self.waiting = [waiting for waiting in self.waiting if waiting not in found]
        return [(waiting, self._outcome(waiting)) for waiting in found]

    def _outcome(self, waiting: Waiting) -> OctavoError | None:
        params = waiting.requests[0].params.structured_outputs
        assert params is not None
        if not waiting.grammar.done():
            return too_slow(params)
        error = waiting.grammar.exception()
        if error is not None:
            return error if isinstance(error, OctavoError) else InvalidRequest(f"structured_outputs: {error!r}.")
        for request in waiting.requests:
            self._states[request.id] = State(self.grammars.backend, waiting.grammar.result(), request, self.vocab_size)
        return None

    def abort(self, request_id: str) -> bool:
        """Forget a sequence that waits. False if none of that name does."""
        for waiting in self.waiting:
            for request in waiting.requests:
                if request.id == request_id:
                    waiting.requests.remove(request)
                    if not waiting.requests:
                        self.waiting.remove(waiting)
                    return True
        return False

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._states.pop(request_id, None)

    def clear(self) -> None:
        self.waiting.clear()
        self._states.clear()
        self._by_slot.clear()

    def rows(self, step: Step) -> Rows:
        """The rows of a planned step that a grammar follows; called for every step, as slots change hands."""
        for admit in step.admits:
            state = self._states.get(admit.request.id)
            if state is not None:
                self._by_slot[admit.slot] = state
            else:
                self._by_slot.pop(admit.slot, None)
        if not step.masked:
            return NONE
        rows = Rows()
        for i, chunk in enumerate(step.chunks):
            if chunk.samples and (state := self._by_slot.get(chunk.slot)) is not None:
                rows.chunks.append(i)
                rows.slots.append(chunk.slot)
                rows.states.append(state)
        return rows

    def masks(self, rows: Rows) -> Bitmasks:
        """What each row may take; all that was sampled before is known."""
        ruled = [i for i, state in enumerate(rows.states) if state.rules]
        if len(ruled) > len(self._masks):
            self._masks = np.zeros((len(ruled), self._masks.shape[1]), np.int32)
        masks = self._masks[: len(ruled)]
        if ruled:
            fill(self.grammars.backend, [rows.states[i] for i in ruled], masks)
        return {rows.slots[i]: masks[row] for row, i in enumerate(ruled)}

    def take(self, rows: Rows, result: StepResult) -> None:
        """Follow what was sampled, and say in `result` what that ends."""
        for i, state in zip(rows.chunks, rows.states, strict=True):
            if i not in result.faults:
                for token in result.tokens[i]:
                    state.accept(token)  # nothing after an error, of the mask, say
            if why := state.error:
                result.faults[i] = f"structured_outputs cannot be followed any further: {why}."
            elif state.finished:
                result.completed.add(i)
