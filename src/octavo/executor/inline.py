"""One device in the engine's own process."""

from collections.abc import Callable

from octavo.core.step import Step, StepResult
from octavo.worker.runner import Runner


class Inline:
    """Runs a step in the calling thread; the result is there when `sample` returns."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def launch(self, step: Step) -> None:
        self.runner.launch(step)

    def sample(self) -> Callable[[], StepResult]:
        result = self.runner.sample()
        return lambda: result

    def close(self) -> None:
        del self.runner
