"""How long a refused client is told to wait: by who is ahead of it and how fast requests end, within bounds."""

import pytest

from fake_device import request
from octavo.core.admission import LONGEST_WAIT, Admission
from octavo.core.blocks import BlockPool
from octavo.core.scheduler import Scheduler
from octavo.errors import Overloaded
from test_metrics import Watched, prompt


def wait(num_queued: int, finished_per_second: float, **limits: int) -> int:
    scheduler = Scheduler(BlockPool(65, 4), 1, 1000, 100, 1)
    for number in range(num_queued + 1):  # one of them is for the place that is free
        scheduler.add(request(f"r{number}", prompt(5, number), 3))
    with pytest.raises(Overloaded) as refused:
        Admission(**(limits or {"max_num_reqs": 1})).check(scheduler, 5, finished_per_second)
    assert f"Try again in {refused.value.retry_after_s} s." in str(refused.value)
    return refused.value.retry_after_s


def test_the_wait_is_that_of_those_ahead() -> None:
    assert wait(3, 0.5) == 8  # three wait, and it is the fourth
    assert wait(3, 2.0) == 2
    assert wait(9, 3.0) == 4
    assert wait(3, 0.5, max_num_tokens=10) == 8


def test_the_wait_has_bounds() -> None:
    assert wait(1, 1e9) == 1
    assert wait(50, 1e-9) == LONGEST_WAIT
    assert wait(1, 0.0) == LONGEST_WAIT, "nothing has ended yet"


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    watched = Watched()
    assert watched.metrics.finished_per_second() == 0
    for number in range(8):
        watched.engine.scheduler.add(request(f"r{number}", prompt(5, number), 4))
    watched.run()
    seconds = watched.clock.now - 1000.0
    assert watched.metrics.finished_per_second() == pytest.approx(8 / seconds)
    watched.clock.now += 31
    assert watched.metrics.finished_per_second() == pytest.approx(0)
