"""What a runner is, whatever the device."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from octavo.core.step import Step, StepResult
from octavo.sampling.bitmask import Bitmasks


class Span(NamedTuple):
    """A method that is one part of a step, for whoever measures: `owner` is a live object that has it."""

    name: str
    owner: object
    method: str


class Runner(Protocol):
    """`launch` and `sample` are always called in turn; the call that `sample` returns waits for the step's result.

    `masks` are for a step that is `masked`: they rule this sampling of their slots, and no later one.
    `spans` names what lies within these two: prepare, forward and sample.
    """

    def launch(self, step: Step) -> None: ...
    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]: ...
    def spans(self) -> list[Span]: ...
    def close(self) -> None: ...
