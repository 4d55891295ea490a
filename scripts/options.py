"""Writes docs/options.md from the configuration's dataclasses."""

from pathlib import Path

from octavo.config import ENGINE_ELSEWHERE, TITLES, options

PAGE = Path(__file__).parent.parent / "docs" / "options.md"


def page() -> str:
    """The whole page as Markdown."""
    lines = [
        "# Engine options",
        "",
        "Keywords of `LLM(...)` and `AsyncLLM(...)`; the same names with dashes are flags of `octavo generate`.",
        "This page is written by `scripts/options.py` from `src/octavo/config.py`.",
    ]
    group = ""
    for option in options():
        if option.group != group:
            group = option.group
            lines += ["", f"## {TITLES[group]}", "", "| option | default | meaning |", "| --- | --- | --- |"]
        lines.append(f"| `{option.name}` | `{option.default!r}` | {option.help} |")
    lines += [
        "",
        "## Known from other engines",
        "",
        "Accepted with one notice where the value changes nothing here, refused with the sentence otherwise.",
        "",
        "| keyword | taken when | else |",
        "| --- | --- | --- |",
    ]
    for name, known in sorted(ENGINE_ELSEWHERE.items()):
        values = ", ".join(f"`{value!r}`" for value in known.harmless)
        lines.append(f"| `{name}` | {values} | {known.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
