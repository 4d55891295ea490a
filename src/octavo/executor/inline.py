"""One device in the engine's own process."""

from collections.abc import Callable

from octavo.core.step import Step, StepResult
from octavo.sampling.bitmask import Bitmasks
from octavo.worker.base import Runner, Span


class Inline:
    """Drives a runner from the calling thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def launch(self, step: Step) -> None:
        self.runner.launch(step)

    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]:
        return self.runner.sample(masks)

    def spans(self) -> list[Span]:
        return self.runner.spans()

    def close(self) -> None:
        self.runner.close()
        del self.runner
