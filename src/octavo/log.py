"""The logger of Octavo: one name, text or JSON lines, set up once and only where the program around it did not."""

import json
import logging
import sys
import time
from typing import Literal

from octavo import env
from octavo.errors import InvalidConfig

FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
TIME_FORMAT = "%m-%d %H:%M:%S"
COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}
RESET = "\x1b[0m"

LogFormat = Literal["text", "json"]

logger = logging.getLogger("octavo")

# What every record has; the rest is what `extra=` brought.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message", "taskName"}


class TextLines(logging.Formatter):
    """`INFO 11-30 12:00:00 [file:line] message`, after the name and pid of a server's process."""

    def __init__(self, process: str = "", colour: bool = False) -> None:
        super().__init__(f"({process} pid=%(process)d) {FORMAT}" if process else FORMAT, TIME_FORMAT)
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        start = COLOURS.get(record.levelno, "") if self.colour else ""
        return f"{start}{line}{RESET}" if start else line


class JSONLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, logger, file, line, pid, process, and what `extra=` gave."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
            "pid": record.process,
        }
        if self.process:
            entry["process"] = self.process
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in entry}
        return json.dumps(entry, ensure_ascii=False, default=repr)


def set_up(log_format: LogFormat = "text", process: str = "") -> None:
    """Show the messages of Octavo on standard error, from the level in OCTAVO_LOGGING_LEVEL.

    The root logger is left alone. Handlers that a program put on `octavo` or on the root stay the only
    ones, and so does the level it chose; a second call of Octavo's own changes format and process name.

    Raises:
        InvalidConfig: a level that Python's logging does not know, or a format that is neither.
    """
    if log_format not in ("text", "json"):
        raise InvalidConfig(f"log_format={log_format!r} is not allowed: it must be text or json.")
    ours = _our_handler()
    if not env.configures_logging() or (ours is None and logger.hasHandlers()):
        return
    level = env.logging_level()
    known = logging.getLevelNamesMapping()
    if level not in known:
        raise InvalidConfig(f"OCTAVO_LOGGING_LEVEL={level} is not a level.", f"It is one of {', '.join(known)}.")
    if ours is None:
        ours = logging.StreamHandler()
        logger.addHandler(ours)
        logger.propagate = False
    chosen = env.colours_logging()
    colour = sys.stderr.isatty() if chosen is None else chosen
    ours.setFormatter(JSONLines(process) if log_format == "json" else TextLines(process, colour))
    if logger.level == logging.NOTSET:
        logger.setLevel(level)


def route(name: str, level: int | str = logging.INFO) -> None:
    """Send what the logger `name` of a library says through Octavo's handler, where Octavo has one."""
    ours = _our_handler()
    if ours is not None:
        other = logging.getLogger(name)
        other.handlers, other.propagate = [ours], False
        other.setLevel(level)


def _our_handler() -> logging.Handler | None:
    return next((h for h in logger.handlers if isinstance(h.formatter, TextLines | JSONLines)), None)
