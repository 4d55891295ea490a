"""A benchmark's result as one HTML page, which needs no network, no script and no other file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.bench import report_figures as figures
from octavo.bench import report_tables as tables
from octavo.bench.results import plain
from octavo.errors import InvalidConfig

STYLE = Path(__file__).with_name("report.css")


def report(
    *results: Annotated[Path, Parameter(name="RESULT.json")],
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("report.html"),
) -> None:
    """Make one HTML page of the JSON results of octavo bench; several are put side by side.

    Parameters
    ----------
    results
        Files of any octavo bench command; of a file with a line a run, all runs.
    output
        The page.
    """
    if not results:
        raise InvalidConfig("No result is given.", "Name the JSON files that octavo bench wrote.")
    found = [result for path in results for result in read(path)]
    write(output, *found)
    print(f"{output}: {len(found)} result{'s' * (len(found) != 1)}")


def read(path: Path) -> list[dict[str, Any]]:
    """The results of a file: one object, or one a line.

    Raises:
        InvalidConfig: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}.") from None
    try:
        found = [json.loads(text)]
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InvalidConfig(f"{path} is no JSON: {error}.") from None
    if not found or not all(isinstance(result, dict) for result in found):
        raise InvalidConfig(f"{path} holds no result of octavo bench.")
    return found


def write(path: Path, *results: Mapping[str, Any]) -> None:
    """
    Raises:
        InvalidConfig: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page([plain(dict(result)) for result in results]), encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error}.") from None


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """The whole document."""
    first = results[0]
    title = f"octavo bench {kind_of(first)}: {first.get('model_id') or 'no model'}"
    if len(results) > 1:
        title = f"octavo bench: {len(results)} results"
    sections = [_side_by_side(results)] if len(results) > 1 else []
    if len(results) == 1:
        sections.append(_one(first) + tables.environment(first) + tables.settings(first))
    else:
        for number, result in enumerate(results, 1):
            heading = f"<h2>{number}. {escape(name_of(result, number))}</h2>"
            body = _one(result) + tables.environment(result)
            sections.append(f'<article id="result-{number}">{heading}{body}</article>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main><header><h1>{escape(title)}</h1>{_subtitle(first) if len(results) == 1 else ''}</header>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def kind_of(result: Mapping[str, Any]) -> str:
    """The command that made a result; those that do not say it are told by their keys."""
    if kind := result.get("kind"):
        return str(kind)
    marks = {"endpoint_type": "serve", "avg_latency": "latency", "requests_per_second": "throughput"}
    return next((kind for key, kind in marks.items() if key in result), "result")


def name_of(result: Mapping[str, Any], number: int) -> str:
    parts = [result.get("label"), kind_of(result), result.get("model_id"), result.get("date")]
    return ", ".join(str(part) for part in parts if part) or f"result {number}"


def _subtitle(result: Mapping[str, Any]) -> str:
    parts = [result.get("date"), result.get("processor"), result.get("label")]
    line = " · ".join(escape(str(part)) for part in parts if part)
    command = result.get("command")
    shown = f"<pre class='command'>{escape(str(command))}</pre>" if command else ""
    return f"<p class='subtitle'>{line}</p>{shown}"


def _one(result: Mapping[str, Any]) -> str:
    found = figures.raw_of(result)
    rows = [row for row in result.get("rows") or () if isinstance(row, dict)]
    return "".join(
        (
            tables.tiles(result),
            _warnings(result),
            _figures(
                [
                    *figures.rows_figures(result, rows),
                    ("Requests over time", figures.timeline(found)),
                    ("Percentiles", figures.percentiles(result, found)),
                    (
                        "Time between tokens",
                        figures.histogram(found.get("itl"), "milliseconds between two chunks", "gaps"),
                    ),
                    (
                        "Time to first token",
                        figures.histogram(found.get("ttft"), "milliseconds to first token", "requests"),
                    ),
                    *figures.roofline_figures(result),
                ]
            ),
            tables.rows_table(result.get("highest") or [], "Highest rates that meet the objectives"),
            tables.rows_table(rows),
            tables.differences(result),
            tables.latency_table(result),
            tables.roofline_table(result),
            tables.scalar_table(result),
        )
    )


def _side_by_side(results: Sequence[Mapping[str, Any]]) -> str:
    names = [str(result.get("label") or number) for number, result in enumerate(results, 1)]
    keys = [
        key
        for key in (*tables.LABELS, *tables.latency_keys(results))
        if any(tables.is_number(r.get(key)) for r in results)
    ]
    rows = [(tables.label_of(key), key, [tables.shown(result.get(key)) for result in results]) for key in keys]
    given = [dict(tables.flat(result.get("configuration") or {})) for result in results]
    paths = dict.fromkeys(path for found in given for path in found)
    differing = [path for path in paths if len({str(found.get(path)) for found in given}) > 1]
    set_rows = [(path, path, [tables.raw(found.get(path)) for found in given]) for path in differing]
    drawn = _figures(figures.throughput_figures(results, names))
    found = f"<section><h2>Side by side</h2>{drawn}{tables.columns(names, rows)}</section>"
    if set_rows:
        found += f"<section><h2>Settings that differ</h2>{tables.columns(names, set_rows)}</section>"
    return found


def _warnings(result: Mapping[str, Any]) -> str:
    faults = [f"The client was the limit: {fault}." for fault in (result.get("self_check") or {}).get("faults", ())]
    for path, values in (result.get("workload_differs") or {}).items():
        faults.append(f"Not the same work or machine: {path} is {' and '.join(map(str, values))}.")
    if any(failed := result.get("failed_requests") or []):
        faults.append(f"Requests failed, {' and '.join(map(str, failed))}: they are in no figure.")
    errors = result.get("errors")
    if isinstance(errors, dict):
        faults += [
            f"{count} × {error}" if isinstance(count, int) else f"{error}: {count}" for error, count in errors.items()
        ]
    return "".join(f'<p class="warning">{escape(str(fault))}</p>' for fault in faults)


def _figures(figures: Iterable[tuple[str, str]]) -> str:
    shown = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in figures if svg)
    return f'<div class="figures">{shown}</div>' if shown else ""
