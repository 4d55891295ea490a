"""Arguments that come as bare text, as XML-like calls have them, given the type that the tool's schema says."""

import json
from collections.abc import Mapping
from typing import Any

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def typed(text: str, schema: object) -> str:
    """The argument as JSON. It is a string unless the schema allows another type that the text is a value of.

    Numbers keep the way in which they are written. A string stays one where the schema allows strings and names
    the text among its values, or allows nothing else that fits.
    """
    types = schema_types(schema)
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if not (isinstance(values, list) and text in values):
        bare = text.strip()
        candidate = PYTHON_WORDS.get(bare, bare)
        try:
            value = json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            if any(_is(value, name) for name in types):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def schema_types(schema: object, depth: int = 0) -> frozenset[str]:
    """Names of the types that a schema allows, as far as it says; empty when it does not."""
    if not isinstance(schema, Mapping) or depth > 4:
        return frozenset()
    given: Any = schema.get("type")
    names = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            names |= schema_types(choice, depth + 1)
    if schema.get("nullable") is True:
        names.add("null")
    return frozenset(names)


def _is(value: object, name: str) -> bool:
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(name, ())) and (name == "boolean" or not isinstance(value, bool))


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON
