"""llguidance behind the seam: its tokenizer, compiled grammars, matchers, and masks filled by its own threads."""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from octavo.errors import InvalidRequest
from octavo.grammar.base import Masks, Matcher, name_of
from octavo.grammar.source import grammar_text
from octavo.structured_outputs import FIELD, StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer

MAX_FILL_THREADS = 8
MAX_CAUSE = 300  # characters of the library's messages
# Each bounds work or memory: 1 to 2 kB a lexer state; a mask that takes more fuel ends its own request.
MAX_LEXER_STATES = 50_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000


class Guidance:
    """For one tokenizer; `vocab_size` is the model's, which may be larger: ids without a token are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self.num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._executor: LLExecutor

    @property
    def tokens(self) -> LLTokenizer:
        """The library's own view of the vocabulary; made once, which takes up to a second or two."""
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read()
                self._executor = LLExecutor(max(1, min(MAX_FILL_THREADS, (os.cpu_count() or 2) // 2)))
        return self._tokens

    def _read(self) -> LLTokenizer:
        """Where only one text can follow, the library allows the tokens that a tokenizer makes of it, and no others.

        A tokenizer that puts a space before every text would put one there: the library knows how to take it away
        where it reads the tokenizer itself. Of a byte-level one it is quicker to be told the tokens.
        """
        vocabulary = _Vocabulary(self.tokenizer, self.vocab_size, self.eos_token_ids)
        if not self.tokenizer.is_byte_level:
            with contextlib.suppress(ValueError):  # a kind that it does not know
                return LLTokenizer(
                    self.tokenizer.raw.to_str(), n_vocab=self.vocab_size, eos_token=[vocabulary.eos_token_id]
                )
        return LLTokenizer(vocabulary)  # type: ignore[arg-type]

    def compile(self, params: StructuredOutputsParams) -> LLMatcher:
        text = grammar_text(params)
        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            verbose_errors=False,
        )
        matcher = LLMatcher(self.tokens, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        # The first mask takes longest. What it finds out is shared by all copies.
        first = np.zeros((1, self.num_words), np.int32)
        self.fill([_Matcher(matcher.deep_copy())], first)
        if not first.any():
            what = "it allows the empty answer only" if matcher.is_accepting() else "nothing satisfies it"
            raise InvalidRequest(f"{name_of(params)}: {what}.", param=FIELD)
        return matcher

    def matcher(self, grammar: Any) -> Matcher:
        return _Matcher(grammar.deep_copy())

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        pairs = [(matcher.inner, row) for row, matcher in enumerate(matchers) if isinstance(matcher, _Matcher)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        for token in self.eos_token_ids:
            masks[:, token >> 5] &= ~np.int32(np.uint32(1 << (token & 31)).view(np.int32))
        for matcher in matchers:
            if isinstance(matcher, _Matcher) and matcher.inner.is_error():
                matcher.error = _cause(matcher.inner.get_error())


class _Matcher:
    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        self.error = ""

    def accept(self, token_id: int) -> None:
        if not self.inner.consume_token(token_id):
            self.error = _cause(self.inner.get_error())

    def is_finished(self) -> tuple[bool, bool]:
        inner = self.inner
        return inner.is_accepting(), inner.is_stopped()


class _Vocabulary:
    """What `LLTokenizer` asks of a tokenizer that is not its own."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        # The library wants one. Without any, an id that no text needs takes its place: answers end by themselves.
        unused = (token for token in range(vocab_size) if token in tokenizer.special_ids or not self.tokens[token])
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else next(unused, vocab_size - 1)
        self.special_token_ids = sorted(
            {token for token in tokenizer.special_ids if token < vocab_size} | set(eos_token_ids)
        )

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _refusal(params: StructuredOutputsParams, message: str) -> InvalidRequest:
    hint = ""
    if "oneOf constraints" in message:
        message, hint = (
            "the alternatives of 'oneOf' overlap, which cannot be enforced",
            'Use anyOf, or send "lenient": true to have oneOf read as anyOf.',
        )
    return InvalidRequest(f"{name_of(params)}: {_cause(message)}.", hint, param=FIELD)


def _cause(message: str) -> str:
    """The library's message in one line, without the parser's state."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines()]
    text = " ".join(line for line in lines if line and not set(line) <= set("^|"))
    return (text if len(text) <= MAX_CAUSE else f"{text[:MAX_CAUSE]}...").rstrip(". ")
