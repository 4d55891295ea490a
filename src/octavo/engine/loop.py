"""The engine loop: plan, launch, commit. `depth` says how far it runs ahead of the device."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.errors import EngineDead
from octavo.observe.trace import Recording
from octavo.types import Delta

RESTART = (
    "Start a new process: this one cannot use the device any more. With enforce_eager=True and CUDA_LAUNCH_BLOCKING=1 "
    "in the environment the traceback shows which kernel it was."
)
# How PyTorch, Triton and NCCL begin their messages when a device cannot go on. A lack of memory is none of these.
DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "NCCL error", "cuBLAS error")


def is_device_failure(error: RuntimeError) -> bool:
    return any(failure in str(error) for failure in DEVICE_FAILURES)


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
        self.dead: EngineDead | None = None  # why it never steps again
        self.recording: Recording | None = None  # closed by whoever ends the loop

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self) -> list[Delta]:
        """Launch a step if there is one, and commit the oldest in flight once `depth` is reached.

        Raises:
            EngineDead: the device failed for good, now or before; the message has the cause.
        """
        self.check_alive()
        try:
            return self._step()
        except RuntimeError as error:
            if not is_device_failure(error):
                raise
            self.dead = EngineDead(f"The device failed: {str(error).splitlines()[0]}.".replace("..", "."), RESTART)
            raise self.dead from error

    def check_alive(self) -> None:
        if self.dead is not None:
            raise self.dead

    def _step(self) -> list[Delta]:
        changed: list[Delta] = []
        self.deepest = max(self.deepest, len(self.in_flight))
        step = self.scheduler.plan()
        if step:
            self.executor.launch(step)
        elif not self.in_flight and self.scheduler.has_work:
            # Nothing can come that would change this: better an error than turning for ever.
            raise RuntimeError(
                f"The scheduler is stuck: {self.scheduler.num_waiting} requests wait, {self.scheduler.num_running} "
                "run, no step is in flight, and none can be planned."
            )
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
