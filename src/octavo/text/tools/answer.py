"""An answer taken apart as it comes: thoughts, text and calls of tools."""

import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.text.tools import calls, json_text
from octavo.text.tools.formats import Formats, ReasoningFormat, ToolFormat
from octavo.text.tools.reader import Malformed, Reader, Wait
from octavo.text.tools.thinking import is_opened

Kind = Literal["content", "reasoning", "name", "arguments", "void"]
ENDS_OF_MESSAGE = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


@dataclass(slots=True)
class Part:
    """The next piece of an answer. `name` begins the call number `index`, and `id` is that call's.

    `void` takes that call back: its text turned out to be none, for the reason in `text`, and comes as content.
    A void without a call (`index` -1) says why text that began as a call is none.
    """

    kind: Kind
    text: str
    index: int = -1
    id: str = ""


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A whole answer. `problems` say why text that looked like a call is none."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class AnswerParser:
    """Reads one answer. What it finds does not depend on how the text is cut into pieces.

    Whitespace next to a mark belongs to the mark. A call that is malformed stays text. Of several calls only the
    first one is told of unless `parallel`.

    Args:
        tools: how calls are written; None leaves them in the text.
        reasoning: how thoughts are marked; None leaves them in the text.
        schemas: of the arguments of each tool, by its name.
        thinking: whether the answer begins inside a thought.
        after_mark: whether the prompt ends with the mark that ends a thought.
        constrained: whether the answer is nothing but calls as JSON, a list or one, because decoding was forced so; or
            the name of the one function whose arguments it is.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        thinking: bool = False,
        after_mark: bool = False,
        parallel: bool = True,
        constrained: str | bool = False,
    ) -> None:
        self.tools, self.reasoning, self.schemas = tools, reasoning, schemas or {}
        self.parallel, self.constrained = parallel, constrained
        self.num_calls = 0  # that are whole
        self.thinking = thinking
        self._begun = 0
        self._open = False  # a call has begun and is not whole
        self._bare = False
        self._cut = False
        self._parts: list[Part] = []
        self._space = ""  # at the end of the text: it goes where a mark follows
        self._fresh = after_mark  # a mark came last
        self._reader = Reader()
        harmony = (tools is not None and tools.body == "harmony") or (reasoning is not None and reasoning.channels)
        self._read = self._harmony() if harmony and not constrained else self._answer()
        self._done = False
        self._go_on()

    def feed(self, text: str) -> list[Part]:
        """Take the next text and give what is known because of it."""
        self._reader.feed(text)
        self._go_on()
        parts, self._parts = self._parts, []
        return parts

    def finish(self, cut: bool = False) -> list[Part]:
        """The answer has ended. `cut`: at a limit, so that an unfinished call is no fault of the model."""
        self._reader.ended, self._cut = True, cut
        return self.feed("")

    def _go_on(self) -> None:
        if not self._done:
            self._done = next(self._read, self) is self

    # What the reading generators tell of

    def begin(self, name: str) -> None:
        if self._bare and name not in self.schemas:
            raise Malformed(f"there is no tool {name[:40]!r}")
        if self._shows:
            self._parts.append(Part("name", name, self._begun, _call_id(self.tools)))
        self._open = True
        self._begun += 1

    def arguments(self, text: str) -> None:
        index = self._begun - 1
        if not text or (not self.parallel and self.num_calls):
            return
        if self._parts and self._parts[-1].kind == "arguments" and self._parts[-1].index == index:
            self._parts[-1].text += text
        else:
            self._parts.append(Part("arguments", text, index))

    def done(self) -> None:
        self._open = False
        self.num_calls += 1
        self._space, self._fresh = "", True
        self._reader.remember()  # what follows is another call: this one is not given back with it

    @property
    def _shows(self) -> bool:
        return self.parallel or not self.num_calls

    def _content(self, text: str) -> None:
        text = self._space + text
        if self._fresh:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._show("content", shown)

    def _thought(self, text: str) -> None:
        text = self._space + text
        if self._fresh:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._show("reasoning", shown)

    def _show(self, kind: Kind, text: str) -> None:
        if not text:
            return
        self._fresh = False
        if self._parts and self._parts[-1].kind == kind:
            self._parts[-1].text += text
        else:
            self._parts.append(Part(kind, text))

    # The reading generators

    def _answer(self) -> Wait[None]:
        reader, tools, thought = self._reader, self.tools, self.reasoning
        if self.thinking:
            yield from self._thoughts()
        elif thought is not None:  # most begin with it, and whitespace before it is not the answer's
            yield from self._first_thought()
        if self.constrained:
            yield from self._forced()
            return
        if tools is not None and tools.bare:
            yield from self._bare_call()
        begin = (*(tools.begin if tools else ()), *((thought.begin,) if thought else ()))
        marks = (*begin, *((*tools.end, *tools.ignored) if tools else ()))
        while mark := (yield from reader.until(marks, self._content)):
            if thought is not None and mark == thought.begin:
                yield from self._thoughts()
            elif tools is not None and mark in tools.begin:
                reader.remember()
                reader.taken.append(mark)
                yield from self._calls(mark)
            else:
                self._space, self._fresh = "", True
        self._show("content", self._space)

    def _first_thought(self) -> Wait[None]:
        assert self.reasoning is not None
        space = yield from self._reader.space()
        if (yield from self._reader.has(self.reasoning.begin)):
            yield from self._thoughts()
        else:
            self._content(space)

    def _thoughts(self) -> Wait[None]:
        """What stands up to the end mark."""
        assert self.reasoning is not None
        self.thinking, self._space, self._fresh = True, "", True
        if (yield from self._reader.until((self.reasoning.end,), self._thought)):
            self.thinking, self._space, self._fresh = False, "", True
        else:
            self._show("reasoning", self._space)
            self._space = ""

    def _forced(self) -> Wait[None]:
        """Decoding was constrained to JSON."""
        self._reader.remember()
        try:
            yield from self._reader.space()
            if isinstance(self.constrained, str):
                self.begin(self.constrained)
                yield from json_text.value(self._reader, self.arguments)
                self.done()
            else:
                yield from calls.calls(self._reader, self, FORCED, self.schemas)
        except Malformed as error:
            self._give_back(str(error))
        yield from self._reader.until((), self._content)

    def _bare_call(self) -> Wait[None]:
        """A call without a mark, as the whole answer; any other text that looks so at first is no fault."""
        assert self.tools is not None
        reader = self._reader
        space = yield from reader.space()
        if (yield from reader.peek()) != ("{" if self.tools.body == "json" else "["):
            self._content(space)
            return
        reader.remember()
        reader.taken.append(space)
        self._bare = True
        yield from self._calls("")
        self._bare = False

    def _calls(self, mark: str) -> Wait[None]:
        assert self.tools is not None
        try:
            yield from calls.calls(self._reader, self, self.tools, self.schemas, mark)
        except Malformed as error:
            self._give_back(str(error))
        self._reader.remembers = False

    def _give_back(self, reason: str) -> None:
        """What was taken for a call is text."""
        reader = self._reader
        reader.remembers = False
        if self._open and self._cut and reader.ended and reader.at >= len(reader.text):
            return  # what there is of the call is shown
        if self._open:
            if self._shows:
                self._parts.append(Part("void", reason, self._begun - 1))
            self._open = False
        elif not self._bare and self._shows:
            self._parts.append(Part("void", reason))
        if self._shows:
            self._content("".join(reader.taken))

    def _harmony(self) -> Wait[None]:
        """Messages of gpt-oss: a header with channel and recipient, then a body."""
        reader = self._reader
        while True:
            header: list[str] = []
            mark = yield from reader.until(("<|message|>", *ENDS_OF_MESSAGE), header.append)
            text = "".join(header)
            if mark != "<|message|>":
                if "<|channel|>" not in text and text.strip() not in ("", "assistant"):
                    self._content(text)  # no message at all
                if not mark:
                    self._show("content", self._space)
                    return
                continue
            channel = re.search(r"<\|channel\|>\s*(\w+)", text)
            recipient = re.search(r"to=([^\s<]+)", text)
            if recipient is not None and self.schemas:
                reader.remember()
                yield from self._harmony_call(recipient[1].removeprefix("functions."))
            elif channel is not None and channel[1] == "analysis":
                self.thinking, self._space, self._fresh = True, "", True
                ended = yield from reader.until(ENDS_OF_MESSAGE, self._thought)
                self.thinking = not ended
                if not ended:
                    self._show("reasoning", self._space)
                self._space, self._fresh = "", True
            else:
                if not (yield from reader.until(ENDS_OF_MESSAGE, self._content)):
                    self._show("content", self._space)
                self._space, self._fresh = "", True

    def _harmony_call(self, name: str) -> Wait[None]:
        reader = self._reader
        try:
            yield from reader.space()
            self.begin(name)
            if not (yield from reader.peek()) or (yield from reader.has_any(ENDS_OF_MESSAGE)):
                self.arguments("{}")
                self.done()
                return
            yield from json_text.value(reader, self.arguments)
            self.done()
        except Malformed as error:
            self._give_back(str(error))
            yield from reader.until(ENDS_OF_MESSAGE, self._content)
            return
        reader.remembers = False
        yield from reader.until(ENDS_OF_MESSAGE, _nowhere)


def _nowhere(text: str) -> None:
    """Drop it."""


FORCED = ToolFormat("forced", "json", ())
LETTERS = string.ascii_letters + string.digits


def _call_id(form: ToolFormat | None) -> str:
    if form is not None and form.short_ids:
        return "".join(secrets.choice(LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def whole(parts: Iterable[Part]) -> Answer:
    """Put the parts of an answer together, without the calls that were taken back."""
    answer = Answer()
    found: dict[int, Call] = {}
    for part in parts:
        if part.kind == "content":
            answer.content += part.text
        elif part.kind == "reasoning":
            answer.reasoning += part.text
        elif part.kind == "name":
            found[part.index] = Call(part.id, part.text)
        elif part.kind == "arguments":
            found[part.index].arguments += part.text
        else:
            found.pop(part.index, None)
            answer.problems.append(part.text)
    answer.calls = list(found.values())
    return answer


def read_answer(
    text: str,
    formats: Formats,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    prompt: str = "",
    cut: bool = False,
) -> Answer:
    """Take a whole answer apart: what `AnswerParser` does, at once.

    `tools` are those that were given to the chat template, `prompt` is the text that it made, and `cut` says that the
    answer ended at a limit. The text must have the special tokens that mark calls, as `LLM.chat(tools=...)` gives it.
    """
    thoughts = formats.reasoning
    parser = AnswerParser(
        formats.tools if tools or (formats.tools and formats.tools.body == "harmony") else None,
        thoughts,
        schemas_of(tools),
        thinking=thoughts is not None and is_opened(thoughts, prompt),
        after_mark=thoughts is not None and prompt.rstrip().endswith(thoughts.end),
    )
    return whole([*parser.feed(text), *parser.finish(cut)])


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments of each tool, by name; tools are OpenAI's objects."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function: Any = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters: Any = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas
