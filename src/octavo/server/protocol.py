"""What clients send: the bodies of completions, chat and tokenization. Sampling fields are read off SamplingParams."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, WithJsonSchema, model_validator

from octavo.errors import InvalidRequest, shown
from octavo.known import Elsewhere
from octavo.server import structured
from octavo.server.tool_choice import ToolChoice, check_tools
from octavo.types import INT64_MAX, SAMPLING_ELSEWHERE, SamplingParams

_OURS = ("detokenize", "output_kind", "shown_token_ids")  # set by the server
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in _OURS)
_LATER = "it is the older form of tools and tool_choice"
REQUEST_ELSEWHERE: Mapping[str, Elsewhere] = {
    **SAMPLING_ELSEWHERE,
    "suffix": Elsewhere("no model here fills in the middle", (None, "")),
    "prompt_embeds": Elsewhere("prompts are text or token ids"),
    "functions": Elsewhere(_LATER, (None, [])),
    "function_call": Elsewhere(_LATER, (None, "none")),
    "modalities": Elsewhere("answers are text", (None, ["text"])),
    "audio": Elsewhere("answers are text"),
    "web_search_options": Elsewhere("nothing is searched", (None, {})),
    "kv_transfer_params": Elsewhere("KV blocks stay in this engine"),
    "vllm_xargs": Elsewhere("no extension reads them", (None, {})),
    "mm_processor_kwargs": Elsewhere("models are text only", (None, {})),
    "media_io_kwargs": Elsewhere("models are text only", (None, {})),
}
"""Fields that other engines read: taken at a harmless value, refused with the sentence at any other."""

_PROMPT = {
    "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
}
_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "object"}},
                    {"type": "null"},
                ]
            },
        },
        "required": ["role"],
    },
}


class Body(BaseModel):
    """A request body: types are exact, null is the same as absent, and unknown fields are kept to be told of."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @property
    def extra(self) -> dict[str, Any]:
        return self.model_extra or {}

    def unread(self) -> list[str]:
        """Names of fields that nothing reads.

        Raises:
            InvalidRequest: a field that another engine has, at a value that asks for something absent here.
        """
        names = []
        for name, value in self.extra.items():
            known = REQUEST_ELSEWHERE.get(name)
            if known is None:
                names.append(name)
            elif not any(type(value) is type(harmless) and value == harmless for harmless in known.harmless):
                raise InvalidRequest(f"{name}={shown(value)} is not available: {known.why}.", param=name)
        return names


class StreamOptions(BaseModel):
    """`include_usage`: one last chunk with the counts; `continuous_usage_stats`: counts in every chunk."""

    model_config = ConfigDict(extra="allow", strict=True)
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


def _with_sampling_fields(schema: dict[str, Any]) -> None:
    hints = get_type_hints(SamplingParams)
    for name in structured.FIELDS:
        schema["properties"].setdefault(name, {"description": structured.DESCRIPTIONS.get(name, "")})
    for name in SAMPLING_FIELDS:
        kind = TypeAdapter(hints[name]).json_schema()
        definitions = {f"#/$defs/{part}": shape for part, shape in kind.pop("$defs", {}).items()}
        if definitions:  # in their place: a reference would point into this schema, not into the document
            kind["anyOf"] = [definitions.get(one.get("$ref"), one) for one in kind["anyOf"]]
        if name in ("stop", "bad_words"):
            kind = {"anyOf": [{"type": "string"}, kind]}
        schema["properties"].setdefault(name, kind)


class GenerationBody(Body):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_with_sampling_fields)

    model: str | None = Field(None, description="A served model's name; the first one when absent.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep this many tokens of the prompt; -1 means as many as leave room to answer."
    )
    truncation_side: Literal["left", "right"] = Field("left", description="Which end of the prompt is cut off.")
    priority: int = Field(0, ge=-INT64_MAX, le=INT64_MAX, description="Smaller ones first, where the policy says so.")
    timeout_ms: int | None = Field(None, ge=1, le=INT64_MAX, description="Give up after this time.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$", description="Share cached prefixes within it."
    )
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true.", param="stream_options")
        if self.stream and self.extra.get("prompt_logprobs") is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        return self

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return self.usage_at_end and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def given_sampling(self) -> dict[str, Any]:
        """What the request says of sampling, structured output in all its spellings included.

        Raises:
            InvalidRequest: structured output that contradicts itself.
        """
        given = {name: self.extra[name] for name in SAMPLING_FIELDS if name in self.extra}
        form = structured.structured_outputs(self.extra)
        return given if form is None else {**given, "structured_outputs": form}

    def notices(self) -> dict[str, str]:
        """Headers that tell how structured output was understood."""
        return structured.notices(self.extra, structured.structured_outputs(self.extra))

    def unread(self) -> list[str]:
        options = self.stream_options.model_extra if self.stream_options is not None else None
        names = [name for name in super().unread() if name not in SAMPLING_FIELDS and name not in structured.FIELDS]
        return [*names, *(f"stream_options.{name}" for name in options or ())]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool = Field(False, description="Put the prompt before each answer.")


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Any, WithJsonSchema(_MESSAGES)]
    add_special_tokens: bool = False
    max_completion_tokens: Annotated[Any, WithJsonSchema({"type": "integer"})] = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=-1)
    echo: bool = Field(False, description="Put the last message before the answer, if it is the assistant's.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables of the chat template.")
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[
        Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})
    ] = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    _choice: ToolChoice = PrivateAttr(default=ToolChoice("none"))

    @model_validator(mode="after")
    def _chat_consistent(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true.", param="top_logprobs")
        self._choice = check_tools(self.tools, self.tool_choice)
        return self

    @property
    def choice(self) -> ToolChoice:
        return self._choice

    @property
    def constrains(self) -> bool:
        """Whether the answer must be a call."""
        return self._choice.mode in ("required", "named")


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages as chat takes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    add_special_tokens: bool | None = Field(None, description="True for a prompt, false for messages, when absent.")
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]
    skip_special_tokens: bool = False
