"""How the doctor's results look: a table for people, whose last lines are the worst findings, and JSON."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.doctor.checks import Result, worst
from octavo.doctor.facts import Facts
from octavo.doctor.gpu_checks import NOT_NEEDED
from octavo.findings.finding import LEVELS, Level
from octavo.findings.redact import Redactor

STYLES: dict[Level, str] = {"ok": "green", "skipped": "dim", "warning": "bold yellow", "error": "bold red"}
EXIT_STATUS: dict[Level, int] = {"ok": 0, "skipped": 0, "warning": 1, "error": 2}


def as_json(facts: Facts, results: list[Result], redact: Redactor) -> dict[str, Any]:
    """Everything that was found, without secrets."""
    return {
        "octavo": facts.octavo,
        "system": facts.system,
        "model": redact(facts.model.name) if facts.model else None,
        "worst": worst(results),
        "checks": [{"check": one.check, **redact.tree(dataclasses.asdict(one.finding))} for one in results],
    }


def show(console: Console, facts: Facts, results: list[Result], redact: Redactor) -> None:
    """One line for each check that is in order, four for one that is not: what, why, and the mend."""
    about = f" and {redact(facts.model.name)}" if facts.model else ""
    console.print(Text(f"Octavo {facts.octavo} on {facts.system}{about}\n", style="bold"))
    ordered = sorted(results, key=lambda result: LEVELS.index(result.finding.level))
    width = max(len(result.check) for result in results)
    quiet = [result for result in ordered if result.finding.level in ("ok", "skipped")]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=7)
    table.add_column(width=width)
    table.add_column(overflow="fold")
    idle = [one.check for one in quiet if one.finding.found == NOT_NEEDED]
    for one in quiet:
        if one.check in idle:
            if one.check == idle[-1]:
                table.add_row(
                    Text("ok", style=STYLES["ok"]), "GPU", Text(f"{NOT_NEEDED}: {', '.join(idle)}", style="dim")
                )
            continue
        table.add_row(*_head(one), Text(redact(one.finding.found), style="dim"))
    console.print(table)
    for one in ordered[len(quiet) :]:
        console.print()
        _show_fault(console, one, width, redact)
    console.print()
    console.print(Text(summary(results), style=STYLES[worst(results)]))


def _show_fault(console: Console, one: Result, width: int, redact: Redactor) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=7)
    table.add_column(width=width)
    table.add_column(overflow="fold")
    table.add_row(*_head(one), Text(redact(one.finding.found), style="bold"))
    for word, text, style in (("why", one.finding.why, ""), ("mend", one.finding.mend, "cyan")):
        if text:
            table.add_row("", Text(word, justify="right", style="dim"), Text(redact(text), style=style))
    console.print(table)


def _head(one: Result) -> tuple[Text, Text]:
    return Text(one.finding.level, style=STYLES[one.finding.level]), Text(one.check)


def summary(results: list[Result]) -> str:
    """How many of each level."""
    counts = {level: sum(result.finding.level == level for result in results) for level in LEVELS}
    parts = [f"{counts['error']} error{'s' * (counts['error'] != 1)}"] if counts["error"] else []
    parts += [f"{counts['warning']} warning{'s' * (counts['warning'] != 1)}"] if counts["warning"] else []
    parts += [f"{counts['skipped']} not looked at"] if counts["skipped"] else []
    if not parts:
        return f"All {len(results)} checks are in order."
    return f"{', '.join(parts)}; {counts['ok']} of {len(results)} checks are in order."
