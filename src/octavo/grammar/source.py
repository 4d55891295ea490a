"""What a request asks for, written as the grammar that llguidance compiles."""

import json
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.grammar import lark, schema
from octavo.grammar.base import name_of
from octavo.structured_outputs import FIELD, StructuredOutputsParams

WHITESPACE = r"[ \n\r\t]{1,20}"  # between the parts of JSON: bounded, so that no model goes on with it for ever
MAX_ALTERNATIVES = 50_000


def check(params: StructuredOutputsParams) -> None:
    """What can be told without a tokenizer.

    Raises:
        InvalidRequest: it cannot be followed; the message names the field and says why.
    """
    name = name_of(params)
    if params.kind == "json":
        schema.check(name, schema.read(name, params.text), params.lenient)
    elif params.kind == "structural_tag":
        for tag in _tags(params):
            schema.check(name, tag["schema"], params.lenient)
    elif params.kind == "grammar":
        if why := lark.trouble(_lark_of(params)):
            raise _refuse(params, why)
    elif params.kind == "choice" and len(params.choice or ()) > MAX_ALTERNATIVES:
        raise _refuse(params, f"{len(params.choice or ())} choices are given, and {MAX_ALTERNATIVES} are allowed")


def not_enforced(params: StructuredOutputsParams) -> list[str]:
    """Keywords that a lenient request gives and that its answer need not follow."""
    if params.kind == "json":
        return schema.unenforced(schema.read(name_of(params), params.text))
    if params.kind == "structural_tag":
        return sorted({keyword for tag in _tags(params) for keyword in schema.unenforced(tag["schema"])})
    return []


def grammar_text(params: StructuredOutputsParams) -> str:
    """The same in the words of llguidance.

    Raises:
        InvalidRequest: as `check`.
    """
    from llguidance import LLMatcher

    check(params)
    match params.kind:
        case "json":
            value = schema.read(name_of(params), params.text)
            return _of_schema(params, value)
        case "json_object":
            return _of_schema(params, {"type": "object"})
        case "regex":
            return str(LLMatcher.grammar_from_regex(params.text))
        case "choice":
            choices = " | ".join(_literal(choice) for choice in params.choice or ())
            return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
        case "grammar":
            return str(LLMatcher.grammar_from_lark(_lark_of(params)))
        case "structural_tag":
            return _of_tags(params)


def _of_schema(params: StructuredOutputsParams, value: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    value.pop("x-guidance", None)  # options of the library, which are ours to choose
    if params.disable_additional_properties:
        schema.close_objects(value)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=_options(params)))  # type: ignore[arg-type]


def _options(params: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {"lenient": params.lenient, "coerce_one_of": params.lenient}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    return options


def _lark_of(params: StructuredOutputsParams) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "::=" not in params.text:
        return params.text
    try:
        return str(gbnf_to_lark(params.text))
    except Exception as error:  # the converter raises several kinds
        raise _refuse(params, f"it is not a grammar in GBNF's notation ({shown(str(error), 200)})") from None


def _tags(params: StructuredOutputsParams) -> list[dict[str, Any]]:
    """Each with its `trigger`, `begin`, `schema` and `end`."""
    name = name_of(params)
    value = schema.read(name, params.text)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise _refuse(params, "it needs the lists 'structures' and 'triggers', with at least one item each")
    tags = []
    for place, tag in enumerate(structures):
        if (
            not isinstance(tag, dict)
            or not isinstance(tag.get("begin"), str)
            or not isinstance(tag.get("schema"), dict)
        ):
            raise _refuse(params, f"structures[{place}] needs 'begin' (text), 'schema' (an object) and 'end' (text)")
        begin, end = tag["begin"], tag.get("end", "")
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None or not isinstance(end, str):
            raise _refuse(params, f"structures[{place}]: no trigger is the beginning of {shown(begin)}")
        tags.append({"trigger": trigger, "begin": begin, "schema": tag["schema"], "end": end})
    return tags


def _of_tags(params: StructuredOutputsParams) -> str:
    """Free text; where a trigger stands in it, one of that trigger's tags has to follow."""
    from llguidance import LLMatcher

    tags = _tags(params)
    lines = ["%llguidance {}"]
    triggers = list(dict.fromkeys(tag["trigger"] for tag in tags))
    lines.append(f"start: ({' | '.join(f'tags_{i}' for i in range(len(triggers)))})* TEXT")
    lines.append(r"TEXT: /(.|\n)*/")
    for i, trigger in enumerate(triggers):
        bodies = []
        for tag in tags:
            if tag["trigger"] == trigger:
                value = dict(tag["schema"])
                if params.disable_additional_properties:
                    schema.close_objects(value)
                value["x-guidance"] = _options(params)
                rest = tag["begin"][len(trigger) :]
                parts = [_literal(rest) if rest else "", f"%json {json.dumps(value)}", _literal(tag["end"])]
                bodies.append(" ".join(parts if tag["end"] else parts[:2]))
        lines.append(f"trigger_{i}[lazy]: TEXT {_literal(trigger)}")
        lines.append(f"tags_{i}: trigger_{i} ({' | '.join(bodies)})")
    return str(LLMatcher.grammar_from_lark("\n".join(lines)))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(params: StructuredOutputsParams, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name_of(params)}: {why}.", param=FIELD)
