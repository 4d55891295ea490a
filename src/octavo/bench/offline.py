"""Drives an engine in this process and notes when each request's tokens come."""

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.workload import Item
from octavo.engine.engine import Engine
from octavo.errors import OctavoError
from octavo.types import FinishReason, RequestOutputKind, SamplingParams

LOWEST_ID = 16  # special tokens mostly stand below


@dataclass(slots=True)
class Timing:
    """One request: seconds after the batch was given, and tokens. `times` are those of each step that brought some."""

    id: str = ""  # by which the scheduler calls it (its first sample)
    tokenization: float = 0.0  # before the batch was given
    first: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float:
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(slots=True)
class Batch:
    """A batch that was answered: tokenization and all else apart, in seconds; `begin` is between them, on the clock."""

    tokenization: float
    seconds: float
    begin: float = 0.0
    timings: list[Timing] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        return sum(timing.output_tokens for timing in self.timings)

    @property
    def prompt_tokens(self) -> int:
        return sum(timing.prompt_tokens for timing in self.timings)


def run(
    engine: Engine,
    items: Sequence[Item],
    *,
    detokenize: bool = True,
    n: int = 1,
    ignore_eos: bool = True,
    bar: Any = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Batch:
    """Answer all items at once, each with exactly its number of tokens unless the end of sequence is obeyed.

    Raises:
        InvalidRequest: an item can never run.
        OctavoError: a request ended with a fault; a benchmark has no use for the others.
    """
    params = SamplingParams(
        n=n,
        temperature=0.0 if n == 1 else 1.0,
        ignore_eos=ignore_eos,
        detokenize=detokenize and engine.tokenizer is not None,
        output_kind=RequestOutputKind.DELTA,
    )
    groups, timings, start = [], {}, clock()
    for item in items:
        begin = clock()
        group = engine.check(item.prompt, dataclasses.replace(params, max_tokens=item.output_len))
        request = group.requests[0]
        timings[group.id] = Timing(request.id, clock() - begin, prompt_tokens=len(request.prompt_token_ids))
        groups.append(group)
    begin = clock()
    tokenization = begin - start
    try:
        for group in groups:
            engine.add(group)
        while engine.has_unfinished:
            outputs = engine.step()
            now = clock() - begin
            for output in outputs:
                timing = timings[output.request_id]
                timing.output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
                if not timing.first and timing.output_tokens:
                    timing.first = now
                timing.end = now
                if output.outputs and (not timing.times or timing.times[-1] != now):
                    timing.times.append(now)
                for sample in output.outputs:
                    if sample.finish_reason == FinishReason.ERROR:
                        raise OctavoError(f"A request failed: {sample.stop_reason}.")
                if output.finished and bar is not None:
                    bar.update(1)
    except BaseException:
        engine.clear()
        raise
    return Batch(tokenization, clock() - begin, begin, list(timings.values()))


def requests(batches: Sequence[Batch]) -> dict[str, Any]:
    """Times of every request for a report, in seconds, batches one after another; keys are those of `bench serve`."""
    found: dict[str, list[Any]] = {
        name: [] for name in ("start_times", "ttfts", "latencies", "itls", "input_lens", "output_lens")
    }
    begin = 0.0
    for batch in batches:
        for timing in batch.timings:
            found["start_times"].append(begin)
            found["ttfts"].append(timing.first)
            found["latencies"].append(timing.end)
            found["itls"].append([b - a for a, b in zip(timing.times, timing.times[1:], strict=False)])
            found["input_lens"].append(timing.prompt_tokens)
            found["output_lens"].append(timing.output_tokens)
        begin += batch.seconds
    return found


def without_gaps(requests: dict[str, Any]) -> dict[str, Any]:
    """What a JSON file keeps of `requests`: not every gap between two tokens, which are by far the most."""
    return {name: values for name, values in requests.items() if name != "itls"}


def texts(engine: Engine, items: Sequence[Item]) -> list[Item]:
    """The same requests as texts, so that tokenizing them takes its time; without a tokenizer they stay ids.

    A text has as many tokens as the ids had, give or take those of its last character.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return list(items)

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    found = []
    for item in items:
        assert not isinstance(item.prompt, str)
        wanted = len(item.prompt)
        text = tokenizer.decode(item.prompt).replace("\ufffd", "") or "a"
        while count(text) < wanted:
            text += " " + text
        end = bisect_left(range(len(text)), wanted, key=lambda place: count(text[:place]))
        found.append(Item(text[:end], item.output_len))
    return found


def highest_id(engine: Engine) -> int:
    return engine.spec.vocab_size - 1


def configuration(engine: Engine) -> dict[str, Any]:
    """What the engine really runs with."""
    found = dataclasses.asdict(engine.config)
    size = engine.cache_size
    return found | {
        "effective": {
            "max_model_len": engine.max_model_len,
            "block_size": size.block_size,
            "kv_cache_tokens": size.num_tokens,
            "max_num_seqs": engine.scheduler.max_num_seqs,
            "max_num_batched_tokens": engine.scheduler.max_num_batched_tokens,
        }
    }
