"""How models mark calls and thoughts: formats as data, and which one a chat template asks for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from octavo.errors import InvalidConfig

Body = Literal["json", "named json", "pythonic", "xml", "gemma", "harmony"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls. Marks must not be the beginning of one another.

    `body` says what follows one of the `begin` marks. `end` marks close it where they come; `ignored` ones stand
    around several calls and mean nothing. With `bare` a call may also be the whole answer, without a mark.
    `signs` are found in the chat templates of models that write so: each is texts that all have to be there.
    """

    name: str
    body: Body
    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    bare: bool = False
    signs: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    separator: str = ""  # of "named json", between what comes before the name and the name, or after the name
    frame: tuple[str, str] | None = None  # what stands around the arguments of NAME, where no special token does
    short_ids: bool = False  # nine letters and digits, which the template insists on

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begin, *self.end, *self.ignored, *((self.separator,) if self.separator else ()))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a thought is marked. `opened` says that the answer begins inside one, without a mark.

    `forced` is what a thought that took too long is ended with, where that is more than `end`.
    """

    name: str
    begin: str
    end: str
    signs: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    opened: bool = False
    forced: str = ""
    channels: bool = False  # of harmony: the answer is marked, too

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.forced or self.end)


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

# Of several whose signs are there the first one counts.
TOOL_FORMATS = (
    ToolFormat("openai", "harmony", (), HARMONY_MARKS, signs=(("<|channel|>", "<|message|>"),), aliases=("gpt_oss",)),
    ToolFormat(
        "qwen3_xml",
        "xml",
        ("<tool_call>", "<function="),
        ("</tool_call>",),
        signs=(("<tool_call>", "<function="),),
        aliases=("qwen3_coder",),
    ),
    ToolFormat(
        "kimi_k2",
        "named json",
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        signs=(("<|tool_call_begin|>",),),
        separator="<|tool_call_argument_begin|>",
    ),
    ToolFormat(
        "deepseek_v3",
        "named json",
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁call▁end｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        signs=(("<｜tool▁call▁begin｜>",),),
        aliases=("deepseek_v31",),
        separator="<｜tool▁sep｜>",
    ),
    ToolFormat("gemma4", "gemma", ("<|tool_call>",), ("<tool_call|>",), signs=(("<|tool_call>",),)),
    ToolFormat(
        "functiongemma",
        "gemma",
        ("<start_function_call>",),
        ("<end_function_call>",),
        signs=(("<start_function_call>",),),
    ),
    ToolFormat(
        "mistral",
        "json",
        ("[TOOL_CALLS]",),
        ignored=("[CALL_ID]",),
        signs=(("[TOOL_CALLS]",),),
        separator="[ARGS]",
        short_ids=True,
    ),
    ToolFormat(
        "phi4_mini_json",
        "json",
        ("<|tool_call|>", "functools"),
        ("<|/tool_call|>",),
        signs=(("<|tool_call|>",), ("functools",), ("<|tool|>", "<|/tool|>")),
        aliases=("granite",),
    ),
    ToolFormat(
        "hermes",
        "json",
        ("<tool_call>",),
        ("</tool_call>",),
        signs=(("<tool_call>",),),
        aliases=("qwen25",),
        frame=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ),
    ToolFormat(
        "llama3_json",
        "json",
        ("<|python_tag|>",),
        bare=True,
        signs=(("<|python_tag|>", '"parameters"'), ("<|start_header_id|>", '"parameters"')),
        aliases=("llama4_json",),
    ),
    ToolFormat(
        "pythonic",
        "pythonic",
        ("<|python_start|>",),
        ("<|python_end|>",),
        bare=True,
        signs=(("func_name1(", "params_name1="), ("<|python_start|>",), ("[func_name", "(params_name")),
        aliases=("llama4_pythonic",),
    ),
)
REASONING_FORMATS = (
    ReasoningFormat(
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        signs=(("<|channel|>", "<|message|>"),),
        aliases=("openai", "gpt_oss"),
        forced="<|end|><|start|>assistant<|channel|>final<|message|>",
        channels=True,
    ),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", signs=(("<|channel>", "<channel|>"),)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", signs=(("[THINK]",),)),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", signs=(("<seed:think>",),)),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷", signs=(("◁think▷",),)),
    ReasoningFormat(
        "qwen3",
        "<think>",
        "</think>",
        signs=(("</think>",), ("<think>",)),
        aliases=("deepseek_v3", "glm45", "granite4", "holo2", "think"),
    ),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", opened=True),
)
NONE = "none"  # as a name: do not look


@dataclass(frozen=True, slots=True)
class Formats:
    """How one model writes calls and thoughts; None where it writes none, or nobody knows how."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(cls, template: str, tool_call_parser: str | None = None, reasoning_parser: str | None = None) -> Self:
        """What names say, else what the source of the chat template does.

        Raises:
            InvalidConfig: an unknown name.
        """
        tools = find_tool_format(template) if not tool_call_parser else tool_format(tool_call_parser)
        reasoning = find_reasoning_format(template) if not reasoning_parser else reasoning_format(reasoning_parser)
        return cls(tools, reasoning)


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of the calls that a chat template asks for; None for one that has no calls in it."""
    return next((one for one in TOOL_FORMATS if _has(template, one.signs)), None)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    return next((one for one in REASONING_FORMATS if _has(template, one.signs)), None)


def tool_format(name: str) -> ToolFormat | None:
    """The format of this name, None for "none".

    Raises:
        InvalidConfig: there is none of this name.
    """
    if name == NONE:
        return None
    for one in TOOL_FORMATS:
        if name in (one.name, *one.aliases):
            return one
    raise _unknown("tool_call_parser", name, ((one.name, *one.aliases) for one in TOOL_FORMATS))


def reasoning_format(name: str) -> ReasoningFormat | None:
    """The format of this name, None for "none".

    Raises:
        InvalidConfig: there is none of this name.
    """
    if name == NONE:
        return None
    for one in REASONING_FORMATS:
        if name in (one.name, *one.aliases):
            return one
    raise _unknown("reasoning_parser", name, ((one.name, *one.aliases) for one in REASONING_FORMATS))


def _has(template: str, signs: Iterable[tuple[str, ...]]) -> bool:
    return any(all(text in template for text in sign) for sign in signs)


def _unknown(option: str, name: str, known: Iterable[tuple[str, ...]]) -> InvalidConfig:
    names = ", ".join(sorted(one for names in known for one in names))
    return InvalidConfig(f"{option}={name!r} is not known.", f"Known are {NONE}, {names}.")
