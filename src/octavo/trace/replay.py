"""The recorded arrivals through the real scheduler again, with the same settings or others, without a model."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count

from octavo.core.blocks import BlockPool
from octavo.core.scheduler import Scheduler
from octavo.core.step import Step, StepResult
from octavo.engine.loop import Loop
from octavo.errors import InvalidRequest
from octavo.observe.trace import FORMAT, AnyRecord, Arrival, Header, Recorder, Settings, Trace
from octavo.sampling.bitmask import Bitmasks
from octavo.structured_outputs import StructuredOutputsParams
from octavo.trace.life import History, Life, fold
from octavo.types import FinishReason, Request, SamplingParams

LAST = 1 << 62  # place of what the recording does not have any more


class Replay:
    """One pass; `trace` is its own recording.

    Requests arrive at the visit of the scheduler at which they were recorded. A text ends after as many tokens as then,
    by the same cause; who gave up waits as many visits without news as then. With the recording's own settings the
    replay ends where the recording does, and its records are the same.

    Raises:
        InvalidConfig: the settings contradict each other.
    """

    def __init__(self, recorded: Trace, settings: Settings | None = None) -> None:
        own = recorded.header.settings
        self.settings = settings or own
        self.refused: list[tuple[str, str]] = []  # ids of requests that these settings cannot run, and why
        self._history = fold(recorded)
        self._scheduler = Scheduler(
            BlockPool(self.settings.num_blocks, self.settings.block_size),
            self.settings.max_num_seqs,
            self.settings.max_num_batched_tokens,
            self.settings.max_model_len,
            self.settings.num_scheduler_steps,
            self.settings.scheduling_policy,  # type: ignore[arg-type]  # the scheduler checks it
        )
        self._texts = texts(self._history)
        self._loop = Loop(self._scheduler, _Device(self._history.lives, self._texts), self.settings.depth)
        self._turn = 0
        self._num_generated: dict[int, int] = {}  # by number, of what is at work
        self._due: list[tuple[int, Callable[[], object]]] = []  # a heap: what comes before the next turn, by place
        self._news: dict[int, int] = {}  # the turn of the last tokens, or of the arrival
        records: list[AnyRecord] = []
        recorder = Recorder(records.extend, self.settings.block_size, clock=lambda: 0.0)
        self._scheduler.subscribers.append(recorder)
        self._run(num_turns=self._history.num_turns if self.settings == own else None)
        recorder.flush()
        for record in records:
            if isinstance(record, Arrival):
                record.id = self._history.lives[int(record.id)].id
        self.trace = Trace(Header(FORMAT, self.settings, recorded.header.model), records)

    def _run(self, num_turns: int | None) -> None:
        """So many turns, or until everything is done."""
        history = self._history
        inputs: list[tuple[int, int, Callable[[], object]]] = [
            *((life.turn, life.place, partial(self._add, life)) for life in history.lives),
            *((turn, place, self._scheduler.pool.reset_cache) for turn, place in history.resets),
            *((turn, place, self._clear) for turn, place in history.clears),
        ]
        inputs.sort(key=lambda one: one[1], reverse=True)
        while True:
            for number in list(self._num_generated):
                self._end_when_due(number)
            while inputs and inputs[-1][0] <= self._turn:
                _, place, call = inputs.pop()
                heappush(self._due, (place, call))
            while self._due:
                heappop(self._due)[1]()
            if self._turn == num_turns or (num_turns is None and not inputs and not self._loop.has_work):
                return
            deltas = self._loop.step()
            self._turn += 1
            for delta in deltas:
                number = int(delta.request_id)
                if delta.token_ids:
                    self._num_generated[number] += len(delta.token_ids)
                    self._news[number] = self._turn
                if delta.finish_reason is not None:
                    del self._num_generated[number]

    def _add(self, life: Life) -> None:
        arrival, number = life.arrival, life.arrival.number
        stops = life.finish is not None and life.finish.in_commit and life.finish.reason == FinishReason.STOP
        params = SamplingParams(
            max_tokens=None if arrival.max_tokens < 0 else arrival.max_tokens,
            ignore_eos=True,
            stop_token_ids=(self._texts[number][-1],) if stops else (),  # nowhere else in it
            skip_reading_prefix_cache=not arrival.reads_prefix_cache,
            structured_outputs=StructuredOutputsParams(json_object=True) if arrival.constrained else None,
        )
        prompt = tuple(self._texts[number][: arrival.num_prompt_tokens])
        try:
            self._scheduler.add(
                Request(
                    str(number), prompt, params, priority=arrival.priority, namespace=str(arrival.namespace),
                    tenant=arrival.tenant,
                )
            )  # fmt: skip
        except InvalidRequest as error:
            self.refused.append((arrival.id, error.message))
            return
        self._num_generated[number], self._news[number] = 0, self._turn
        self._end_when_due(number)

    def _end_when_due(self, number: int) -> None:
        """Of one that was ended from outside, or was at work when the recording ended."""
        life = self._history.lives[number]
        if life.finish and life.finish.in_commit:
            return
        number_of_turns = self._history.num_turns
        end, place = (life.finish_turn, life.finish_place) if life.finish else (number_of_turns, LAST + number)
        if (
            self._num_generated[number] >= life.num_generated
            and self._turn - self._news[number] >= end - life.last_turn
        ):
            leave: Callable[[], object] = partial(self._abort, life)
            heappush(self._due, (place, leave))

    def _abort(self, life: Life) -> None:
        reason = FinishReason(life.finish.reason) if life.finish else FinishReason.ABORT
        self._scheduler.abort(str(life.arrival.number), reason)
        self._num_generated.pop(life.arrival.number, None)

    def _clear(self) -> None:
        self._loop.clear()
        self._num_generated.clear()


class _Device:
    """Returns the texts that there are; a chunk that went wrong goes wrong again."""

    def __init__(self, lives: list[Life], texts: list[list[int]]) -> None:
        self._lives, self._texts = lives, texts
        self._slots: dict[int, int] = {}
        self._result = StepResult([])

    def launch(self, step: Step) -> None:
        for admit in step.admits:
            self._slots[admit.slot] = int(admit.request.id)
        self._result = StepResult([])
        for i, chunk in enumerate(step.chunks):
            number, end = self._slots[chunk.slot], chunk.start + chunk.length
            text, life = self._texts[number], self._lives[number]
            tokens = text[end : end + step.repeat] if chunk.samples else []
            # Of what comes behind the end of a text the scheduler takes nothing.
            tokens += [0] * (step.repeat - len(tokens)) if chunk.samples else []
            self._result.tokens.append(tokens)
            if 0 <= life.fault_end <= end + step.repeat - 1:
                self._result.faults[i] = "as recorded"

    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]:
        result = self._result
        return lambda: result

    def close(self) -> None:
        """There is nothing to give back."""


def texts(history: History) -> list[list[int]]:
    """Prompt and answer of each request: made-up tokens, equal where the recording says that blocks are.

    Positions of a block that has several labels (a prompt's end, and the full block it became) are the same under each.
    """
    size = history.settings.block_size
    same: dict[tuple[int, int], tuple[int, int]] = {}  # (label, offset) to one that has the same token

    def find(one: tuple[int, int]) -> tuple[int, int]:
        while one in same:
            one = same[one]
        return one

    for life in history.lives:
        for labels in life.content.values():
            first_count, first = labels[0]
            for others, other in labels[1:]:
                for offset in range(min(first_count, others)):
                    a, b = find((first, offset)), find((other, offset))
                    if a != b:
                        same[a] = b
                if others > first_count:
                    first_count, first = others, other
    fresh = count(1)
    tokens: dict[tuple[int, int], int] = {}
    result = []
    for life in history.lives:
        text = [next(fresh) for _ in range(life.arrival.num_prompt_tokens + life.num_generated)]
        for i, labels in life.content.items():
            begin = i * size
            num_known, label = max(labels)
            for offset in range(min(num_known, len(text) - begin)):
                key = find((label, offset))
                text[begin + offset] = tokens.setdefault(key, text[begin + offset])
        result.append(text)
    return result
