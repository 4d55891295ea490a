"""What of an answer is thought, text and calls, in the shapes of OpenAI's messages and deltas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.protocol import ChatBody
from octavo.server.serving import Serving
from octavo.text.tools.answer import AnswerParser, Part, schemas_of, whole
from octavo.text.tools.formats import Formats
from octavo.text.tools.thinking import ThoughtState, is_opened, shown_ids, thinking
from octavo.types import CompletionOutput, Thinking


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read; there is none where they are text and nothing else."""

    body: ChatBody
    formats: Formats
    shown_token_ids: tuple[int, ...]  # special tokens that mark something
    opened: bool  # answers begin inside a thought
    thinking: Thinking | None  # to count the tokens of thoughts

    @classmethod
    def of(cls, serving: Serving, body: ChatBody, prompt: str, prompt_ids: Sequence[int]) -> "Reading | None":
        """What this request and the model's formats ask for."""
        formats, tokenizer = serving.formats(body), serving.tokenizer
        if tokenizer is None:
            return None
        reads_calls = body.choice.mode != "none"
        tools, thoughts = formats.tools, formats.reasoning
        if tools is not None and not reads_calls and tools.body != "harmony":
            tools = None
        if tools is None and thoughts is None and not body.constrains:
            return None
        formats = Formats(tools, thoughts)
        return cls(
            body=body,
            formats=formats,
            shown_token_ids=shown_ids(tokenizer, formats),
            opened=thoughts is not None and is_opened(thoughts, prompt),
            thinking=None if thoughts is None else thinking(tokenizer, thoughts, prompt_ids),
        )

    def parser(self) -> AnswerParser:
        body, choice = self.body, self.body.choice
        return AnswerParser(
            self.formats.tools,
            self.formats.reasoning,
            schemas_of(body.tools) if choice.mode != "none" else None,
            thinking=self.opened,
            after_mark=self.thinking is not None and self.thinking.closed,
            parallel=body.parallel_tool_calls,
            constrained=choice.name if choice.mode == "named" else choice.mode == "required",
        )


class Reader:
    """One choice's answer as it comes."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.parser = reading.parser()
        self.thought = None if reading.thinking is None else ThoughtState(reading.thinking)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.thought is None else self.thought.length

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        return "tool_calls" if sample.finish_reason == "stop" and self.parser.num_calls else sample.finish_reason

    def parts(self, sample: CompletionOutput) -> list[Part]:
        """What is known because of the next output of the engine."""
        if self.thought is not None:
            for token_id in sample.token_ids:
                self.thought.feed(token_id)
        parts = self.parser.feed(sample.text)
        if sample.finish_reason is not None:
            parts += self.parser.finish(cut=sample.finish_reason != "stop")
        return [part for part in parts if part.kind != "reasoning" or self.reading.body.include_reasoning]

    def message(self, sample: CompletionOutput) -> dict[str, Any]:
        """The members of a whole message that tell of all this."""
        answer = whole(self.parts(sample))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
        message: dict[str, Any] = {
            "content": answer.content or (None if calls or answer.reasoning else ""),
            "tool_calls": calls or None,
            "reasoning": answer.reasoning or None,
            "reasoning_content": answer.reasoning or None,
        }
        if answer.problems:
            message["tool_call_errors"] = [{"index": None, "reason": reason} for reason in answer.problems]
        return message


def delta(part: Part) -> dict[str, Any]:
    """A part of an answer as the delta of a chunk."""
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":  # two names are in use
        return {"reasoning": part.text, "reasoning_content": part.text}
    if part.kind == "name":
        function = {"name": part.text, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    return {"tool_call_errors": [{"index": part.index if part.index >= 0 else None, "reason": part.text}]}
