"""What an answer must look like: `SamplingParams.structured_outputs`, in the names that vLLM's users know."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.errors import InvalidRequest, shown

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FIELD = "structured_outputs"
MAX_LENGTH = 1 << 20  # characters of a schema, a grammar or all choices together
MAX_REGEX = 1 << 16  # characters
FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties", "lenient")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of the six kinds, and how it is meant.

    Args:
        json: a JSON schema: a dictionary, its text, or a pydantic model. Kept as text.
        regex: a regular expression that the whole answer matches (Rust's syntax: no look-around, no references).
        choice: the answer is one of these strings.
        grammar: a context-free grammar in Lark's or in GBNF's notation.
        json_object: any JSON object.
        structural_tag: free text with tagged parts that follow schemas, `{"structures": [{"begin", "schema", "end"}],
            "triggers": [...]}`; a dictionary or its text.
        disable_any_whitespace: JSON without spaces and line breaks between its parts.
        disable_additional_properties: objects have no properties but those of the schema, unless it says otherwise.
        whitespace_pattern: a regular expression of what may stand between the parts of JSON.
        lenient: accept a schema with keywords that are not enforced.

    Raises:
        InvalidRequest: none or several kinds, or a value of another type, empty or too long.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    lenient: bool = False

    def __post_init__(self) -> None:
        for name in FLAGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise _refuse(name, f"{shown(value)} is not True or False")
        given = [kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if len(given) != 1:
            found = ", ".join(given) or "none of them"
            raise InvalidRequest(
                f"{FIELD} needs exactly one of {', '.join(KINDS)}; {found} {'is' if len(given) < 2 else 'are'} given.",
                param=FIELD,
            )
        kind = given[0]
        value = getattr(self, kind)
        if kind == "choice":
            self._set(choice=_choices(value))
        elif kind != "json_object":
            self._set(**{kind: _text(kind, value)})
        if self.whitespace_pattern is not None:
            self._set(whitespace_pattern=_text("whitespace_pattern", self.whitespace_pattern))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """What it says, in one string; choices as a JSON list."""
        value = getattr(self, self.kind)
        return json.dumps(value, ensure_ascii=False) if isinstance(value, tuple) else str(value)

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams | None":
        """From what a request holds: the parameters, or a dictionary of them.

        Raises:
            InvalidRequest: another type, or an unknown name.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(
                f"{FIELD}={shown(value)} is not allowed: it must be a dictionary or StructuredOutputsParams.",
                param=FIELD,
            )
        unknown = [name for name in value if name not in cls.__slots__]
        if unknown:
            raise InvalidRequest(
                f"{FIELD} has no {shown(unknown[0])}: it takes {', '.join(cls.__slots__)}.", param=FIELD
            )
        return cls(**value)


def _refuse(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name}: {why}.", param=FIELD)


def _text(kind: str, value: object) -> str:
    if kind == "json" and hasattr(value, "model_json_schema"):  # a pydantic model
        value = value.model_json_schema()
    if kind in ("json", "structural_tag") and isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refuse(kind, f"it cannot be written as JSON ({error})") from None
    if not isinstance(value, str):
        raise _refuse(kind, f"{shown(value)} is of type {type(value).__name__}, and must be text")
    if not value.strip() and not (kind in ("regex", "whitespace_pattern") and value):
        raise _refuse(kind, "it is empty")
    limit = MAX_REGEX if kind in ("regex", "whitespace_pattern") else MAX_LENGTH
    if len(value) > limit:
        raise _refuse(kind, f"it has {len(value)} characters, and {limit} are allowed")
    if "\0" in value:
        raise _refuse(kind, f"it has a NUL character at position {value.index(chr(0))}")
    return value


def _choices(values: object) -> tuple[str, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise _refuse("choice", f"{shown(values)} is not a list of strings")
    choices = tuple(values)
    if not choices:
        raise _refuse("choice", "the list is empty")
    for choice in choices:
        if not isinstance(choice, str) or not choice or "\0" in choice:
            raise _refuse("choice", f"{shown(choice)} is not a non-empty string without NUL characters")
    length = sum(map(len, choices))
    if length > MAX_LENGTH:
        raise _refuse("choice", f"they have {length} characters, and {MAX_LENGTH} are allowed")
    return tuple(dict.fromkeys(choices))
