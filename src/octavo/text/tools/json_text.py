"""JSON read as it comes: each piece is passed on as soon as it is known to belong to a valid value."""

import re

from octavo.text.tools.reader import SPACE, Malformed, Reader, Sink, Wait

MAX_DEPTH = 200  # of lists and objects in one another: readers of the arguments recurse
MAX_NUMBER = 1000  # characters
PLAIN = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*+')  # with whole escapes
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
WORD = re.compile(r"[a-zA-Z]*")
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
CLOSERS = {"{": "}", "[": "]"}


def value(reader: Reader, sink: Sink) -> Wait[None]:
    """Read one JSON value; `sink` gets its text as written, without whitespace around it.

    A line break or tab inside a string, which JSON forbids and models write, is passed on escaped.

    Raises:
        Malformed: the text is not JSON, or nested deeper than `MAX_DEPTH`.
    """
    open_: list[str] = []  # what closes each list and object that is open
    wants = "value"  # or "key", and "first value" and "first key" where the list or object may close at once
    while True:
        character = yield from _next(reader, sink if open_ else None)
        if character in "]}" and wants.startswith("first") and character == open_[-1]:
            sink(reader.take(1))
            open_.pop()
        elif wants.endswith("key"):
            if character != '"':
                raise Malformed(f"{character!r} stands where an object has a key")
            yield from string(reader, sink)
            if (yield from _next(reader, sink)) != ":":
                raise Malformed(f"{reader.text[reader.at]!r} stands where ':' belongs")
            sink(reader.take(1))
            wants = "value"
            continue
        elif character == '"':
            yield from string(reader, sink)
        elif character in CLOSERS:
            if len(open_) == MAX_DEPTH:
                raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels")
            sink(reader.take(1))
            open_.append(CLOSERS[character])
            wants = "first key" if character == "{" else "first value"
            continue
        else:
            yield from _scalar(reader, sink)
        while True:  # a value has ended
            if not open_:
                return
            character = yield from _next(reader, sink)
            if character not in (",", open_[-1]):
                raise Malformed(f"{character!r} stands where ',' or '{open_[-1]}' belongs")
            sink(reader.take(1))
            if character == ",":
                break
            open_.pop()
        wants = "key" if open_[-1] == "}" else "value"


def string(reader: Reader, sink: Sink) -> Wait[None]:
    """Read a JSON string with its quotes.

    Raises:
        Malformed: it ends too early, or has an escape that JSON lacks.
    """
    sink(reader.take(1))
    while True:
        yield from reader.run(PLAIN, sink)
        character = yield from reader.next("the end of a string")
        if character == '"':
            sink(character)
            return
        if character != "\\":
            sink(ESCAPES.get(character) or f"\\u{ord(character):04x}")
            continue
        escape = yield from reader.next("the end of an escape")
        if escape == "u":
            for _ in range(4):
                digit = yield from reader.next("the end of an escape")
                if digit not in "0123456789abcdefABCDEF":
                    raise Malformed(f"\\u{digit} is no escape of JSON")
                escape += digit
        elif escape not in '"\\/bfnrt':
            raise Malformed(f"\\{escape} is no escape of JSON")
        sink("\\" + escape)


def _next(reader: Reader, sink: Sink | None) -> Wait[str]:
    """The next character behind whitespace, not read."""
    while True:
        character = yield from reader.peek()
        if not character:
            raise Malformed("it ends too early")
        if character not in SPACE:
            return character
        space = reader.take(1)
        if sink is not None:
            sink(space)


def _scalar(reader: Reader, sink: Sink) -> Wait[None]:
    first = yield from reader.peek()
    pieces: list[str] = []
    is_number = first in "-0123456789"
    yield from reader.run(NUMBER_CHARACTERS if is_number else WORD, pieces.append)
    text = "".join(pieces)
    if is_number and (len(text) > MAX_NUMBER or not NUMBER.fullmatch(text)):
        raise Malformed(f"{text[:40]!r} is no number of JSON")
    if not is_number and text not in ("true", "false", "null"):
        raise Malformed(f"{(text or first)[:40]!r} is no value of JSON")
    sink(text)
