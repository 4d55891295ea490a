"""Calls of tools as models write them: a generator for each kind of body, which tells of a call as it comes."""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from octavo.text.tools import json_text, literals
from octavo.text.tools.formats import ToolFormat
from octavo.text.tools.reader import Malformed, Reader, Wait
from octavo.text.tools.typed import typed

MAX_NAME = 256  # characters
NAME = re.compile(r"[\w.:/-]*")
NAME_AND_NUMBER = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")  # functions.NAME:0
ARGUMENTS = ("arguments", "parameters", "args")
FENCE = re.compile(r"```(?:json)?")

Properties = Mapping[str, Mapping[str, Any]]  # of each tool, by its name: schemas of the arguments


class Caller(Protocol):
    """Is told of each call: `begin`, its `arguments` in pieces that make JSON, `done`."""

    def begin(self, name: str) -> None: ...
    def arguments(self, text: str) -> None: ...
    def done(self) -> None: ...


def calls(reader: Reader, caller: Caller, form: ToolFormat, properties: Properties, mark: str = "") -> Wait[None]:
    """Read what follows `mark`, one of the format's begin marks, up to its end mark, which may be missing.

    Raises:
        Malformed: it is no call; those told of as done are good.
    """
    yield from reader.space()
    if form.body == "json":
        yield from _json_calls(reader, caller, form)
    elif form.body == "named json":
        yield from _named_json_call(reader, caller, form)
    elif form.body == "xml":
        yield from _xml_call(reader, caller, properties, mark)
    elif form.body == "gemma":
        yield from _gemma_call(reader, caller)
    else:
        yield from _python_calls(reader, caller)
    if form.end:
        yield from reader.space()
        yield from reader.has_any(form.end)


def _json_calls(reader: Reader, caller: Caller, form: ToolFormat) -> Wait[None]:
    """An object, several with semicolons between, a list of objects, or NAME[ARGS]object."""
    character = yield from reader.peek()
    if character == "{":
        yield from _json_call(reader, caller)
        while form.bare and (yield from _separated(reader)):
            yield from _json_call(reader, caller)
    elif character == "[":
        reader.take(1)
        while True:
            yield from reader.space()
            yield from _json_call(reader, caller)
            yield from reader.space()
            if (found := (yield from reader.next("the end of the list of calls"))) == "]":
                return
            if found != ",":
                raise Malformed(f"{found!r} stands where ',' or ']' belongs")
    elif form.separator:
        yield from _named_json_call(reader, caller, form)
    else:
        raise Malformed(f"{character!r} stands where a call begins" if character else "it ends before a call")


def _separated(reader: Reader) -> Wait[bool]:
    yield from reader.space()
    if not (yield from reader.has(";")):
        return False
    yield from reader.space()
    return bool((yield from reader.peek()))


class _Members:
    """What of a call's object has been read."""

    def __init__(self) -> None:
        self.name = ""
        self.held: str | None = None  # arguments that came before the name
        self.has_arguments = False


def _json_call(reader: Reader, caller: Caller) -> Wait[None]:
    """{"name": ..., "arguments": {...}}, in any order and among other members."""
    found = _Members()
    yield from _members(reader, caller, found, 0)
    if not found.name:
        raise Malformed("it names no function")
    if not found.has_arguments:
        caller.arguments("{}")
    caller.done()


def _members(reader: Reader, caller: Caller, found: _Members, depth: int) -> Wait[None]:
    if (character := (yield from reader.next("a call"))) != "{":
        raise Malformed(f"{character!r} stands where a call begins")
    yield from reader.space()
    if (yield from reader.has("}")):
        return
    while True:
        if (yield from reader.peek()) != '"':
            raise Malformed("a key is missing")
        key = yield from _collected(reader)
        yield from reader.space()
        if (character := (yield from reader.next("a value"))) != ":":
            raise Malformed(f"{character!r} stands where ':' belongs")
        yield from reader.space()
        if key == "name":
            _name(caller, found, (yield from _collected(reader)))
        elif key in ARGUMENTS:
            yield from _arguments(reader, caller, found)
        elif key == "function" and depth == 0 and (yield from reader.peek()) == "{":
            yield from _members(reader, caller, found, 1)
        elif key == "function":  # some write the name so
            _name(caller, found, (yield from _collected(reader)))
        else:
            yield from _collected(reader)
        yield from reader.space()
        if (character := (yield from reader.next("the end of a call"))) == "}":
            return
        if character != ",":
            raise Malformed(f"{character!r} stands where ',' or '}}' belongs")
        yield from reader.space()


def _name(caller: Caller, found: _Members, name: object) -> None:
    if found.name or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise Malformed("its name is not one string")
    found.name = name
    caller.begin(name)
    if found.held is not None:
        caller.arguments(found.held)


def _arguments(reader: Reader, caller: Caller, found: _Members) -> Wait[None]:
    if found.has_arguments:
        raise Malformed("it has arguments twice")
    found.has_arguments = True
    if (yield from reader.peek()) == "{" and found.name:
        yield from json_text.value(reader, caller.arguments)
        return
    pieces: list[str] = []
    yield from json_text.value(reader, pieces.append)
    text = "".join(pieces)
    value = _loads(text)
    if isinstance(value, str):  # JSON inside of JSON
        text = value.strip()
        value = _loads(text)
    if value is None:
        text = "{}"
    elif not isinstance(value, dict):
        raise Malformed("its arguments are no object")
    if found.name:
        caller.arguments(text)
    else:
        found.held = text


