"""Logprobs as clients read them: the lists of completions, the content entries of chat, and those of the prompt."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.text.tokenizer import Tokenizer
from octavo.types import Logprob

FLOOR = -9999.0  # JSON has no infinity

Row = Mapping[int, Logprob]  # of one position: the token that stands there first, then the most likely ones


def _number(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def _texts(tokenizer: Tokenizer | None, token_ids: Iterable[int], as_ids: bool) -> list[str]:
    if as_ids or tokenizer is None:
        return [f"token_id:{token_id}" for token_id in token_ids]
    return tokenizer.token_texts(token_ids)


class CompletionLogprobs:
    """The lists of one choice, which may come in several parts: text offsets go on from part to part."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids
        self.offset = 0

    def part(self, token_ids: Sequence[int], rows: Sequence[Row | None]) -> dict[str, Any]:
        """`rows[i]` is of `token_ids[i]`; None, for the first token of a prompt, gives nulls."""
        offsets, tokens = [], []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, row in zip(token_ids, rows, strict=True):
            texts = _texts(self.tokenizer, row or (token_id,), self.as_ids)
            offsets.append(self.offset)
            self.offset += len(texts[0])
            tokens.append(texts[0])
            if row is None:
                token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                values = [_number(entry.logprob) for entry in row.values()]
                token_logprobs.append(values[0])
                top_logprobs.append(dict(zip(texts, values, strict=True)))
        return {
            "text_offset": offsets,
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }


class ChatLogprobs:
    """The entries of one message. `num_top` is how many of the most likely tokens each has; -1 is all."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, as_ids: bool, skip_special_tokens: bool) -> None:
        self.tokenizer, self.num_top, self.as_ids = tokenizer, num_top, as_ids
        # What adds nothing to the text has no bytes, so that the bytes of all tokens are those of the text.
        self.silent = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()

    def part(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"content": [self._entry(row) for row in rows], "refusal": None}

    def _entry(self, row: Row) -> dict[str, Any]:
        texts = _texts(self.tokenizer, row, self.as_ids)
        entries = [
            {"token": text, "logprob": _number(entry.logprob), "bytes": self._bytes(token_id)}
            for text, (token_id, entry) in zip(texts, row.items(), strict=True)
        ]
        ranked = sorted(zip(row.values(), entries, strict=True), key=lambda pair: pair[0].rank or 0)
        top = [entry for logprob, entry in ranked if self.num_top == -1 or (logprob.rank or 0) <= self.num_top]
        return {**entries[0], "top_logprobs": top}

    def _bytes(self, token_id: int) -> list[int] | None:
        if self.tokenizer is None or token_id in self.silent:
            return None
        return list(self.tokenizer.token_bytes(token_id))


def prompt_logprobs(rows: Sequence[Row | None] | None) -> list[dict[str, dict[str, Any]] | None] | None:
    """Of every prompt position, by token id; null for the first, and null when nobody asked."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token_id): {
                "logprob": _number(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in row.items()
        }
        for row in rows
    ]
