"""What a run came to, in figures that can be put beside those of another run, and how long steps would take."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo.trace.life import History, StepOf


@dataclass(frozen=True, slots=True)
class Figures:
    """Steps a request waits are those between its arrival and its first one. Blocks are those held at a time."""

    requests: int
    finished: int
    steps: int
    visits: int  # of the scheduler, also those that found nothing to do
    positions: int
    tokens: int
    preemptions: int
    positions_lost: int
    positions_found: int
    blocks_evicted: int
    blocks_copied: int
    most_blocks: int
    most_running: int
    mean_running: float
    mean_wait: float
    longest_wait: int
    estimated_seconds: float | None


def figures(history: History, cost: "Cost | None") -> Figures:
    lives, steps = history.lives, history.steps
    waits = [life.stays[0].first - life.step for life in lives if life.stays]
    running = [len(step.shares) for step in steps]
    return Figures(
        requests=len(lives),
        finished=sum(life.finish is not None for life in lives),
        steps=len(steps),
        visits=history.num_turns,
        positions=sum(share.end - share.start for step in steps for share in step.shares),
        tokens=sum(life.num_generated for life in lives),
        preemptions=sum(life.num_preemptions for life in lives),
        positions_lost=sum(stay.num_lost for life in lives for stay in life.stays),
        positions_found=sum(life.num_cached for life in lives),
        blocks_evicted=len(history.evictions),
        blocks_copied=sum(len(step.copies) for step in steps),
        most_blocks=max(blocks_held(history), default=0),
        most_running=max(running, default=0),
        mean_running=sum(running) / max(len(running), 1),
        mean_wait=sum(waits) / max(len(waits), 1),
        longest_wait=max(waits, default=0),
        estimated_seconds=cost.seconds(steps) if cost else None,
    )


def blocks_held(history: History) -> list[int]:
    """Blocks that somebody has, by step; a shared one counts once."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for life in history.lives:
        for stay in life.stays:
            for step, block in stay.blocks:
                begins[step].append(block)
                if stay.end >= 0:
                    ends[stay.end].append(block)
    held, counts = Counter[int](), []
    for step in range(len(history.steps)):
        held.update(begins[step])
        for block in ends[step]:
            held[block] -= 1
            if not held[block]:
                del held[block]
        counts.append(len(held))
    return counts


class Cost:
    """Seconds of a step as a sum: so much each, by position, by sequence, by position that is read.

    Fitted to the recorded steps by least squares; a part that would come out negative is left out. `deviation` is how
    far the sum of the estimates of the recorded steps is from their own, as a share.
    """

    def __init__(self, steps: Iterable[StepOf]) -> None:
        known = [step for step in steps if step.micros >= 0]
        rows = np.array([_work(step) for step in known], dtype=float).reshape(len(known), 4)
        times = np.array([step.micros for step in known], dtype=float) / 1e6
        parts = [i for i in range(4) if len(known) and rows[:, i].any()]
        self._weights = np.zeros(4)
        while parts:
            found = np.linalg.lstsq(rows[:, parts], times, rcond=None)[0]
            if (found >= 0).all():
                self._weights[parts] = found
                break
            parts.pop(int(found.argmin()))

    def seconds(self, steps: list[StepOf]) -> float:
        return float(sum(np.dot(self._weights, _work(step)) for step in steps))


def _work(step: StepOf) -> tuple[int, int, int, int]:
    positions = sum(share.end - share.start for share in step.shares)
    read = sum(share.end * (step.repeat if share.samples else 1) for share in step.shares)
    return step.repeat, positions, len(step.shares) * step.repeat, read
