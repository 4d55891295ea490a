"""A recording as one page that needs no network: its figures go into `page.html` as JSON, the page draws them."""

from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import InvalidConfig
from octavo.observe.trace import Trace
from octavo.trace.life import Life, Stay, fold

HERE = Path(__file__).parent
PARTS = {"/*STYLE*/": "page.css", "/*SCRIPT*/": "page.js"}
DATA = "/*DATA*/"


def write(path: Path, trace: Trace) -> None:
    """Write the page.

    Raises:
        InvalidConfig: the file cannot be written.
    """
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for place, name in PARTS.items():
        page = page.replace(place, (HERE / name).read_text(encoding="utf-8"))
    text = msgspec.json.encode(data(trace)).decode().replace("<", "\\u003c")  # ids are what clients wrote
    try:
        path.write_text(page.replace(DATA, text), encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror}.") from None


def data(trace: Trace) -> dict[str, Any]:
    """What the page shows. Steps are counted from 0; times are microseconds.

    A stay is [slot, first step, end or -1, positions shared, positions copied, positions known, number of who
    preempted it or -1, positions lost, blocks as step, block, ..., runs as first step, positions after it, steps, ...]:
    in a run each step computes one more position.
    """
    history = fold(trace)
    settings = history.settings
    return {
        "model": trace.header.model,
        "complete": trace.is_complete,
        "size": settings.block_size,
        "blocks": settings.num_blocks - 1,
        "settings": msgspec.to_builtins(settings),
        "launched": [step.launched for step in history.steps],
        "took": [step.micros for step in history.steps],
        "running": [len(step.shares) for step in history.steps],
        "positions": [sum(share.end - share.start for share in step.shares) for step in history.steps],
        "requests": [_request(life) for life in history.lives],
    }


def _request(life: Life) -> dict[str, Any]:
    return {
        "id": life.id,
        "prompt": life.arrival.num_prompt_tokens,
        "tokens": life.num_generated,
        "arrived": life.step,
        "at": life.at,
        "first": life.first_token,
        "end": life.finish_step,
        "reason": life.finish.reason if life.finish else "",
        "stays": [_stay(stay) for stay in life.stays],
    }


def _stay(stay: Stay) -> list[Any]:
    blocks = [number for pair in stay.blocks for number in pair]
    runs: list[int] = []
    for step, end in stay.ends:
        if runs and step == runs[-3] + runs[-1] and end == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [step, end, 1]
    return [
        stay.slot, stay.first, stay.end, stay.num_shared, stay.num_copied, stay.num_known, stay.preempted_by,
        stay.num_lost, blocks, runs,
    ]  # fmt: skip
