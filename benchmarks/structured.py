"""What structured output costs: steps of a batch with and without it, a new schema, and hostile ones as neighbours.

    python benchmarks/structured.py smollm2 [--device cuda] [--batch 32] [--steps 60]

Both sides of a comparison take turns in one process, and medians are shown.
"""

import argparse
import statistics
import time
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import InvalidRequest
from octavo.types import SamplingParams

PROMPT = "Describe a person as JSON."
ORDINARY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "about": {"type": "array", "items": {"type": "string"}, "minItems": 50},
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "about", "kind"],
    "additionalProperties": False,
}
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
HOSTILE: dict[str, dict[str, Any]] = {
    "enum of 10,000": {"enum": [f"value {i} {i * 7919 % 10007}" for i in range(10_000)]},
    "500 optional properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    "{1,5000}": {"type": "string", "pattern": "^[a-z]{1,5000}$"},
    "300 levels": DEEP,
}


def params(steps: int, schema: dict[str, Any] | None, seed: int = 0) -> SamplingParams:
    form = None if schema is None else {"json": schema}
    return SamplingParams(max_tokens=steps, seed=seed, ignore_eos=True, detokenize=False, structured_outputs=form)


def step_times(engine: Engine, batch: int, steps: int, schema: dict[str, Any] | None) -> list[float]:
    """Seconds of each step in which the whole batch decodes."""
    for i in range(batch):
        engine.add(engine.check(PROMPT, params(steps, schema, i)), final_only=True)
    times = []
    while engine.has_unfinished:
        begin = time.perf_counter()
        engine.step()
        if engine.scheduler.num_running == batch and not engine.scheduler.num_waiting:
            times.append(time.perf_counter() - begin)
    return times[2:-1]


def first_token(engine: Engine, schema: dict[str, Any] | None) -> float:
    begin = time.perf_counter()
    engine.add(engine.check(PROMPT, params(1, schema)))
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - begin


def neighbours(engine: Engine, steps: int, schema: dict[str, Any] | None) -> list[float]:
    """Steps of eight free requests, while a request with the schema comes in and runs beside them."""
    for i in range(8):
        engine.add(engine.check(PROMPT, params(steps, None, i)), final_only=True)
    for _ in range(3):
        engine.step()
    if schema is not None:  # past `check`, which would wait for the compilation
        engine.add(engine.inputs.group(PROMPT, params(steps, schema)), final_only=True)
    else:
        engine.add(engine.check(PROMPT, params(steps, None)), final_only=True)
    times = []
    while engine.has_unfinished:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    options = {"model": given.model, "max_model_len": 512, "device": given.device, "max_num_seqs": given.batch}
    with Engine(EngineConfig.from_keywords("LLM", **options)) as engine:
        assert engine.loop.constraints is not None
        engine.loop.constraints.grammars.warm()
        step_times(engine, given.batch, 8, ORDINARY)
        both: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(given.rounds):
            for masked in (False, True):
                both[masked].append(
                    statistics.median(step_times(engine, given.batch, given.steps, ORDINARY if masked else None))
                )
        free, masked_time = (statistics.median(both[masked]) * 1e3 for masked in (False, True))
        more = masked_time / free - 1
        print(f"batch {given.batch}: free {free:.2f} ms a step, with schemas {masked_time:.2f} ms: {more:+.1%}")
        plain = statistics.median(first_token(engine, None) for _ in range(9)) * 1e3
        new = [{**ORDINARY, "required": ["name"], "title": f"{i}"} for i in range(9)]
        fresh = statistics.median(first_token(engine, schema) for schema in new) * 1e3
        print(f"first token: free {plain:.1f} ms, with a new schema {fresh:.1f} ms: {fresh - plain:+.1f} ms")
        base = statistics.median(neighbours(engine, given.steps, None)) * 1e3
        print(f"nine requests, all free: {base:.2f} ms a step")
        for name, schema in HOSTILE.items():
            try:
                times = [seconds * 1e3 for seconds in neighbours(engine, given.steps, schema)]
            except InvalidRequest as error:
                print(f"  one with {name}: refused ({error.message[:80]})")
                while engine.has_unfinished:
                    engine.step()
                continue
            print(
                f"  one with {name}: median {statistics.median(times):.2f} ms ({statistics.median(times) - base:+.2f})"
            )


if __name__ == "__main__":
    main()
