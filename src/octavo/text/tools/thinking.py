"""Thoughts as token ids: when one begins and ends, and how long it is."""

from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.formats import Formats, ReasoningFormat
from octavo.types import Thinking

NUM_LAST_TOKENS = 64  # of a prompt: more than a mark and the whitespace behind it


def thinking(
    tokenizer: Tokenizer, form: ReasoningFormat, prompt_ids: Sequence[int], budget: int | None = None
) -> Thinking:
    """What a request needs to know of its thought."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    last = tokenizer.decode(prompt_ids[-NUM_LAST_TOKENS:], skip_special_tokens=False)
    return Thinking(
        begin=ids(form.begin),
        end=ids(form.end),
        forced=ids(form.forced or form.end),
        opened=is_opened(form, last),
        closed=last.rstrip().endswith(form.end),
        budget=budget,
    )


def is_opened(form: ReasoningFormat, prompt: str) -> bool:
    """Whether the answer to a prompt begins inside a thought."""
    end = prompt.rstrip()
    return end.endswith(form.begin) or (form.opened and not end.endswith(form.end))


def shown_ids(tokenizer: Tokenizer, formats: Formats) -> tuple[int, ...]:
    """Special tokens that mark something: those that are a mark, or a part of one as in `<|channel|>analysis`."""
    marks = {mark for form in (formats.tools, formats.reasoning) if form is not None for mark in form.marks}
    added = tokenizer.added_tokens
    return tuple(
        token_id
        for token_id in sorted(tokenizer.special_ids)
        if (text := added.get(token_id)) and any(text in mark for mark in marks)
    )


class ThoughtState:
    """Where a sequence stands, told one generated token after the other.

    `inside`: a thought is open; `length` counts the tokens of all thoughts, without those of their marks.
    """

    def __init__(self, thinking: Thinking) -> None:
        self.thinking = thinking
        self.inside = thinking.opened
        self.length = 0
        self._last: list[int] = []

    def feed(self, token_id: int) -> None:
        last, thinking = self._last, self.thinking
        last.append(token_id)
        mark = thinking.end if self.inside else thinking.begin
        if self.inside:
            self.length += 1
        if len(last) >= len(mark) > 0 and last[-len(mark) :] == list(mark):
            if self.inside:
                self.length -= len(mark)
            self.inside = not self.inside
            self._last = []
        elif len(last) > 2 * max(len(thinking.begin), len(thinking.end)):
            del last[: -max(len(thinking.begin), len(thinking.end))]
