"""Where each request's time goes, from its text to its last word: measured in the engine, adding up to the whole."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, Self

from octavo.bench.offline import Batch, Timing
from octavo.core.events import Committed, Event, Planned
from octavo.core.step import Step
from octavo.engine.engine import Engine
from octavo.engine.spans import watched
from octavo.worker.base import Span
from octavo.worker.start import choose_device

PARTS = ("tokenization", "queue", "prefill", "first_token", "decode", "detokenization")
DEFINITIONS = """
tokenization: from a request's text to its checked token ids.
queue: from giving the batch until the scheduler plans the request's first step.
prefill: from there until the layers have computed the end of the prompt; on a GPU until its token is there.
first token: from there until the first token is shown: its logits, sampling, and what the loop does before.
decode: from the first token to the last one; a token of it is that time / (tokens - 1).
detokenization: making text and outputs of tokens, whenever that happens; it is taken out of all the parts above.
"""


class Phases:
    """Watches an engine while the context is open, which may be several times; `split` judges what ran in it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine, self.clock = engine, clock
        # On a CPU a step is computed when its launch returns; a GPU's is waited for where it is committed.
        self._launch_computes = choose_device(engine.config).type == "cpu"
        self._planned: dict[str, float] = {}
        self._computed: dict[str, float] = {}
        self._to_compute: list[tuple[Step, list[str]]] = []
        self._text: list[tuple[float, float]] = []  # begin and end of each time that text was made
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self.engine.scheduler.subscribers.append(self._hear)
        spans = [Span("launch", self.engine.loop.executor, "launch"), Span("outputs", self.engine.outputs, "process")]
        self._open.enter_context(watched(spans, self._around))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.engine.scheduler.subscribers.remove(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Planned):
            now = self.clock()
            for name in event.request_ids:
                self._planned.setdefault(name, now)
            ended = [
                name
                for name, chunk in zip(event.request_ids, event.step.chunks, strict=True)
                if chunk.samples and name not in self._computed
            ]
            if ended:
                self._to_compute.append((event.step, ended))
        elif isinstance(event, Committed) and not self._launch_computes:
            self._mark([names for step, names in self._to_compute if step is event.step])
            self._to_compute = [pair for pair in self._to_compute if pair[0] is not event.step]

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        begin = self.clock()
        yield
        if name == "outputs":
            self._text.append((begin, self.clock()))
        elif self._launch_computes and self._to_compute:
            self._mark([names for _, names in self._to_compute])
            self._to_compute.clear()

    def _mark(self, found: list[list[str]]) -> None:
        now = self.clock()
        for names in found:
            for name in names:
                self._computed.setdefault(name, now)

    def split(self, batch: Batch) -> list[dict[str, float]]:
        """Seconds of each of `PARTS` for every request of a batch, and `whole`, which is their sum."""
        return [self._split(batch.begin, timing) for timing in batch.timings]

    def _split(self, begin: float, timing: Timing) -> dict[str, float]:
        first, end = begin + timing.first, begin + timing.end
        marks = [begin, self._planned[timing.id], self._computed[timing.id], first, end]
        ends = [stop for _, stop in self._text]
        before = [0.0, *accumulate(stop - start for start, stop in self._text)]

        def texts(moment: float) -> float:
            """Seconds of making text until a moment."""
            place = bisect_right(ends, moment)
            inside = max(0.0, moment - self._text[place][0]) if place < len(ends) else 0.0
            return before[place] + inside

        spent = [texts(moment) for moment in marks]
        names = ("queue", "prefill", "first_token", "decode")
        found = {"tokenization": timing.tokenization}
        for name, a, b, text_a, text_b in zip(names, marks, marks[1:], spent, spent[1:], strict=False):
            found[name] = b - a - (text_b - text_a)
        return found | {"detokenization": spent[-1] - spent[0], "whole": timing.tokenization + timing.end}


def means(splits: Sequence[dict[str, float]], timings: Sequence[Timing]) -> dict[str, Any]:
    """Milliseconds of a mean request, and of one token of its decoding; keys are mean_PART_ms."""
    count = len(splits)
    found = {f"mean_{name}_ms": 1e3 * sum(split[name] for split in splits) / count for name in (*PARTS, "whole")}
    gaps = sum(timing.output_tokens - 1 for timing in timings)
    decode = 1e3 * sum(split["decode"] for split in splits)
    return found | {"mean_decode_token_ms": decode / gaps if gaps else 0.0}
