"""The engine loop: plan, launch, commit. `depth` says how far it runs ahead of the device."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.engine.constraints import Constraints, Rows, Settled
from octavo.errors import EngineDead, InvalidRequest, OctavoError
from octavo.observe.trace import Recording
from octavo.sampling.bitmask import Bitmasks
from octavo.types import Delta, FinishReason, Request

RESTART = (
    "Start a new process: this one cannot use the device any more. With enforce_eager=True and CUDA_LAUNCH_BLOCKING=1 "
    "in the environment the traceback shows which kernel it was."
)
PATIENCE = 0.005  # seconds at a time, where there is nothing to do but wait for a grammar
# How PyTorch, Triton and NCCL begin their messages when a device cannot go on. A lack of memory is none of these.
DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "NCCL error", "cuBLAS error")


def is_device_failure(error: RuntimeError) -> bool:
    return any(failure in str(error) for failure in DEVICE_FAILURES)


class Executor(Protocol):
    """Runs steps in the order they come. `sample` returns a call that waits for the step's result.

    `sample` of a masked step is given, by slot, what may be taken this time.
    """

    def launch(self, step: Step) -> None: ...
    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]: ...
    def close(self) -> None: ...


class Loop:
    """`depth` steps may be launched and not yet committed when the next one is planned: 0 waits for each.

    A masked step is launched like any other; but it is sampled only when all before it are committed, since its masks
    depend on their tokens. Masks are made while the device computes.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, depth: int, constraints: Constraints | None = None
    ) -> None:
        self.scheduler, self.executor, self.depth, self.constraints = scheduler, executor, depth, constraints
        self.in_flight: deque[tuple[Step, Rows | None, Callable[[], StepResult]]] = deque()
        self.deepest = 0  # most steps in flight when another one was planned
        self.dead: EngineDead | None = None  # why it never steps again
        self.recording: Recording | None = None  # closed by whoever ends the loop

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight) or bool(self.num_compiling)

    @property
    def num_compiling(self) -> int:
        """Sequences that are not queued yet: their grammar is being compiled."""
        return len(self.constraints) if self.constraints is not None else 0

    def add(self, requests: list[Request], settled: Settled) -> None:
        """Queue the sequences of one request, at once or when their grammar is compiled; `settled` is told.

        Raises:
            InvalidRequest: an id that is in use; or structured outputs, where there is no tokenizer.
        """
        if requests[0].params.structured_outputs is None:
            for request in requests:
                self.scheduler.add(request)
            settled(None)
        elif self.constraints is None:
            raise InvalidRequest(
                "structured_outputs needs a tokenizer, and this engine runs without one.", param="structured_outputs"
            )
        else:
            self.constraints.compile(requests, settled)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence now, in whatever state it is. No delta of it follows. False if it is not at work."""
        if self.constraints is not None:
            self.constraints.forget(request_id)
            if self.constraints.abort(request_id):
                return True
        return self.scheduler.abort(request_id, reason)

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
        if self.num_compiling:
            self._take_compiled()
        step = self.scheduler.plan()
        rows = None
        if step:
            if self.constraints is not None:
                rows = self.constraints.rows(step)
            self.executor.launch(step)
        elif not self.in_flight and self.scheduler.has_work:
            # Nothing can come that would change this: better an error than turning for ever.
            raise RuntimeError(
                f"The scheduler is stuck: {self.scheduler.num_waiting} requests wait, {self.scheduler.num_running} "
                "run, no step is in flight, and none can be planned."
            )
        masked = step is not None and step.masked
        while self.in_flight and (not step or masked or len(self.in_flight) >= max(self.depth, 1)):
            changed += self._commit()
            if not masked:
                break
        if step:
            masks = self.constraints.masks(rows) if masked and self.constraints is not None and rows else None
            self.in_flight.append((step, rows, self.executor.sample(masks)))
            if self.depth == 0:
                changed += self._commit()
        return changed

    def clear(self) -> None:
        """Drop everything; what the device still computes for it is not looked at."""
        self.in_flight.clear()
        self.scheduler.clear()
        if self.constraints is not None:
            self.constraints.clear()

    def _take_compiled(self) -> None:
        """Queue what has its grammar now. Without anything else to do, wait a moment for one."""
        assert self.constraints is not None
        idle = not self.in_flight and not self.scheduler.has_work
        for waiting, error in self.constraints.ready(PATIENCE if idle else 0.0):
            try:
                if error is None:
                    for request in waiting.requests:
                        self.scheduler.add(request)
            except OctavoError as refused:
                error = refused
            if error is not None:
                for request in waiting.requests:
                    self.abort(request.id)
            waiting.settled(error)

    def _commit(self) -> list[Delta]:
        step, rows, wait = self.in_flight.popleft()
        result = wait()
        if self.constraints is None or rows is None:
            return self.scheduler.commit(step, result)
        self.constraints.take(rows, result)
        deltas = self.scheduler.commit(step, result)
        for delta in deltas:
            if delta.finish_reason is not None:
                self.constraints.forget(delta.request_id)
        return deltas
