"""What a runner is, whatever the device."""

from collections.abc import Callable
from typing import Protocol

from octavo.core.step import Step, StepResult


class Runner(Protocol):
    """`launch` and `sample` are always called in turn; the call that `sample` returns waits for the step's result."""

    def launch(self, step: Step) -> None: ...
    def sample(self) -> Callable[[], StepResult]: ...
    def close(self) -> None: ...
