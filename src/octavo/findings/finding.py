"""What was found, why it matters and what mends it: the form in which `octavo doctor` and failing starts speak."""

from dataclasses import dataclass
from typing import Literal

from octavo.errors import InvalidConfig, OctavoError

Level = Literal["ok", "skipped", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "skipped", "warning", "error")
"""From the least to the worst; skipped is what could not be asked because something before it failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` and `why` are sentences. `mend` is one too, or the command alone, which begins with a small letter."""

    level: Level
    found: str
    why: str = ""
    mend: str = ""

    def as_error(self, kind: type[OctavoError] = InvalidConfig) -> OctavoError:
        """The exception whose text is the cause and the mend, which a failing start ends with."""
        return kind(self.found, self.advice)

    @property
    def advice(self) -> str:
        """The mend as a sentence."""
        return f"Run: {self.mend}" if self.mend[:1].islower() else self.mend

    @property
    def line(self) -> str:
        return f"{self.found} {self.advice}".strip()


def ok(found: str) -> Finding:
    return Finding("ok", found)


def skipped(found: str) -> Finding:
    return Finding("skipped", found)
