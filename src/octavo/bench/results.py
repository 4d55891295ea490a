"""The printed block and the JSON file of a benchmark."""

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.bench.measures import TITLES, percent_name
from octavo.errors import InvalidConfig
from octavo.version import __version__

WIDTH = 50
SECRETS = ("--api-key", "--admin-api-key", "--header")


def row(label: str, value: Any) -> None:
    print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns with two spaces between them, texts of the last one to the left, all else to the right."""
    cells = [list(heads), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(heads))]
    last = "<" if all(isinstance(row[-1], str) for row in rows) else ">"
    for line in cells:
        shown = [f"{text:>{width}}" for text, width in zip(line, widths, strict=True)]
        print("  ".join([*shown[:-1], f"{line[-1]:{last}{widths[-1]}}"]).rstrip())


def cell(value: Any) -> str:
    """Two decimals, fewer of large numbers and more of small ones."""
    if value is None:
        return "-"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.1f}" if size >= 1000 else f"{value:.2f}" if size >= 0.1 or not value else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def progress(total: int, what: str) -> Any:
    """A bar on a terminal's standard error."""
    return tqdm(total=total, desc=what, disable=not sys.stderr.isatty())


def environment() -> dict[str, Any]:
    """What a reader needs to judge whether two results may be compared; torch is not loaded for it."""
    found = {"octavo": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "tokenizers", "uvloop", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine = {"platform": platform.platform(), "processor": _processor(), "cores": os.cpu_count()}
    return {"versions": found, **machine, "command": command_line(sys.argv)}


def command_line(words: list[str]) -> str:
    """As it was typed, without what is secret."""
    shown, hidden = [], False
    for word in ["octavo", *words[1:]]:
        name, equals, _ = word.partition("=")
        secret = name.replace("_", "-") in SECRETS
        shown.append("..." if hidden else f"{name}=..." if secret and equals else word)
        hidden = secret and not equals
    return shlex.join(shown)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def show_serving(result: dict[str, Any], metrics: list[str], percents: list[float]) -> None:
    """The block that users of vLLM know."""
    print(f"{' Serving Benchmark Result ':=^{WIDTH}}")
    row("Successful requests:", result["completed"])
    row("Failed requests:", result["failed"])
    for error, count in result["errors"].items():
        print(f"  {count} x {error[:160]}")
    if result["max_concurrency"]:
        row("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        row("Request rate configured (RPS):", float(result["request_rate"]))
    if not result["completed"]:
        print("=" * WIDTH)
        return
    for label, name in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        if name in result:
            row(label, result[name])
    for name in metrics:
        short = name.upper() if name != "client_queue_time" else "client queue time"
        print(f"{TITLES[name]:-^{WIDTH}}")
        row(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
        row(f"Median {short} (ms):", result[f"median_{name}_ms"])
        row(f"Std {short} (ms):", result[f"std_{name}_ms"])
        for percent in percents:
            row(f"{percent_name(percent).upper()} {short} (ms):", result[f"{percent_name(percent)}_{name}_ms"])
    print("=" * WIDTH)
    if result["tokens_per_chunk"] > 1.05:
        print(f"A chunk held {result['tokens_per_chunk']:.2f} tokens on average: ITL is between chunks, TPOT a token.")


def plain(value: Any) -> Any:
    """What JSON can hold: an infinite number becomes its name."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, result: dict[str, Any], *, append: bool = False) -> None:
    """One object, or one more line of objects."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(result), indent=None if append else 1) + "\n"
        if append or (path.exists() and not path.is_file()):
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        else:  # whole or not at all: a sweep goes on from what is there
            new = path.with_name(f".{path.name}.new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error}.") from None


def now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")
