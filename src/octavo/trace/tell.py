"""Requests of a recording in words: the table of all, and one's life with its block table step by step."""

from collections.abc import Iterator

from rich.table import Table

from octavo.errors import InvalidRequest, shown
from octavo.trace.life import History, Life, Stay


def request_of(history: History, name: str) -> Life:
    """By id, by its beginning, or by number.

    Raises:
        InvalidRequest: there is none, or several begin so.
    """
    exact = [life for life in history.lives if life.id == name]
    found = exact[-1:] or [life for life in history.lives if life.id.startswith(name)]
    if name.isdecimal() and not exact and int(name) < len(history.lives):
        found = [history.lives[int(name)]]
    if len(found) == 1:
        return found[0]
    some = ", ".join(life.id for life in (found or history.lives)[:5])
    if found:
        raise InvalidRequest(f"{len(found)} requests begin with {shown(name)}: {some}, ...", "Give more of the id.")
    raise InvalidRequest(f"There is no request {shown(name)} in the recording.", f"There are {some or 'none'}.")


def lives_table(history: History) -> Table:
    """`wait` is steps in the queue, `lost` positions lost by preemptions, `blocks` the most at a time."""
    table = Table(box=None, header_style="dim")
    titles = ("", "request", "at ms", "prompt", "found", "wait", "first ms", "tokens", "lost", "blocks", "end")
    for title in titles:
        table.add_column(title, justify="left" if title in ("request", "end") else "right", no_wrap=title != "request")
    for life in history.lives:
        first = history.steps[life.first_token].committed if life.first_token >= 0 else -1
        table.add_row(
            str(life.arrival.number),
            life.id,
            f"{life.at / 1e3:.1f}",
            str(life.arrival.num_prompt_tokens),
            str(life.num_cached),
            str(life.stays[0].first - life.step) if life.stays else "",
            f"{(first - life.at) / 1e3:.1f}" if first >= 0 else "",
            str(life.num_generated),
            str(sum(stay.num_lost for stay in life.stays) or ""),
            str(max((len(stay.blocks) for stay in life.stays), default=0)),
            life.finish.reason if life.finish else "",
        )
    return table


def life_rows(history: History, life: Life) -> Iterator[str]:
    """Lines: a head, then one for each step that changed something, with the block table after it."""
    arrival = life.arrival
    limit = "as many as fit" if arrival.max_tokens < 0 else f"at most {arrival.max_tokens}"
    more = [f"priority {arrival.priority}"] if arrival.priority else []
    more += ["does not read the prefix cache"] if not arrival.reads_prefix_cache else []
    yield f"{life.id}: {arrival.num_prompt_tokens} prompt tokens, {limit} to generate{''.join(', ' + m for m in more)}"
    yield f"{'step':>7} {'ms':>10}  "
    yield _line(life.step, life.at, f"arrives, {_ahead(history, life)}")
    for stay in life.stays:
        yield from _stay_rows(history, life, stay)
    if life.finish is None:
        yield "The recording ends here."
    else:
        cause = "" if life.finish.in_commit else ", from outside"
        freed = f", {len(life.stays[-1].blocks)} blocks released" if life.stays and _left_at_end(life) else ""
        text = f"ends: {life.finish.reason}{cause} after {life.finish.num_generated} tokens{freed}"
        yield _line(life.finish_step, life.finish_at, text)


def _stay_rows(history: History, life: Life, stay: Stay) -> Iterator[str]:
    size, steps = history.settings.block_size, history.steps
    parts = []
    if stay.num_shared:
        parts.append(f"{stay.num_shared // size} blocks found")
    if stay.num_copied:
        parts.append("1 block copied")
    new = sum(step == stay.first for step, _ in stay.blocks) - stay.num_shared // size - (stay.num_copied > 0)
    if new:
        parts.append(f"{new} blocks new")
    again = "again " if stay is not life.stays[0] else ""
    evicted = [
        block for step, block, number in history.evictions if step == stay.first and number == life.arrival.number
    ]
    if evicted:
        parts.append(f"{len(evicted)} of them evicted for it")
    launched = steps[stay.first].launched if stay.first < len(steps) else history.micros
    yield _line(stay.first, launched, f"admitted {again}into slot {stay.slot}: {', '.join(parts)}")
    done, quiet = stay.num_shared + stay.num_copied, 0
    grown = {step for step, _ in stay.blocks}
    for step, end in stay.ends:
        is_prefill = end - done > steps[step].repeat or done < stay.num_known - 1
        quiet += 1
        if is_prefill or step in grown or (step, end) == stay.ends[-1]:
            what = f"computes {done} to {end - 1}" if end - done > 1 else f"computes {done}"
            if quiet > 1:
                what += f", the last of {quiet} steps of decoding"
            if step in grown and step != stay.first:
                what += ", takes " + " ".join(str(block) for since, block in stay.blocks if since == step)
            if step == life.first_token:
                what += ", first token"
            yield _line(step, steps[step].launched, what, _table(stay.table(step), end, size))
            quiet = 0
        done = end
    if stay.preempted_by >= 0:
        by = history.lives[stay.preempted_by]
        whom = "nobody else could" if by is life else f"so that {by.id} can grow"
        at = steps[stay.end].launched if stay.end < len(steps) else history.micros
        yield _line(
            stay.end, at, f"preempted, {whom}: {len(stay.blocks)} blocks released, {stay.num_lost} positions lost"
        )


def _line(step: int, micros: int, text: str, table: str = "") -> str:
    return f"{step:>7} {micros / 1e3:>10.2f}  {text:<58} {table}".rstrip()


def _table(blocks: list[int], num_positions: int, size: int) -> str:
    """Block ids; in brackets how many positions of it are computed, where it is not full."""
    shown = []
    for i, block in enumerate(blocks):
        filled = min(max(num_positions - i * size, 0), size)
        shown.append(str(block) if filled == size else f"{block}[{filled}]")
    return "| " + " ".join(shown)


def _ahead(history: History, life: Life) -> str:
    waiting = sum(
        other.place < life.place
        and (not other.stays or other.stays[0].first >= life.step)
        and (other.finish is None or other.finish_place > life.place)
        for other in history.lives
    )
    return f"{waiting} wait before it" if waiting else "nobody waits"


def _left_at_end(life: Life) -> bool:
    return life.stays[-1].preempted_by < 0
