"""Structured output as requests ask for it: OpenAI's `response_format`, vLLM's `structured_outputs`, older fields."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.grammar import source
from octavo.structured_outputs import FIELD, KINDS, StructuredOutputsParams

OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
FIELDS = (*OLDER, "response_format")
DESCRIPTIONS = {name: f"The older name of {FIELD}.{kind}." for name, kind in OLDER.items()} | {
    "response_format": "text, json_object, json_schema or structural_tag, as OpenAI's."
}
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
NOT_ENFORCED = "x-octavo-not-enforced"
NOTICE = "x-octavo-notice"


def structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What a body's fields ask for, in whichever of the three ways.

    Raises:
        InvalidRequest: two ways or two kinds at once, an unknown format, or what `StructuredOutputsParams` refuses.
    """
    if FIELD in given and isinstance(given[FIELD], Mapping):
        found = {name: value for name, value in given[FIELD].items() if value is not None}
    elif given.get(FIELD) is None:
        found = {}
    else:
        return StructuredOutputsParams.of(given[FIELD])
    origin = dict.fromkeys(found, FIELD)
    older = {OLDER[name]: (name, given[name]) for name in OLDER if given.get(name) is not None}
    for name, (field, value) in [*older.items(), *_of_format(given.get("response_format")).items()]:
        other = name if name in found else next((kind for kind in KINDS if kind in found and name in KINDS), "")
        if other:
            raise InvalidRequest(f"{field} and {origin[other]} are both given: one answer has one form.", param=field)
        found[name], origin[name] = value, field
    if not found:
        return None
    try:
        return StructuredOutputsParams.of(found)
    except InvalidRequest as error:
        field = next((origin[kind] for kind in KINDS if kind in found and origin[kind] != FIELD), "")
        raise InvalidRequest(error.message, error.hint, field or error.param) from None


def _of_format(value: object) -> dict[str, tuple[str, Any]]:
    """`response_format` as the kind that it means, with its own name."""
    if value is None:
        return {}
    field = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in FORMATS:
        raise InvalidRequest(
            f"{field}={shown(value)} is not allowed: its type must be one of {', '.join(FORMATS)}.", param=field
        )
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": (field, True)}
    if kind == "structural_tag":
        return {"structural_tag": (field, {name: part for name, part in value.items() if name != "type"})}
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise InvalidRequest(
            f"{field}.json_schema must be an object with a name and a schema, not {shown(inner)}.", param=field
        )
    if not isinstance(inner["schema"], Mapping):
        raise InvalidRequest(
            f"{field}.json_schema.schema must be an object, not {shown(inner['schema'])}.", param=field
        )
    return {"json": (field, inner["schema"])}


def notices(given: Mapping[str, Any], params: StructuredOutputsParams | None) -> dict[str, str]:
    """Headers that tell what was read under another name, and which keywords of a lenient request are not enforced."""
    headers = {}
    if used := [name for name in OLDER if given.get(name) is not None]:
        headers[NOTICE] = "; ".join(f"{name} is read as {FIELD}.{OLDER[name]}" for name in used)
    if params is not None and params.lenient and (names := source.not_enforced(params)):
        headers[NOT_ENFORCED] = ", ".join(names)
    return headers
