"""The engine loop: plan, launch, commit. `depth` says how far it runs ahead of the device."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.types import Delta


class Executor(Protocol):
    """Runs steps in the order they come. `sample` returns a call that waits for the step's result."""

    def launch(self, step: Step) -> None: ...
    def sample(self) -> Callable[[], StepResult]: ...
    def close(self) -> None: ...


class Loop:
    """`depth` steps may be launched and not yet committed when the next one is planned: 0 waits for each."""

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int) -> None:
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self.in_flight: deque[tuple[Step, Callable[[], StepResult]]] = deque()
        self.deepest = 0  # most steps in flight when another one was planned

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self) -> list[Delta]:
        """Launch a step if there is one, and commit the oldest in flight once `depth` is reached."""
        changed: list[Delta] = []
        self.deepest = max(self.deepest, len(self.in_flight))
        if step := self.scheduler.plan():
            self.executor.launch(step)
        if self.in_flight and (not step or len(self.in_flight) >= max(self.depth, 1)):
            changed += self._commit()
        if step:
            self.in_flight.append((step, self.executor.sample()))
            if self.depth == 0:
                changed += self._commit()
        return changed

    def clear(self) -> None:
        """Drop everything; what the device still computes for it is not looked at."""
        self.in_flight.clear()
        self.scheduler.clear()

    def _commit(self) -> list[Delta]:
        step, result = self.in_flight.popleft()
        return self.scheduler.commit(step, result())
