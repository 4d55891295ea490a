"""The axes of a sweep: which options are varied, over which values, and the points that this makes."""

import itertools
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from octavo.config import options as engine_options
from octavo.errors import InvalidConfig
from octavo.flags import Family

MOST_POINTS = 10_000
NOT_VARIED = ("host", "port", "base_url", "api_key", "header", "clients")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: values of options of the engine, which need a server of their own, and of the load."""

    engine: tuple[tuple[str, Any], ...]
    load: tuple[tuple[str, Any], ...]

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.engine) | dict(self.load)

    @property
    def name(self) -> str:
        """As people read it, and as its file is called."""
        return ",".join(f"{name.replace('_', '-')}={value}" for name, value in self.values.items()) or "all"

    @property
    def file_name(self) -> str:
        safe = re.sub(r"[^A-Za-z0-9.,=_-]", "-", self.name)
        if safe != self.name or len(safe) > 150:  # two points may look alike now
            safe = f"{safe[:120]}-{zlib.crc32(self.name.encode()):08x}"
        return f"point-{safe}.json"

    def with_rate(self, rate: float) -> "Point":
        return Point(self.engine, (*(pair for pair in self.load if pair[0] != "request_rate"), ("request_rate", rate)))


def points(given: Sequence[str], load: Iterable[Family], with_engine: bool) -> list[Point]:
    """All combinations of axes such as request-rate=1,2,4; those that share a server follow each other.

    Raises:
        InvalidConfig: an axis without values, twice, or of an option that there is not; the message names the nearest.
    """
    kinds = {option.name: option.type for family in load for option in family.options if option.name not in NOT_VARIED}
    of_engine = {option.name for option in engine_options()} - {"seed"}
    kinds |= {option.name: option.type for option in engine_options() if option.name in of_engine}
    axes: dict[str, list[Any]] = {}
    for text in given:
        flag, _, values = text.partition("=")
        name = flag.strip().lstrip("-").replace("-", "_")
        if name not in kinds:
            near = get_close_matches(name, kinds, 1)
            meant = f"Did you mean {near[0].replace('_', '-')}?" if near else ""
            raise InvalidConfig(f"--sweep {text}: {flag or 'nothing'} is no option that can be varied.", meant)
        if name in of_engine and not with_engine:
            raise InvalidConfig(
                f"--sweep {text}: {flag} is an option of the engine, and a server that is running keeps its own.",
                "Leave out --base-url, --host and --port, so that the sweep starts servers.",
            )
        if name in axes:
            raise InvalidConfig(f"--sweep {text}: {flag} is varied already.")
        axes[name] = [_value(kinds[name], word, text) for word in values.split(",") if word.strip()]
        if not axes[name]:
            raise InvalidConfig(f"--sweep {text} is not allowed: it must be OPTION=VALUE,VALUE,...")
    names = sorted(axes, key=lambda name: name not in of_engine)
    found = []
    for chosen in itertools.product(*(axes[name] for name in names)):
        pairs = list(zip(names, chosen, strict=True))
        found.append(
            Point(
                tuple(pair for pair in pairs if pair[0] in of_engine),
                tuple(pair for pair in pairs if pair[0] not in of_engine),
            )
        )
        if len(found) > MOST_POINTS:
            raise InvalidConfig(f"More than {MOST_POINTS:,} points are too many.")
    return list(dict.fromkeys(found))


def _value(kind: Any, word: str, text: str) -> Any:
    word = word.strip()
    if kind is bool:
        if word.lower() not in ("true", "false"):
            raise InvalidConfig(f"--sweep {text}: {word} is not allowed: it must be true or false.")
        return word.lower() == "true"
    wants_text = kind is str
    for number in (int, float) if kind is not float else (float,):
        try:
            return word if wants_text else number(word)
        except ValueError:
            continue
    return word
