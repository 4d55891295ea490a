"""Text that comes in pieces, read by generators: each waits where what it needs has not come yet."""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Sink = Callable[[str], None]

SPACE = " \t\r\n"


@lru_cache(maxsize=256)
def _search(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int, frozenset[str]]:
    """A pattern that finds any of the marks, the length of the longest, and their first characters."""
    pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    return re.compile(pattern), max(map(len, marks), default=0), frozenset(mark[0] for mark in marks)


class Malformed(Exception):
    """The text is not what its format asks for; the message says how."""


class Reader:
    """The text that is still to be read.

    A generator that reads yields as often as it needs more; whoever drives it calls `feed`, or sets `ended`, before
    each resumption. `taken` keeps what was read since `remember`, so that a misread call can be given back as text.
    Every piece is looked at once, so that time grows with the length of the text only.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.taken: list[str] = []
        self.remembers = False

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def remember(self) -> None:
        self.taken, self.remembers = [], True

    def take(self, length: int) -> str:
        """The next `length` characters, which must be there."""
        piece = self.text[self.at : self.at + length]
        self.at += length
        if self.remembers:
            self.taken.append(piece)
        return piece

    def peek(self) -> Wait[str]:
        """The next character, or "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def next(self, what: str) -> Wait[str]:
        """Read one character.

        Raises:
            Malformed: the text ends; `what` says what was expected.
        """
        if not (yield from self.peek()):
            raise Malformed(f"it ends before {what}")
        return self.take(1)

    def has(self, mark: str) -> Wait[bool]:
        """Read `mark` if that is what comes next."""
        while True:
            if self.text.startswith(mark, self.at):
                self.take(len(mark))
                return True
            if self.ended or not mark.startswith(self.text[self.at : self.at + len(mark)]):
                return False
            yield

    def has_any(self, marks: tuple[str, ...]) -> Wait[str]:
        """Read the one of `marks` that comes next, and tell which; "" if none does."""
        for mark in marks:
            if (yield from self.has(mark)):
                return mark
        return ""

    def space(self) -> Wait[str]:
        """Read whitespace, if any."""
        found = []
        while (character := (yield from self.peek())) and character in SPACE:
            found.append(self.take(1))
        return "".join(found)

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Wait[None]:
        """Read as much as `pattern` takes, which must take the same of a text however it is cut in two."""
        while (yield from self.peek()):
            match = pattern.match(self.text, self.at)
            if match is None or match.end() == self.at:
                return
            sink(self.take(match.end() - self.at))

    def until(self, marks: tuple[str, ...], sink: Sink) -> Wait[str]:
        """Read up to the first of `marks` and past it, and tell which; "" at the end.

        What comes before goes to `sink` as soon as it cannot be the beginning of a mark.
        """
        pattern, longest, firsts = _search(marks)
        while True:
            match = pattern.search(self.text, self.at) if marks else None
            if match is not None:
                if match.start() > self.at:
                    sink(self.take(match.start() - self.at))
                return self.take(len(match[0]))
            safe = len(self.text) if self.ended else self._open_end(marks, longest, firsts)
            if safe > self.at:
                sink(self.take(safe - self.at))
            if self.ended:
                return ""
            yield

    def _open_end(self, marks: tuple[str, ...], longest: int, firsts: frozenset[str]) -> int:
        """Where the end of the text begins that may be the beginning of a mark."""
        for start in range(max(self.at, len(self.text) - longest + 1), len(self.text)):
            if self.text[start] in firsts:
                end = self.text[start:]
                if any(mark.startswith(end) for mark in marks):
                    return start
        return len(self.text)
