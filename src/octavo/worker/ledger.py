"""What a start takes of memory, line by line: predicted beside measured, printed, and kept on request."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.memory import GIB

logger = logging.getLogger("octavo")


class Ledger:
    """Bytes by what they are for. `predicted` is what `octavo plan` says for the same settings."""

    def __init__(self, device: str, predicted: Mapping[str, int]) -> None:
        self.device, self.predicted = device, dict(predicted)
        self.measured: dict[str, int] = {}

    def note(self, what: str, measured: int) -> None:
        self.measured[what] = measured

    def rows(self) -> list[dict[str, Any]]:
        """For each line its bytes, predicted and measured, and the residual, measured / predicted - 1."""
        found = []
        for what in self.predicted | self.measured:
            predicted, measured = self.predicted.get(what), self.measured.get(what)
            residual = measured / predicted - 1 if predicted and measured is not None else None
            found.append({"line": what, "predicted": predicted, "measured": measured, "residual": residual})
        return found

    def report(self) -> None:
        for row in self.rows():
            predicted, measured, residual = row["predicted"], row["measured"], row["residual"]
            logger.info(
                "%s memory: %-31s %s predicted, %s measured%s",
                self.device,
                row["line"],
                _gib(predicted),
                _gib(measured),
                "" if residual is None else f" ({residual:+.1%})",
            )

    def write(self, path: str | None, about: Mapping[str, Any]) -> None:
        """Append one line of JSON to the file; where it cannot be written a warning says so, and the start goes on."""
        if path is None:
            return
        line = json.dumps({**about, "device": self.device, "lines": self.rows()}) + "\n"
        try:
            file = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            with os.fdopen(file, "w", encoding="utf-8") as out:
                out.write(line)
        except OSError as error:
            logger.warning("memory_report=%s could not be written: %s.", path, error.strerror or error)


def _gib(size: int | None) -> str:
    return "      -    " if size is None else f"{size / GIB:7.2f} GiB"
