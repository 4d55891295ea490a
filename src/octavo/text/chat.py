"""Chat messages to a prompt, through the model's Jinja template in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidConfig, InvalidRequest
from octavo.text.tokenizer import SPECIAL_ROLES, Tokenizer

MAX_RENDERED_CHARACTERS = 16 << 20  # above the longest context there is
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
CONTINUE_MARK = "continue-here-2f9c "  # the space tells whether the template trims the message
PROBE = "probe-7d31"


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt of a chat. It holds the special tokens already: encode it with `add_special_tokens=False`.

    `chat_template` is a Jinja source or the name of one of the model's templates. `kwargs` are variables
    of the template (`enable_thinking=False`). `continue_final_message` leaves the last message open, and
    needs `add_generation_prompt=False`.

    Raises:
        InvalidRequest: a message that is malformed or that the template refuses, or no template.
    """
    for name, value in (("tools", tools), ("documents", documents)):
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value)):
            raise _refuse(name, "must be a list of objects")
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message=True and add_generation_prompt=True contradict each other.",
            "Set add_generation_prompt to false to continue the last message.",
            param="continue_final_message",
        )
    template = _compile(_choose(tokenizer, chat_template, tools))
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a list with at least one message.", param="messages")
    prepared = [_message(f"messages[{i}]", message, template) for i, message in enumerate(messages)]
    if continue_final_message:
        prepared[-1]["content"] = _mark(prepared[-1]["content"])
    text = template.render(
        {
            **tokenizer.special_tokens,
            **kwargs,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    return _cut_at_mark(text) if continue_final_message else text


def variables(
    tokenizer: Tokenizer, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
) -> frozenset[str]:
    """Names that the template reads, of those that a request may set; arguments are those of `render`."""
    return _compile(_choose(tokenizer, chat_template, tools)).variables


def source(tokenizer: Tokenizer, chat_template: str | None = None, tools: object = None) -> str:
    """The Jinja source that `render` uses for these arguments."""
    return _choose(tokenizer, chat_template, tools)


def main_template(tokenizer: Tokenizer) -> str:
    """The source of the model's template that knows most: the one for tools, if it has one; "" without templates."""
    named = tokenizer.chat_templates
    return named.get("tool_use") or named.get("default") or next(iter(named.values()), "")


def read_template(value: str) -> str:
    """The Jinja source that `--chat-template` means: a file's text, or the value itself if it is a source.

    Raises:
        InvalidConfig: a file that cannot be read, neither a file nor a source, or not valid Jinja.
    """
    source = value
    if "{" not in value and "\n" not in value:
        try:
            source = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(
                f"The chat template {value!r} cannot be read: {error}.", "Give a .jinja file or the template itself."
            ) from None
    try:
        _compile(source)
    except InvalidRequest as error:
        raise InvalidConfig(f"--chat-template: {error.message}") from None
    return source


class _Template:
    """A compiled template, and the shape of message content it was written for.

    Text of one part is rendered both ways to find out: a template that reads lists of parts gives the same
    for a string and for a list of one, or takes lists only.
    """

    def __init__(self, source: str) -> None:
        try:
            self._compiled = _environment().from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(_environment().parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"The chat template is not valid Jinja: {error.message} (line {error.lineno}).", param="chat_template"
            ) from None
        except Exception as error:  # nested deeper than a compiler can go
            raise InvalidRequest(f"The chat template cannot be compiled: {error}.", param="chat_template") from None
        plain, listed = self._probe(PROBE), self._probe([{"type": "text", "text": PROBE}])
        self.takes_strings = PROBE in plain or PROBE not in listed
        self.takes_parts = PROBE in listed and (plain == listed or not self.takes_strings)

    def render(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        try:
            for part in self._compiled.generate(variables):
                length += len(part)
                if length > MAX_RENDERED_CHARACTERS:
                    break
                parts.append(part)
        except jinja2.TemplateError as error:
            reason = str(error).rstrip(".")
            raise InvalidRequest(f"The chat template refuses these messages: {reason}.", param="messages") from None
        except Exception as error:  # a template is a program: it can raise anything
            kind = type(error).__name__
            raise InvalidRequest(
                f"The chat template fails on these messages: {kind}: {error}.", param="messages"
            ) from None
        if length > MAX_RENDERED_CHARACTERS:
            raise InvalidRequest(
                f"The chat template wrote more than {MAX_RENDERED_CHARACTERS} characters.", param="messages"
            )
        return "".join(parts)

    def _probe(self, content: Any) -> str:
        variables = dict.fromkeys(SPECIAL_ROLES, "") | {"messages": [{"role": "user", "content": content}]}
        try:
            return self.render(variables)
        except InvalidRequest:
            return ""


@lru_cache(maxsize=16)
def _compile(source: str) -> _Template:
    return _Template(source)


def _choose(tokenizer: Tokenizer, chat_template: str | None, tools: object) -> str:
    named = tokenizer.chat_templates
    if chat_template is not None:
        if not isinstance(chat_template, str):
            raise _refuse("chat_template", f"must be a string, not {type(chat_template).__name__}")
        return named.get(chat_template, chat_template)
    if tools and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise InvalidRequest(
            f"This model has several chat templates and no default: {', '.join(sorted(named))}.",
            "Name one of them as chat_template.",
            param="chat_template",
        )
    raise InvalidRequest(
        "This model has no chat template, so it cannot take messages.",
        "Send a plain prompt (LLM.generate, /v1/completions), or give a template with --chat-template FILE.",
        param="messages",
    )


def _message(where: str, message: object, template: _Template) -> dict[str, Any]:
    """A message as templates expect it: nulls left out, content of the right shape, tool arguments as objects."""
    if not isinstance(message, Mapping):
        raise _refuse(where, f"must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refuse(f"{where}.role", f"must be a non-empty string, not {role!r}")
    prepared = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = _content(f"{where}.content", role, message.get("content"), template)
    if "reasoning" in prepared:  # two names are in use, and templates read the longer one
        prepared.setdefault("reasoning_content", prepared["reasoning"])
    if "tool_calls" in prepared:
        calls = prepared["tool_calls"]
        if not isinstance(calls, list | tuple):
            raise _refuse(f"{where}.tool_calls", f"must be a list, not {type(calls).__name__}")
        prepared["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return prepared


def _content(where: str, role: str, content: object, template: _Template) -> str | list[dict[str, str]]:
    if content is None and role == "assistant":  # the usual form of a message that only calls tools
        content = ""
    if isinstance(content, str):
        return content if template.takes_strings else [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise _refuse(where, f"must be a string or a list of text parts, not {type(content).__name__}")
    if not content:
        raise _refuse(where, "must not be an empty list")
    texts = [_part_text(f"{where}[{i}]", part) for i, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if template.takes_parts else "\n".join(texts)


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refuse(where, f"must be an object with type and text, not {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise _refuse(f"{where}.type", f"must be 'text', not {kind!r}: only text is read")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _refuse(f"{where}.{TEXT_PARTS[kind]}", f"must be a string, not {type(text).__name__}")
    return text


def _tool_call(where: str, call: object) -> dict[str, Any]:
    """A call with its arguments as an object: requests carry them as JSON text, and templates write them out."""
    if not isinstance(call, Mapping):
        raise _refuse(where, f"must be an object, not {type(call).__name__}")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise _refuse(f"{where}.function.arguments", f"must be JSON ({error})") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + CONTINUE_MARK
    last = content[-1]
    return [*content[:-1], {**last, "text": last["text"] + CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(CONTINUE_MARK.strip())
    if not mark:
        raise InvalidRequest(
            "continue_final_message=True is impossible here: the chat template leaves out the last message.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _refuse(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """The names and settings that templates on the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes, which a model would read as text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
