"""`octavo demo`: a real model answers as it streams, then 32 prompts run through continuous batching."""

import time

from rich.console import Console
from rich.table import Table

from octavo.engine.engine import Engine
from octavo.llm import LLM
from octavo.observe.stats import Stats
from octavo.tools.generate import chat_prompt, stream
from octavo.types import RequestOutput, RequestOutputKind, SamplingParams

QUESTION = "What is the capital of France, and what is it known for?"

_ACTIONS = ("Name one fact about", "Write one sentence about", "What is special about", "Give a short definition of")
_SUBJECTS = ("the sea", "bread", "the moon", "libraries", "rain", "chess", "honey", "bridges")
PROMPTS = [f"{action} {subject}." for subject in _SUBJECTS for action in _ACTIONS]


def demo(*, model: str | None = None, question: str = QUESTION, max_tokens: int = 64, trace: str | None = None) -> None:
    """A question answered as it streams, then 32 different prompts at once.

    Parameters
    ----------
    model
        Folder, GGUF file, pulled model or Hub id of a chat model; the pulled demo model when none is given.
    question
        What to ask first.
    max_tokens
        Most tokens of each answer.
    trace
        File to record what the scheduler and the block pool do in, for octavo trace.
    """
    console = Console()
    begin = time.perf_counter()
    with LLM(model, trace=trace) as llm:
        console.print(f"Model ready in {time.perf_counter() - begin:.1f} s.\n", highlight=False)
        console.print(f"[bold]Question:[/bold] {question}", highlight=False)
        console.print("[bold]Answer:[/bold] ", end="")
        answer = _ask(llm.engine, question, max_tokens)
        console.print(_speed_of(answer) + "\n", highlight=False, style="dim")
        stats = Stats(llm.engine.cache_size.block_size)
        llm.engine.scheduler.subscribers.append(stats)
        console.print(f"[bold]{len(PROMPTS)} prompts at once[/bold] (continuous batching)", highlight=False)
        begin = time.perf_counter()
        outputs = llm.chat(
            [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
        )
        console.print(_report(outputs, stats, time.perf_counter() - begin, llm.engine.cache_size.num_blocks - 1))
        _show_some(console, outputs)


def _ask(engine: Engine, question: str, max_tokens: int) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    return stream(engine, chat_prompt(engine, question), params)


def _speed_of(output: RequestOutput) -> str:
    times = output.metrics
    if times is None or times.first_token_time is None or times.finished_time is None:
        return ""
    return (
        f"first token after {1000 * (times.first_token_time - times.arrival_time):.0f} ms, "
        f"whole answer in {times.finished_time - times.arrival_time:.2f} s"
    )


def _report(outputs: list[RequestOutput], stats: Stats, seconds: float, num_blocks: int) -> Table:
    first = sorted(
        output.metrics.first_token_time - output.metrics.arrival_time
        for output in outputs
        if output.metrics and output.metrics.first_token_time is not None
    )
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        ("output tokens/s", f"{stats.num_generated_tokens / seconds:,.0f}"),
        ("prompt and output tokens/s", f"{(stats.num_prompt_tokens + stats.num_generated_tokens) / seconds:,.0f}"),
        ("time to first token, median / slowest", f"{1000 * first[len(first) // 2]:.0f} / {1000 * first[-1]:.0f} ms"),
        ("most sequences in one step", f"{stats.most_running}"),
        ("KV blocks used (newly filled)", f"{stats.blocks_used:,}"),
        ("KV blocks hit (shared, not computed again)", f"{stats.blocks_hit:,}"),
        ("KV blocks freed", f"{stats.blocks_freed:,}"),
        ("KV blocks held at most, of all", f"{stats.peak_blocks:,} of {num_blocks:,}"),
    ):
        table.add_row(name, value)
    return table


def _show_some(console: Console, outputs: list[RequestOutput]) -> None:
    console.print("\nThree of the answers:")
    for place in (0, 13, 26):
        text = " ".join(outputs[place].outputs[0].text.split())
        console.print(f"  [bold]{PROMPTS[place]}[/bold] {text}", highlight=False)
