"""What a runner is, whatever the device."""

from collections.abc import Callable
from typing import Protocol

from octavo.core.step import Step, StepResult
from octavo.sampling.bitmask import Bitmasks


class Runner(Protocol):
    """`launch` and `sample` are always called in turn; the call that `sample` returns waits for the step's result.

    `masks` are for a step that is `masked`: they rule this sampling of their slots, and no later one.
    """

    def launch(self, step: Step) -> None: ...
    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]: ...
    def close(self) -> None: ...
