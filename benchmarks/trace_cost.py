"""What recording a trace costs the host: CPU time of the recorder and of plan and commit, by sequences at a time."""

import os
import random
import tempfile
import time
from collections.abc import Callable

from octavo.core.blocks import BlockPool
from octavo.core.events import Event
from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.engine.loop import Loop
from octavo.observe.trace import FORMAT, Header, Recorder, Settings, TraceFile
from octavo.types import Request, SamplingParams

NUM_STEPS = 3000


class Device:
    """Says anything, at once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.step = rng, Step()

    def launch(self, step: Step) -> None:
        self.step = step

    def sample(self, masks: object = None) -> Callable[[], StepResult]:
        result = StepResult([[self.rng.randrange(500)] if chunk.samples else [] for chunk in self.step.chunks])
        return lambda: result

    def close(self) -> None: ...


def measure(num_seqs: int, path: str) -> None:
    """Prompts of 200 tokens and answers of 100 to 300, always `num_seqs` at work."""
    rng = random.Random(1)
    scheduler = Scheduler(BlockPool(20000, 16), num_seqs, 4096, 2048)
    loop = Loop(scheduler, Device(rng), 1)
    file = TraceFile(path)
    file.write(Header(FORMAT, Settings.of(scheduler, 1)))
    recorder = Recorder(file.write, 16)
    spent = count = 0.0

    def timed(event: Event) -> None:
        nonlocal spent
        begin = time.thread_time()
        recorder(event)
        spent += time.thread_time() - begin

    scheduler.subscribers.append(timed)
    begin = time.thread_time()
    for _ in range(NUM_STEPS):
        while scheduler.num_running + scheduler.num_waiting < num_seqs:
            prompt = tuple(rng.randrange(500) for _ in range(200))
            scheduler.add(Request(f"{count:.0f}", prompt, SamplingParams(max_tokens=rng.randint(100, 300))))
            count += 1
        loop.step()
    total = time.thread_time() - begin
    recorder.flush()
    file.close()
    print(
        f"{num_seqs:>4} sequences: {spent * 1e6 / NUM_STEPS:6.1f} us a step in the recorder, "
        f"{(total - spent) * 1e6 / NUM_STEPS:7.1f} us around it, {os.path.getsize(path) / NUM_STEPS:6.1f} bytes a step"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for num_seqs in (1, 16, 64, 256):
            measure(num_seqs, os.path.join(folder, "run.trace"))
