"""The tools of a request and which of them it wants called: checked, and as the schema of what may be written."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import InvalidRequest, shown
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.tools.formats import ToolFormat
from octavo.types import SamplingParams

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MODES = ("none", "auto", "required")
Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is of the one function that "named" wants."""

    mode: Mode
    name: str = ""


def check_tools(tools: Sequence[Mapping[str, Any]] | None, choice: object) -> ToolChoice:
    """
    Raises:
        InvalidRequest: a tool or choice of the wrong shape, or a choice that is not among the tools.
    """
    if tools is not None and not tools:
        raise InvalidRequest("tools must not be an empty list: leave it out.", param="tools")
    names = [_name(f"tools[{place}]", tool) for place, tool in enumerate(tools or ())]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools has two functions named {shown(twice)}.", param="tools")
    wanted = _wanted(choice)
    if (not names and wanted.mode in ("required", "named")) or (not names and choice == "auto"):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if wanted.mode == "named" and wanted.name not in names:
        raise InvalidRequest(
            f"tool_choice names {shown(wanted.name)}, which is not among the tools.", param="tool_choice"
        )
    return wanted if names else ToolChoice("none")


def _wanted(choice: object) -> ToolChoice:
    if choice is None:
        return ToolChoice("auto")
    if isinstance(choice, str) and choice in MODES:
        return ToolChoice(choice)  # type: ignore[arg-type]
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return ToolChoice("named", name)
    raise InvalidRequest(
        f"tool_choice={shown(choice)} is not allowed: it must be none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}.',
        param="tool_choice",
    )


def _name(where: str, tool: Mapping[str, Any]) -> str:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{where}.type={shown(tool.get('type'))} is not available: only 'function' is.", param="tools"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function must be an object with name and parameters.", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name={shown(name)} is not allowed: it must be 1 to 128 letters, digits or any of _.:/-",
            param="tools",
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema, an object.", param="tools")
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{where}.function.description must be a string.", param="tools")
    return name


def constrained(
    params: SamplingParams,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ToolFormat | None,
    parallel: bool,
) -> SamplingParams:
    """The parameters with what the choice, or the strictness of a tool, makes of the answer's form.

    A wanted call is written as JSON without the model's own marks. With "auto" the arguments of strict tools follow
    their schemas where the marks of the model's format are text, which a grammar can tell from free text.

    Raises:
        InvalidRequest: a schema that cannot be obeyed.
    """
    if choice.mode in ("required", "named"):
        return _structured(params, {"json": calls_schema(tools, choice, parallel)})
    strict = any(tool["function"].get("strict") is True for tool in tools)
    if choice.mode == "none" or not strict or form is None or form.frame is None:
        return params
    if params.structured_outputs is not None:  # the answer has a form already
        return params
    begin, end = form.frame
    structures = [
        {
            "begin": begin.replace("NAME", function["name"]),
            "schema": _arguments(function) if function.get("strict") is True else {"type": "object"},
            "end": end,
        }
        for function in (tool["function"] for tool in tools)
    ]
    return _structured(params, {"structural_tag": {"structures": structures, "triggers": [form.begin[0]]}})


def _structured(params: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """Errors in a schema are errors of the tools that brought it."""
    try:
        return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(**given))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, error.hint, "tools") from None


def calls_schema(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> dict[str, Any]:
    """The JSON schema of what a model must write: one function's arguments, or a list of calls."""
    functions = [tool["function"] for tool in tools]
    if choice.mode == "named":
        return _arguments(next(function for function in functions if function["name"] == choice.name))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": _arguments(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    return schema if parallel else {**schema, "maxItems": 1}


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or {})}
