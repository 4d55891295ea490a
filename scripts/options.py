"""Writes docs/options.md from the dataclasses of the engine's and the server's options."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from octavo.config import ENGINE_ELSEWHERE, TITLES, Option, options
from octavo.known import Elsewhere
from octavo.server.options import SERVER_ELSEWHERE, server_options

PAGE = Path(__file__).parent.parent / "docs" / "options.md"


def page() -> str:
    """The whole page as Markdown."""
    lines = [
        "# Options",
        "",
        "Options of the engine are keywords of `LLM(...)` and `AsyncLLM(...)`; with dashes for underscores they are",
        "flags of `octavo generate` and `octavo serve`. [Options of the server](#server) are flags of `octavo serve`",
        "alone. This page is written by `scripts/options.py` from `src/octavo/config.py` and",
        "`src/octavo/server/options.py`.",
    ]
    for group, title in TITLES.items():
        lines += ["", f"## {title}", "", *_table(option for option in options() if option.group == group)]
    lines += ["", "## Server", "", *_table(server_options())]
    lines += [
        "",
        "## Known from other engines",
        "",
        "Accepted with one notice where the value changes nothing here, refused with the sentence otherwise.",
        "",
        *_known(ENGINE_ELSEWHERE),
        "",
        "And of other servers:",
        "",
        *_known(SERVER_ELSEWHERE),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Iterable[Option]) -> list[str]:
    head = ["| option | default | meaning |", "| --- | --- | --- |"]
    return head + [f"| `{option.name}` | `{option.default!r}` | {option.help} |" for option in rows]


def _known(names: Mapping[str, Elsewhere]) -> list[str]:
    lines = ["| keyword | taken when | else |", "| --- | --- | --- |"]
    for name, known in sorted(names.items()):
        values = ", ".join(f"`{value!r}`" for value in known.harmless)
        lines.append(f"| `{name}` | {values} | {known.why} |")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
