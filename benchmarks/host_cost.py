"""What the scheduler costs the host for each step: time of `plan` and `commit`, without a device.

While the device computes a step the host plans the next one, so this time is hidden as long as it is
shorter than a step. Run it with `python benchmarks/host_cost.py`.
"""

import random
import statistics
import time
from collections.abc import Iterator

from octavo.core.blocks import BlockPool
from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.types import Request, SamplingParams

NUM_STEPS = 200
BLOCK_SIZE = 16
LIMITS_MS = {64: 0.5, 256: 1.5, 1024: 4.0}


def answer(step: Step, rng: random.Random) -> StepResult:
    return StepResult(
        [[rng.randrange(50_000) for _ in range(step.repeat)] if chunk.samples else [] for chunk in step.chunks]
    )


def requests(count: int, prompt_length: int, max_tokens: int, rng: random.Random) -> Iterator[Request]:
    for i in range(count):
        prompt = tuple(rng.randrange(50_000) for _ in range(prompt_length))
        yield Request(str(i), prompt, SamplingParams(max_tokens=max_tokens))


def measure(scheduler: Scheduler, num_steps: int, rng: random.Random) -> tuple[list[float], list[float]]:
    """CPU seconds of each plan and of each commit, so that other work on the machine disturbs little."""
    plans, commits = [], []
    for _ in range(num_steps):
        start = time.thread_time()
        step = scheduler.plan()
        planned = time.thread_time()
        if step is None:
            break
        result = answer(step, rng)
        before_commit = time.thread_time()
        scheduler.commit(step, result)
        commits.append(time.thread_time() - before_commit)
        plans.append(planned - start)
    return plans, commits


def decoding(num_running: int) -> tuple[list[float], list[float]]:
    """All running sequences produce a token a step; one in sixteen fills a block."""
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(80 * num_running, BLOCK_SIZE), num_running, 8192, 4096)
    for request in requests(num_running, 250, 800, rng):
        scheduler.add(request)
    while scheduler.num_waiting:
        measure(scheduler, 1, rng)
    measure(scheduler, 20, rng)
    return measure(scheduler, NUM_STEPS, rng)


def pool_full(num_running: int) -> tuple[list[float], list[float]]:
    """Sequences end, are admitted and preempted all the time, with four times as many waiting."""
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(20 * num_running, BLOCK_SIZE), num_running, 8192, 4096)
    for i, request in enumerate(requests(5 * num_running, 250, 200, rng)):
        scheduler.add(request)
        if i < num_running and i % 8 == 0:
            measure(scheduler, 1, rng)
    measure(scheduler, 100, rng)
    before = scheduler.num_preemptions
    times = measure(scheduler, NUM_STEPS, rng)
    assert scheduler.num_preemptions > before
    return times


def row(name: str, num_running: int, times: tuple[list[float], list[float]], limit: float | None) -> str:
    plan, commit = (statistics.median(part) * 1e3 for part in times)
    both = sorted(1e3 * (a + b) for a, b in zip(*times, strict=True))
    tail = both[int(len(both) * 0.99)]
    against = f"{limit:>9.1f}" if limit else f"{'-':>9}"
    return (
        f"{name:<12}{num_running:>9}{plan:>10.2f}{commit:>10.2f}{statistics.median(both):>10.2f}{tail:>10.2f}{against}"
    )


def main() -> None:
    print(f"CPU milliseconds a step, median over {NUM_STEPS} steps\n")
    print(f"{'':<12}{'running':>9}{'plan':>10}{'commit':>10}{'both':>10}{'99 %':>10}{'limit':>9}")
    for num_running, limit in LIMITS_MS.items():
        print(row("decoding", num_running, decoding(num_running), limit))
    for num_running in LIMITS_MS:
        print(row("pool full", num_running, pool_full(num_running), None))


if __name__ == "__main__":
    main()
