"""Token ids to text as they come: whole characters only, up to a stop string."""

import codecs
from collections.abc import Iterable, Sequence
from os.path import commonprefix  # of any strings
from weakref import WeakValueDictionary

from octavo.text.stops import StopStrings
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, SamplingParams

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt: a decoder looks no further back than the token before
MAX_BYTE_RUN = 64  # tokens that may wait for the end of a run of byte tokens
MAX_UNFINISHED = 8  # tokens that may wait because the text ends in U+FFFD


class Detokenizer:
    """The text of one sequence, in parts that are final: nothing is shown that a later token could take back.

    Of several stop strings the one that ends first counts, and of those that end together the longest. So
    the text does not depend on how it is cut into tokens, or the tokens into steps. Only generated text is
    searched, and a match must end after the first `min_tokens` tokens.

    `stop_reason` is the stop string that was found. `num_tokens` counts the tokens that belong to the
    output: those fed, up to the one that completed the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stream = _text_stream(tokenizer, prompt_ids, params) if params.detokenize else None
        self._stops = _stop_strings(params.stop) if params.stop else None
        self._state = 0
        self._held = ""  # the end of the text that may become a stop string

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; tokens fed from then on are ignored."""
        return self.stop_reason is not None

    def feed(
        self, token_ids: Iterable[int], finish_reason: FinishReason | None = None, *, completed: bool = False
    ) -> str:
        """Take the next tokens and give the text that can be shown now.

        With `FinishReason.STOP` the last token is the one that ended the sequence: it counts, and its text
        is shown only with `include_stop_str_in_output`, or where it `completed` the text itself. Any finish
        reason brings out all that was held back; bytes that never became a character are U+FFFD then, as in
        `Tokenizer.decode`.
        """
        token_ids = list(token_ids)
        if self._stream is None:
            self.num_tokens += len(token_ids)
            return ""
        hides = finish_reason == FinishReason.STOP and not self._include_stop and not completed
        silent = token_ids[-1:] if hides else []
        shown = []
        for token_id in token_ids[: len(token_ids) - len(silent)]:
            if self.stopped:
                break
            self.num_tokens += 1
            shown.append(self._search(self._stream.push(token_id)))
        if finish_reason is not None and not self.stopped:
            shown.append(self._search(self._stream.flush()))
            if not self.stopped:
                shown.append(self._held)
                self._held = ""
                self.num_tokens += len(silent)
        return "".join(shown)

    def _search(self, text: str) -> str:
        """The part of held and new text that is safe to show, cut at a stop string."""
        if self._stops is None or not text:
            return text
        start = len(self._held)
        text = self._held + text
        searching = self.num_tokens > self._min_tokens
        for at in range(start, len(text)):
            self._state = self._stops.advance(self._state, text[at])
            length = self._stops.match[self._state]
            if length and searching:
                end = at + 1
                self.stop_reason = text[end - length : end]
                self._held = ""
                return text[:end] if self._include_stop else text[: end - length]
        safe = len(text) - self._stops.depth[self._state]
        self._held = text[safe:]
        return text[:safe]


class _ByteStream:
    """Text of a byte-level vocabulary: each token is some bytes, and the bytes are UTF-8."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = b""
        for token_id in reversed(prompt_ids):
            if len(before) >= 3:  # the longest part of a character
                break
            if token_id not in skipped:
                before = tokenizer.token_bytes(token_id) + before
        self._decoder.decode(before[-3:])
        # how bytes that the prompt leaves open look if the output does not complete them: text of the prompt
        self._before = self._decoder.getstate()[0].decode(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._own(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        return self._own(self._decoder.decode(b"", True))

    def _own(self, text: str) -> str:
        if self._before and text:
            text, self._before = text.removeprefix(self._before), ""
        return text


class _WindowStream:
    """Text of any other vocabulary: what the tokens change in the decoded text of a few tokens before them.

    A decoder with byte fallback takes a run of byte tokens together, and one bad byte spoils the run, so
    a run is shown when it ends, or in parts of `MAX_BYTE_RUN`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int], spaced: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.raw.decode
        self._skipped = skipped
        self._spaced = spaced
        self._after_special = False
        self._context = self._tail(prompt_ids)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.piece(token_id) is None:
            return ""
        if not self._spaced:
            content = self._tokenizer.added_tokens.get(token_id)
            joined, self._after_special = self._after_special, content is not None
            if joined and content is not None:
                text = self.flush() + content
                self._context = [token_id]
                return text
        self._pending.append(token_id)
        if token_id in self._tokenizer.byte_tokens and len(self._pending) < MAX_BYTE_RUN:
            return ""
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._pending) % MAX_BYTE_RUN < MAX_UNFINISHED:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._text()) if self._pending else ""

    def _show(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text

    def _text(self) -> str:
        before = self._decode(self._context, skip_special_tokens=False)
        after = self._decode([*self._context, *self._pending], skip_special_tokens=False)
        if after.startswith(before):
            return after[len(before) :]
        return after[len(commonprefix([before, after])) :]  # noqa: RUF071 - no paths

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last visible tokens of the prompt, with the whole of a run of byte tokens at its end."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(tail) >= NUM_CONTEXT_TOKENS and tail[-1] not in self._tokenizer.byte_tokens:
                break
            if token_id not in self._skipped and self._tokenizer.piece(token_id) is not None:
                tail.append(token_id)
        return tail[::-1]


_shared: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


def _stop_strings(words: tuple[str, ...]) -> StopStrings:
    """One automaton for all samples and requests that look for the same words: it can be large."""
    if (known := _shared.get(words)) is None:
        known = _shared[words] = StopStrings(words)
    return known


def _text_stream(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
) -> _ByteStream | _WindowStream:
    skipped = tokenizer.special_ids.difference(params.shown_token_ids) if params.skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return _ByteStream(tokenizer, prompt_ids, skipped)
    spaced = params.skip_special_tokens or params.spaces_between_special_tokens
    return _WindowStream(tokenizer, prompt_ids, skipped, spaced)
