"""`octavo bench batch` and `octavo bench length`: a table by batch size, and one by length of the answers."""

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench import offline, phases, report, results, roofline
from octavo.bench.workload import Workload, items
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import InvalidConfig
from octavo.flags import ENGINE, with_options


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rows of a table, each measured once cold and then `rounds` times; `varied` is what differs between rows."""

    kind: str  # batch or length
    varied: str
    rows: Sequence[tuple[int, int]]  # batch size, tokens of an answer
    input_len: int
    rounds: int
    ignore_eos: bool


@with_options(positional="model", config=ENGINE)
def batch(
    *,
    input_len: int = 32,
    output_len: int = 64,
    max_batch_size: int = 32,
    batch_sizes: str = "",
    num_iters: int = 3,
    ignore_eos: bool = True,
    output_json: Path | None = None,
    output_html: Path | None = None,
    config: EngineConfig,
) -> None:
    """Tokens/s, requests/s and latency by batch size, in this process, and where the time of a request goes.

    Each batch size runs once cold, which is shown apart, and then --num-iters times. Every run has fresh random
    prompts, so that nothing comes from the prefix cache.

    Parameters
    ----------
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer.
    max_batch_size
        Batch sizes are 1, 2, 4 and so on up to this one.
    batch_sizes
        Other batch sizes, such as 1,3,8.
    num_iters
        Warm runs of each batch size, which count.
    ignore_eos
        Let answers have exactly --output-len tokens.
    output_json
        File for the result.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    """
    _positive(input_len=input_len, output_len=output_len, max_batch_size=max_batch_size, num_iters=num_iters)
    sizes = _numbers("batch_sizes", batch_sizes) or _doubled(1, max_batch_size)
    rows = [(size, output_len) for size in sizes]
    _run(config, Ladder("batch", "batch_size", rows, input_len, num_iters, ignore_eos), output_json, output_html)


@with_options(positional="model", config=ENGINE)
def length(
    *,
    input_len: int = 32,
    batch_size: int = 1,
    max_output_len: int = 512,
    output_lens: str = "",
    num_iters: int = 3,
    ignore_eos: bool = True,
    output_json: Path | None = None,
    output_html: Path | None = None,
    config: EngineConfig,
) -> None:
    """Tokens, time and tokens/s by length of the answers, in this process, and where the time of a request goes.

    Each length runs once cold, which is shown apart, and then --num-iters times. Every run has fresh random prompts,
    so that nothing comes from the prefix cache.

    Parameters
    ----------
    input_len
        Tokens of a prompt.
    batch_size
        Requests at once.
    max_output_len
        Lengths are 32, 64, 128 and so on up to this one.
    output_lens
        Other lengths, such as 10,100.
    num_iters
        Warm runs of each length, which count.
    ignore_eos
        Let answers have exactly these lengths; --no-ignore-eos lets the model end them, and tokens are counted.
    output_json
        File for the result.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    """
    _positive(input_len=input_len, batch_size=batch_size, max_output_len=max_output_len, num_iters=num_iters)
    lengths = _numbers("output_lens", output_lens) or _doubled(min(32, max_output_len), max_output_len)
    rows = [(batch_size, length) for length in lengths]
    _run(config, Ladder("length", "output_len", rows, input_len, num_iters, ignore_eos), output_json, output_html)


def _run(config: EngineConfig, ladder: Ladder, output_json: Path | None, output_html: Path | None) -> None:
    with Engine(config) as engine:
        result = measured(engine, ladder)
    show(result)
    if output_json:
        results.write_json(output_json, result)
    if output_html:
        report.write(output_html, result)


def measured(engine: Engine, ladder: Ladder) -> dict[str, Any]:
    """All rows, one after another.

    Raises:
        InvalidConfig: a row is longer than the model's context.
    """
    longest = ladder.input_len + max(output for _, output in ladder.rows)
    if longest > engine.max_model_len:
        raise InvalidConfig(
            f"{ladder.input_len} tokens of a prompt and {longest - ladder.input_len} of an answer are {longest}: "
            f"more than max_model_len={engine.max_model_len}."
        )
    rows = []
    limits: dict[str, Any] = {}
    with results.progress(len(ladder.rows) * (1 + ladder.rounds), "Batches") as bar:
        for place, (size, output) in enumerate(ladder.rows):
            row, limits = _row(engine, ladder, size, output, engine.config.model.seed + place, bar)
            rows.append(row)
    return {
        "kind": ladder.kind,
        "rows": rows,
        "input_len": ladder.input_len,
        "num_iters": ladder.rounds,
        "date": results.now(),
        "model_id": engine.config.model.model,
        "prefix_cache": "fresh prompts in every run: nothing is found in it",
        "definitions": phases.DEFINITIONS.strip(),
        "configuration": offline.configuration(engine)
        | {
            "workload": {
                "input_len": ladder.input_len,
                "rows": [list(row) for row in ladder.rows],
                "ignore_eos": ladder.ignore_eos,
                "seed": engine.config.model.seed,
            }
        },
        "roofline": limits,
        **results.environment(),
    }


def _row(
    engine: Engine, ladder: Ladder, size: int, output: int, seed: int, bar: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    count = size * (1 + ladder.rounds)
    work = Workload(num_prompts=count, input_len=ladder.input_len, output_len=output, seed=seed)
    made = items(work, offline.LOWEST_ID, offline.highest_id(engine), lambda text: 0)
    found = offline.texts(engine, made)
    watching, asked = roofline.Roofline(engine), phases.Phases(engine)
    batches = []
    for place in range(1 + ladder.rounds):
        part = found[place * size : (place + 1) * size]
        with watching if place else nullcontext(), asked:
            batches.append(offline.run(engine, part, ignore_eos=ladder.ignore_eos))
        bar.update(1)

    def again() -> None:
        engine.reset_prefix_cache()
        offline.run(engine, found[:size], ignore_eos=ladder.ignore_eos)

    limits = watching.result(again)
    cold, warm = batches[0], batches[1:]
    timings = [timing for one in warm for timing in one.timings]
    seconds, tokens = sum(one.seconds for one in warm), sum(one.output_tokens for one in warm)
    by_round = {
        "request_throughput": [size / one.seconds for one in warm],
        "output_throughput": [one.output_tokens / one.seconds for one in warm],
        "mean_e2el_ms": [_mean_ms(timing.end for timing in one.timings) for one in warm],
        "mean_ttft_ms": [_mean_ms(timing.first for timing in one.timings) for one in warm],
        "mean_tpot_ms": [_mean_ms(timing.tpot for timing in one.timings) for one in warm],
    }
    row = {
        ladder.varied: size if ladder.varied == "batch_size" else output,
        "output_tokens": tokens / len(warm),
        "batch_seconds": seconds / len(warm),
        "request_throughput": size * len(warm) / seconds,
        "output_throughput": tokens / seconds,
        "mean_e2el_ms": _mean_ms(timing.end for timing in timings),
        "mean_ttft_ms": _mean_ms(timing.first for timing in timings),
        "mean_tpot_ms": _mean_ms(timing.tpot for timing in timings if timing.output_tokens > 1),
        "cold_batch_seconds": cold.seconds,
        "cold_ttft_ms": _mean_ms(timing.first for timing in cold.timings),
        "decode_of_limit": limits["kinds"].get("decode", {}).get("achieved_share"),
        **phases.means([split for one in warm for split in asked.split(one)], timings),
        "input_tokens": statistics.fmean(timing.prompt_tokens for timing in timings),
        "samples": by_round,
    }
    return row, limits


def show(result: dict[str, Any]) -> None:
    """The two tables and the roofline of the last row."""
    by_batch = result["kind"] == "batch"
    first = "Batch" if by_batch else "Asked"
    key = "batch_size" if by_batch else "output_len"
    rows = result["rows"]
    heads = [first, "Tokens", "Cold (s)", "Time (s)", "Requests/s", "Tokens/s", "TTFT (ms)", "TPOT (ms)"]
    names = ("output_tokens", "cold_batch_seconds", "batch_seconds", "request_throughput", "output_throughput")
    lines = [
        [
            row[key],
            *(round(row[name]) if name == "output_tokens" else row[name] for name in names),
            row["mean_ttft_ms"],
            row["mean_tpot_ms"],
        ]
        for row in rows
    ]
    results.table(heads, lines)
    print(f"\n{' Where the time of a request went (ms) ':-^{results.WIDTH}}")
    parts = [*phases.PARTS, "whole", "decode_token"]
    heads = [first, "Tokenize", "Queue", "Prefill", "1st token", "Decode", "Detokenize", "Whole", "A token"]
    results.table(heads, [[row[key], *(row[f"mean_{part}_ms"] for part in parts)] for row in rows])
    print(f"\nRoofline of the last row ({key.replace('_', ' ')} {rows[-1][key]}):")
    roofline.show(result["roofline"])


def _mean_ms(seconds: Any) -> float:
    found = list(seconds)
    return 1e3 * statistics.fmean(found) if found else 0.0


def _doubled(first: int, last: int) -> list[int]:
    """first, twice that and so on, and the last one whatever it is."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise InvalidConfig(f"{name}={text} is not allowed: it must be numbers from 1, such as 1,4,16.")
    return sorted(set(found))


def _positive(**given: int) -> None:
    for name, value in given.items():
        if value < 1:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be from 1.")
