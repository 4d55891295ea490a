"""Values that are written almost as JSON, Python's literals and Gemma's, turned into JSON as they come."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.text.tools.json_text import MAX_DEPTH, MAX_NUMBER, NUMBER
from octavo.text.tools.reader import Malformed, Reader, Sink, Wait

BARE = re.compile(r"[-+.\w]*")
CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "/": "/", "\n": ""}
# Strings without what takes a closer look, by their quotes
BULK = {quote: re.compile(rf"(?:[^{quote}\\]|\\[nrtbf\\'\"/])*+") for quote in ("'", '"')}
SIMPLE_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are written. A string ends with the mark that it began with."""

    quotes: tuple[str, ...]
    escapes: bool  # in strings, with a backslash
    closers: Mapping[str, str]
    words: Mapping[str, str] = field(
        default_factory=lambda: (
            {"True": "true", "False": "false", "None": "null"} | {word: word for word in ("true", "false", "null")}
        )
    )


PYTHON = Dialect(('"""', "'''", '"', "'"), True, {"{": "}", "[": "]", "(": ")"})
GEMMA = Dialect(('<|"|>', "<escape>", '"'), False, {"{": "}", "[": "]"})


def value(reader: Reader, dialect: Dialect, sink: Sink) -> Wait[None]:
    """Read one value; `sink` gets the pieces of its JSON. A comma before a closing bracket is left out.

    Raises:
        Malformed: it is no value of the dialect, or nested deeper than `MAX_DEPTH`.
    """
    open_: list[str] = []
    wants_key = may_close = False
    comma = ""
    while True:
        yield from reader.space()
        character = yield from reader.peek()
        if may_close and character == open_[-1]:
            reader.take(1)
            sink("}" if open_.pop() == "}" else "]")
        else:
            sink(comma)
            if wants_key:
                yield from _key(reader, dialect, sink)
                wants_key, may_close, comma = False, False, ""
                continue
            if character in dialect.closers:
                if len(open_) == MAX_DEPTH:
                    raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels")
                reader.take(1)
                sink("{" if character == "{" else "[")
                open_.append(dialect.closers[character])
                wants_key, may_close, comma = character == "{", True, ""
                continue
            yield from _scalar(reader, dialect, sink)
        while True:  # a value has ended
            if not open_:
                return
            yield from reader.space()
            character = yield from reader.next("its last bracket")
            if character == ",":
                comma = ","
                break
            if character != open_[-1]:
                raise Malformed(f"{character!r} stands where ',' or '{open_[-1]}' belongs")
            sink("}" if open_.pop() == "}" else "]")
        wants_key, may_close = open_[-1] == "}", True


def _key(reader: Reader, dialect: Dialect, sink: Sink) -> Wait[None]:
    if not (yield from string(reader, dialect, sink)):
        pieces: list[str] = []
        yield from reader.run(BARE, pieces.append)
        if not (text := "".join(pieces)):
            raise Malformed(f"{(yield from reader.peek())!r} stands where an object has a key")
        sink(json.dumps(text, ensure_ascii=False))
    yield from reader.space()
    if (found := (yield from reader.next("the ':' of a key"))) != ":":
        raise Malformed(f"{found!r} stands where ':' belongs")
    sink(":")


def _scalar(reader: Reader, dialect: Dialect, sink: Sink) -> Wait[None]:
    if (yield from string(reader, dialect, sink)):
        return
    pieces: list[str] = []
    yield from reader.run(BARE, pieces.append)
    text = "".join(pieces)
    if (word := dialect.words.get(text)) is not None:
        sink(word)
    elif len(text) <= MAX_NUMBER and NUMBER.fullmatch(text):
        sink(text)
    else:
        sink(_number(text or (yield from reader.peek())))


def _number(text: str) -> str:
    """JSON of a number that is written in another way, such as `.5` or `+3`."""
    try:
        number = float(text) if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?", text) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or len(text) > MAX_NUMBER:
        raise Malformed(f"{text[:40]!r} is no value")
    return str(int(text)) if re.fullmatch(r"[-+]?[0-9]+", text) else repr(number)


def string(reader: Reader, dialect: Dialect, sink: Sink) -> Wait[bool]:
    """Read a string if one comes next; `sink` gets it with the quotes and escapes of JSON."""
    quote = yield from reader.has_any(dialect.quotes)
    if not quote:
        return False

    def plain(text: str) -> None:
        sink(json.dumps(text, ensure_ascii=False)[1:-1])

    sink('"')
    bulk = BULK.get(quote) if dialect.escapes else None
    marks = (quote, "\\") if dialect.escapes else (quote,)
    while True:
        if bulk is not None:  # most of it at once
            yield from reader.run(bulk, lambda text: plain(SIMPLE_ESCAPE.sub(_unescaped, text)))
        mark = yield from reader.until(marks, plain)
        if not mark:
            raise Malformed("it ends before the end of a string")
        if mark == quote:
            sink('"')
            return True
        yield from _escape(reader, sink, plain)


def _unescaped(match: re.Match[str]) -> str:
    return ESCAPES.get(match[1], match[1])


def _escape(reader: Reader, sink: Sink, plain: Sink) -> Wait[None]:
    letter = yield from reader.next("the end of an escape")
    if letter not in CODE_LENGTHS:
        plain(ESCAPES.get(letter, letter if letter in "\\'\"" else "\\" + letter))
        return
    digits = ""
    for _ in range(CODE_LENGTHS[letter]):
        digits += yield from reader.next("the end of an escape")
    if not re.fullmatch("[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
        raise Malformed(f"\\{letter}{digits} is no escape")
    code = int(digits, 16)
    if 0xD800 <= code <= 0xDFFF:  # half of a pair: JSON's readers put it together with the other half
        sink(f"\\u{code:04x}")
    else:
        plain(chr(code))