def _named_json_call(reader: Reader, caller: Caller, form: ToolFormat) -> Wait[None]:
    """NAME, with other things around that the format's separator tells apart, then the arguments."""
    head = ""
    while (character := (yield from reader.peek())) != "{":
        if not character or len(head) > 2 * MAX_NAME:
            raise Malformed("its name is not followed by arguments")
        head += reader.take(1)
    parts = [FENCE.sub("", part).strip() for part in head.split(form.separator)]
    given = next((part for part in reversed(parts) if part), "").partition("[CALL_ID]")[0]
    match = NAME_AND_NUMBER.fullmatch(given)
    if match is None or not NAME.fullmatch(match[1]):
        raise Malformed(f"{given[:40]!r} is no name of a function")
    caller.begin(match[1])
    yield from json_text.value(reader, caller.arguments)
    caller.done()
    if "```" in head:
        yield from reader.space()
        yield from reader.has("```")


def _xml_call(reader: Reader, caller: Caller, properties: Properties, mark: str) -> Wait[None]:
    """<function=NAME><parameter=KEY>value</parameter>...</function>; the tool's schema tells strings from others."""
    if mark != "<function=" and not (yield from reader.has("<function=")):
        if (yield from reader.peek()) == "{":
            yield from _json_call(reader, caller)
            return
        raise Malformed("no function follows the mark")
    name = yield from _tag(reader)
    schemas = properties.get(name, {})
    caller.begin(name)
    caller.arguments("{")
    keys: set[str] = set()
    while True:
        yield from reader.space()
        found = yield from reader.has_any(("<parameter=", "</function>"))
        if not found:
            raise Malformed("something else than a parameter stands in it")
        if found == "</function>":
            break
        key = yield from _tag(reader)
        if key in keys:
            raise Malformed(f"it has the argument {key[:40]!r} twice")
        pieces: list[str] = []
        if not (yield from reader.until(("</parameter>",), pieces.append)):
            raise Malformed("it ends inside a parameter")
        text = "".join(pieces).removeprefix("\n").removesuffix("\n")
        caller.arguments(f"{', ' if keys else ''}{_dumps(key)}: {typed(text, schemas.get(key))}")
        keys.add(key)
    caller.arguments("}")
    caller.done()


def _tag(reader: Reader) -> Wait[str]:
    """The rest of a tag, which is a name."""
    name = ""
    while (character := (yield from reader.next("the end of a tag"))) != ">":
        name += character
        if len(name) > MAX_NAME:
            raise Malformed("a name in it is too long")
    if not (name := name.strip()):
        raise Malformed("a name in it is empty")
    return name


def _gemma_call(reader: Reader, caller: Caller) -> Wait[None]:
    """call:NAME{key:<|"|>text<|"|>,other:1}"""
    if not (yield from reader.has("call:")):
        raise Malformed("'call:' is missing")
    name = yield from _word(reader)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed("its arguments are missing")
    caller.begin(name)
    yield from literals.value(reader, literals.GEMMA, caller.arguments)
    caller.done()


def _python_calls(reader: Reader, caller: Caller) -> Wait[None]:
    """[name(key=value, ...), ...], or one call without the brackets."""
    if not (yield from reader.has("[")):
        yield from _python_call(reader, caller)
        return
    while True:
        yield from reader.space()
        yield from _python_call(reader, caller)
        yield from reader.space()
        if (found := (yield from reader.next("the end of the list of calls"))) == "]":
            return
        if found != ",":
            raise Malformed(f"{found!r} stands where ',' or ']' belongs")


def _python_call(reader: Reader, caller: Caller) -> Wait[None]:
    name = yield from _word(reader)
    if not (yield from reader.has("(")):
        raise Malformed("no '(' follows the name")
    caller.begin(name)
    caller.arguments("{")
    keys: set[str] = set()
    yield from reader.space()
    while not (yield from reader.has(")")):
        key = yield from _word(reader)
        yield from reader.space()
        if not (yield from reader.has("=")) or key in keys:
            raise Malformed(f"{key[:40]!r} is not the name of one argument")
        caller.arguments(f"{', ' if keys else ''}{_dumps(key)}: ")
        keys.add(key)
        yield from reader.space()
        yield from literals.value(reader, literals.PYTHON, caller.arguments)
        yield from reader.space()
        if (yield from reader.has(",")):
            yield from reader.space()
        elif (yield from reader.peek()) != ")":
            raise Malformed("neither ',' nor ')' follows an argument")
    caller.arguments("}")
    caller.done()


def _word(reader: Reader) -> Wait[str]:
    pieces: list[str] = []
    yield from reader.run(NAME, pieces.append)
    if not 0 < len(word := "".join(pieces)) <= MAX_NAME:
        raise Malformed("a name is missing or too long")
    return word


def _collected(reader: Reader) -> Wait[Any]:
    pieces: list[str] = []
    yield from json_text.value(reader, pieces.append)
    return _loads("".join(pieces))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("its arguments are no JSON") from None


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
