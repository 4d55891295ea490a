"""`octavo trace`: what a recorded run did, one request's life, the same arrivals with other settings, a page of it."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from octavo.errors import InvalidConfig
from octavo.observe.trace import Settings, Trace, read
from octavo.trace.figures import Cost, Figures, figures
from octavo.trace.life import History, fold
from octavo.trace.replay import Replay
from octavo.trace.tell import life_rows, lives_table, request_of

MAX_REFUSED = 3


def show(file: Path, request: str | None = None, /) -> None:
    """All requests of a recording, or one's life and its block table step by step.

    Parameters
    ----------
    file
        What --trace FILE wrote.
    request
        A request's id, the beginning of one, or its number.
    """
    trace = read(file)
    history = fold(trace)
    console = Console()
    if request is not None:
        life = request_of(history, request)
        for line in life_rows(history, life):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    console.print(_summary(trace, history), highlight=False, markup=False)
    console.print(lives_table(history))


def replay(
    file: Path,
    /,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    num_scheduler_steps: int | None = None,
    scheduling_policy: Literal["fcfs", "priority"] | None = None,
    depth: int | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Run the recorded arrivals through the scheduler again, without a model, and compare.

    What is not given is as it was recorded. Times are estimates from the recorded steps.

    Parameters
    ----------
    file
        What --trace FILE wrote.
    max_num_seqs
        Most sequences that run at once.
    max_num_batched_tokens
        Most tokens computed in one step.
    max_model_len
        Longest prompt and output together, in tokens.
    block_size
        Tokens in one KV block; the cache keeps its size in tokens unless --num-blocks is given.
    num_blocks
        KV blocks, without the one for padding.
    num_scheduler_steps
        Decode steps for one visit of the scheduler.
    scheduling_policy
        First come first served, or smaller priority numbers first.
    depth
        Steps that may be launched and not yet committed when the next one is planned.
    as_json
        Print both runs' figures as JSON.
    """
    trace = read(file)
    own = trace.header.settings
    if block_size is not None and block_size < 1:
        raise InvalidConfig(f"block_size={block_size} is not allowed: it must be at least 1.")
    if block_size is not None and num_blocks is None:
        num_blocks = (own.num_blocks - 1) * own.block_size // block_size
    given = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": None if num_blocks is None else num_blocks + 1,
        "num_scheduler_steps": num_scheduler_steps,
        "scheduling_policy": scheduling_policy,
        "depth": depth,
    }
    settings = msgspec.structs.replace(own, **{name: value for name, value in given.items() if value is not None})
    if settings.depth < 0:
        raise InvalidConfig(f"depth={settings.depth} is not allowed: it must be at least 0.")
    again = Replay(trace, settings)
    history = fold(trace)
    cost = Cost(history.steps)
    before, after = figures(history, cost), figures(fold(again.trace), cost)
    if as_json:
        found = {"settings": [own, settings], "recorded": before, "replayed": after, "refused": again.refused}
        print(msgspec.json.encode(found).decode())
        return
    console = Console()
    console.print(_summary(trace, history), highlight=False, markup=False)
    console.print(_comparison(own, settings, before, after))
    took = sum(step.micros for step in history.steps if step.micros >= 0) / 1e6
    console.print(f"The recorded steps took {took:.2f} s.", highlight=False)
    if settings == own:
        same = again.trace.records[: len(trace.records)] == _timeless(trace)  # a killed run has no end
        text = "The replay is the recording, record by record." if same else "The replay differs from the recording."
        console.print(text)
    for name, why in again.refused[:MAX_REFUSED]:
        console.print(f"Refused: {name}: {why}", highlight=False, markup=False)
    if len(again.refused) > MAX_REFUSED:
        console.print(f"... and {len(again.refused) - MAX_REFUSED} more.")


def html(file: Path, /, *, output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None) -> None:
    """Write one page that shows the recording: blocks over time, requests, block tables. It needs no network.

    Parameters
    ----------
    file
        What --trace FILE wrote.
    output
        The page; FILE.html when not given.
    """
    from octavo.trace.page import write

    target = output or file.with_name(file.name + ".html")
    trace = read(file)
    write(target, trace)
    print(target)


def _timeless(trace: Trace) -> list[object]:
    return [
        msgspec.structs.replace(record, delay=0) if hasattr(record, "delay") else record for record in trace.records
    ]


def _summary(trace: Trace, history: History) -> str:
    settings, header = history.settings, trace.header
    cut = "" if trace.is_complete else " The recording was not closed: the process runs still, or was killed."
    return (
        f"{header.model or 'A run'}: {len(history.lives)} requests, {len(history.steps)} steps in "
        f"{history.micros / 1e6:.2f} s. {settings.num_blocks - 1} blocks of {settings.block_size} tokens, "
        f"max_num_seqs={settings.max_num_seqs}, max_num_batched_tokens={settings.max_num_batched_tokens}, "
        f"depth={settings.depth}, {settings.scheduling_policy}.{cut}"
    )


ROWS = {
    "requests": "requests",
    "finished": "finished",
    "steps": "steps",
    "visits": "visits of the scheduler",
    "positions": "positions computed",
    "tokens": "tokens generated",
    "preemptions": "preemptions",
    "positions_lost": "positions lost by them",
    "positions_found": "prompt positions found in the cache",
    "blocks_evicted": "blocks evicted",
    "blocks_copied": "blocks copied",
    "most_blocks": "most blocks in use",
    "most_running": "most sequences in a step",
    "mean_running": "sequences in a step, mean",
    "mean_wait": "steps in the queue, mean",
    "longest_wait": "steps in the queue, longest",
    "estimated_seconds": "seconds, estimated",
}


def _comparison(own: Settings, settings: Settings, before: Figures, after: Figures) -> Table:
    table = Table(box=None, header_style="dim")
    for name in ("", "recorded", "replayed"):
        table.add_column(name, justify="right" if name else "left")
    for name in Settings.__struct_fields__:
        one, other = getattr(own, name), getattr(settings, name)
        if one != other:
            less = 1 if name == "num_blocks" else 0
            table.add_row(name, *(str(value - less if less else value) for value in (one, other)), style="bold")
    for name, text in ROWS.items():
        one, other = getattr(before, name), getattr(after, name)
        table.add_row(text, _number(one), _number(other), style="yellow" if one != other else "")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
