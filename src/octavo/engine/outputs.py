"""Turns token deltas into the `RequestOutput`s a user reads: text, logprobs, stop strings, n samples together."""

import time
from collections.abc import Callable

from octavo.engine.inputs import Group
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.types import (
    CompletionOutput,
    Delta,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    TokenLogprobs,
)


class Outputs:
    """All live requests. `add` before their sequences run, `process` for every delta."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokenizer, self.clock = tokenizer, clock
        self._samples: dict[str, Sample] = {}
        self._answers: dict[str, Answer] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._answers)

    def add(self, group: Group, final_only: bool = False) -> None:
        """`final_only`: whatever the request says, show only its end: copying a growing list each step adds up."""
        kind = RequestOutputKind.FINAL_ONLY if final_only else group.params.output_kind
        answer = self._answers[group.id] = Answer(group, kind, self.tokenizer, self.clock())
        for sample in answer.samples:
            self._samples[sample.request.id] = sample

    def clear(self) -> None:
        self._samples.clear()
        self._answers.clear()

    def is_live(self, group_id: str) -> bool:
        return group_id in self._answers

    def process(self, deltas: list[Delta]) -> tuple[list[RequestOutput], list[str]]:
        """What to show, and the sequences that a stop string ended: the engine must abort those."""
        changed: dict[str, Answer] = {}
        stopped = []
        now = self.clock()
        for delta in deltas:
            sample = self._samples.get(delta.request_id)
            if sample is None:
                continue
            sample.take(delta, now)
            if sample.finished:
                del self._samples[delta.request_id]
                if delta.finish_reason is None:
                    stopped.append(delta.request_id)
            changed[sample.answer.group.id] = sample.answer
        return [output for answer in changed.values() if (output := self._show(answer))], stopped

    def abort(self, group_id: str) -> tuple[RequestOutput | None, list[str]]:
        """End a request early: its last output, and the sequences that the engine must abort."""
        answer = self._answers.get(group_id)
        if answer is None:
            return None, []
        ended = answer.abort(self.clock())
        for sample in ended:
            del self._samples[sample.request.id]
        return self._show(answer), [sample.request.id for sample in ended]

    def _show(self, answer: "Answer") -> RequestOutput | None:
        if answer.finished:
            del self._answers[answer.group.id]
        return answer.show()


class Sample:
    """One of the n texts of a request, as it grows."""

    def __init__(self, answer: "Answer", index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        self.answer, self.request, self.tokenizer = answer, request, tokenizer
        self.params = request.params
        wants_logprobs = self.params.logprobs is not None
        self.output = CompletionOutput(
            index, logprobs=[] if wants_logprobs else None, cumulative_logprob=0.0 if wants_logprobs else None
        )
        self.detokenizer = (
            Detokenizer(tokenizer, request.prompt_token_ids, request.params)
            if tokenizer is not None and self.params.detokenize
            else None
        )
        self.finished = False
        self.shown_text = 0
        self.shown_tokens = 0
        self.shown_finish = False

    def take(self, delta: Delta, now: float) -> None:
        tokens, output, answer = delta.token_ids, self.output, self.answer
        answer.note(delta, self, now)
        if self.detokenizer is not None:
            output.text += self.detokenizer.feed(tokens, delta.finish_reason, completed=delta.completed)
            # A step may bring more tokens than the one that completed a stop string: those are not the answer's.
            tokens = tokens[: self.detokenizer.num_tokens - len(output.token_ids)]
        output.token_ids += tokens
        if output.logprobs is not None:
            for row in delta.logprobs[: len(tokens)]:
                output.logprobs.append(_readable(row, self.tokenizer))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + row.logprobs[0]
        if self.detokenizer is not None and self.detokenizer.stop_reason is not None:
            # A stop string ends the text also where the same tokens brought the end of sequence or the limit.
            self.finish(FinishReason.STOP, self.detokenizer.stop_reason, now)
        elif delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.error or delta.stop_reason, now)

    def take_token(self, token_id: int, now: float) -> None:
        """`take` of a delta that is one token and nothing else, and not the first: what most deltas are."""
        output, detokenizer = self.output, self.detokenizer
        output.token_ids.append(token_id)
        self.answer.is_new = True
        if detokenizer is not None:
            output.text += detokenizer.feed((token_id,))
            if detokenizer.stop_reason is not None:
                self.finish(FinishReason.STOP, detokenizer.stop_reason, now)

    def abort(self, now: float, stop_reason: str | None = None) -> None:
        if self.detokenizer is not None:
            self.output.text += self.detokenizer.feed([], FinishReason.ABORT)
        self.finish(FinishReason.ABORT, stop_reason, now)

    def finish(self, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        self.output.finish_reason, self.output.stop_reason = str(reason), stop_reason
        self.finished = True
        self.answer.ended(now)

    def since_last(self) -> CompletionOutput | None:
        """Only what is new, or None when nothing is."""
        whole = self.output
        if self.shown_finish or (
            not self.finished and self.shown_tokens == len(whole.token_ids) and self.shown_text == len(whole.text)
        ):
            return None
        new = self._copy(self.shown_text, self.shown_tokens)
        self.shown_text, self.shown_tokens = len(whole.text), len(whole.token_ids)
        self.shown_finish = self.finished
        return new

    def so_far(self) -> CompletionOutput:
        return self._copy(0, 0)

    def _copy(self, text_from: int, tokens_from: int) -> CompletionOutput:
        whole = self.output
        return CompletionOutput(
            whole.index,
            whole.text[text_from:],
            whole.token_ids[tokens_from:],
            whole.cumulative_logprob,
            None if whole.logprobs is None else whole.logprobs[tokens_from:],
            whole.finish_reason,
            whole.stop_reason,
        )


class Answer:
    """A user's request with its n samples. `is_new` says that something came since the last `show`."""

    def __init__(self, group: Group, kind: RequestOutputKind, tokenizer: Tokenizer | None, now: float) -> None:
        self.group, self.kind, self.tokenizer = group, kind, tokenizer
        self.samples = [Sample(self, i, request, tokenizer) for i, request in enumerate(group.requests)]
        self.num_open = len(self.samples)
        self.is_new = False
        self.metrics = RequestMetrics(now)
        self.num_cached_tokens: int | None = None
        self.prompt_token_ids = list(group.requests[0].prompt_token_ids)  # one list for all outputs: it can be long
        wants = group.params.prompt_logprobs is not None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wants else None

    @property
    def finished(self) -> bool:
        return not self.num_open

    def note(self, delta: Delta, sample: Sample, now: float) -> None:
        """What a delta says of the request as a whole."""
        self.is_new = True
        if self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        if self.prompt_logprobs is not None and sample.output.index == 0 and delta.prompt_logprobs:
            # Entry p tells of the token at position p; positions come again after a preemption.
            seen = len(self.prompt_logprobs) - delta.prompt_logprobs_start
            self.prompt_logprobs += [_readable(row, self.tokenizer) for row in delta.prompt_logprobs[seen:]]

    def abort(self, now: float, stop_reason: str | None = None) -> list[Sample]:
        """End what is not finished; returns the samples that this ended."""
        ended = [sample for sample in self.samples if not sample.finished]
        for sample in ended:
            sample.abort(now, stop_reason)
        return ended

    def ended(self, now: float) -> None:
        """One more sample is finished."""
        self.is_new = True
        self.num_open -= 1
        if not self.num_open:
            self.metrics.finished_time = now

    def show(self) -> RequestOutput | None:
        """What the user sees next, all that came since the last time in one; None when there is nothing."""
        self.is_new = False
        finished = self.finished
        if self.kind is RequestOutputKind.DELTA:
            outputs = [new for sample in self.samples if (new := sample.since_last())]
            if not outputs:
                return None
        elif self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        else:
            outputs = [sample.so_far() for sample in self.samples]
        return RequestOutput(
            request_id=self.group.id,
            prompt=self.group.text,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


def _readable(row: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Logprobs by token id: the token that stands there with its rank, then ranks 1, 2, ... of the others."""
    result = {}
    for place, (token, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True)):
        if token not in result:
            text = None if tokenizer is None else tokenizer.token_text(token)
            result[token] = Logprob(logprob, place or row.rank, text)
    return result
