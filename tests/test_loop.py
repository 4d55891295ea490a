"""The engine loop never turns for ever: with work and nothing to plan or to wait for, it says so."""

import pytest

from fake_device import request
from octavo.core.blocks import BlockPool
from octavo.core.scheduler import Scheduler
from octavo.core.step import Step
from octavo.engine.loop import Loop


class _NoPlan(Scheduler):
    """A scheduler with a fault: it never finds anything to do."""

    def plan(self) -> Step | None:
        return None


def test_a_scheduler_that_is_stuck_is_an_error_with_its_counts() -> None:
    scheduler = _NoPlan(BlockPool(9, 4), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    loop = Loop(scheduler, None, depth=1)  # type: ignore[arg-type]
    assert loop.step() == []  # idle is no fault
    scheduler.add(request("a", [1, 2, 3]))
    with pytest.raises(RuntimeError, match="1 requests wait, 0 run"):
        loop.step()
    loop.clear()
    assert loop.step() == []
