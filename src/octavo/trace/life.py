"""A recording folded into steps and lives: who had which blocks when, and how far each was computed."""

from collections import deque
from dataclasses import dataclass, field

from octavo.observe.trace import (
    Admit,
    Arrival,
    Clear,
    Commit,
    Evict,
    Finish,
    Plan,
    Preempt,
    Reset,
    Seal,
    Settings,
    Stall,
    Trace,
)


@dataclass(slots=True)
class Share:
    """One request's part of a step: positions [start, end) are computed."""

    number: int
    start: int
    end: int
    samples: bool
    new_blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class StepOf:
    """Times are microseconds since the recording began. `committed` is -1 for a step that never was."""

    launched: int
    repeat: int
    shares: list[Share]
    copies: list[tuple[int, int]]
    masked: bool = False
    committed: int = -1
    began: int = 0  # launched, or when the step before was committed

    @property
    def micros(self) -> int:
        """What the step took, without the time it lay behind another one; -1 when it never ended."""
        return self.committed - self.began if self.committed >= 0 else -1


@dataclass(slots=True)
class Stay:
    """From an admission to its end: the sequence had a slot and blocks in the steps [first, end)."""

    slot: int
    first: int
    end: int = -1  # -1 at work when the recording ends
    num_shared: int = 0  # positions found in shared blocks
    num_copied: int = 0  # positions found in a block that was copied
    num_known: int = 0
    blocks: list[tuple[int, int]] = field(default_factory=list)  # (step, block), in the order of the table
    ends: list[tuple[int, int]] = field(default_factory=list)  # (step, positions computed after it)
    preempted_by: int = -1
    num_lost: int = 0

    def table(self, step: int) -> list[int]:
        """The block table while `step` runs."""
        return [block for since, block in self.blocks if since <= step] if self.holds(step) else []

    def holds(self, step: int) -> bool:
        return self.first <= step and (self.end < 0 or step < self.end)

    def computed(self, step: int) -> int:
        """Positions whose KV is there when `step` is done."""
        done = self.num_shared + self.num_copied
        for at, end in self.ends:
            if at > step:
                break
            done = end
        return done


@dataclass(slots=True)
class Life:
    """One sequence. Steps are counted from 0; `turn` counts the visits of the scheduler, also those without a step."""

    arrival: Arrival
    at: int  # microseconds
    step: int  # the next one when it arrived
    turn: int
    place: int  # among the records
    stays: list[Stay] = field(default_factory=list)
    first_token: int = -1  # step
    last_turn: int = 0  # at which tokens came
    num_generated: int = 0
    finish: Finish | None = None
    finish_at: int = -1
    finish_step: int = -1
    finish_turn: int = -1
    finish_place: int = -1
    fault_end: int = -1  # positions computed by the chunk that went wrong
    content: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by block: (positions, label)

    @property
    def id(self) -> str:
        return self.arrival.id

    @property
    def num_preemptions(self) -> int:
        return sum(stay.preempted_by >= 0 for stay in self.stays)

    @property
    def num_cached(self) -> int:
        """Positions that the first admission found."""
        return self.stays[0].num_shared + self.stays[0].num_copied if self.stays else 0


@dataclass(slots=True)
class History:
    settings: Settings
    steps: list[StepOf] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    evictions: list[tuple[int, int, int]] = field(default_factory=list)  # (step, block, number of who got it)
    resets: list[tuple[int, int]] = field(default_factory=list)  # (turn, place)
    clears: list[tuple[int, int]] = field(default_factory=list)
    num_turns: int = 0
    micros: int = 0
    num_records: int = 0


def fold(trace: Trace) -> History:
    """The whole story of a recording."""
    return _Fold(trace).history


class _Fold:
    def __init__(self, trace: Trace) -> None:
        settings = trace.header.settings
        self.size, self.max_model_len = settings.block_size, settings.max_model_len
        self.history = History(settings, num_records=len(trace.records))
        self.numbers: list[int] = []
        self.positions: dict[int, int] = {}
        self.flights: deque[StepOf] = deque()
        self.evicted: set[int] = set()
        self.committed = 0
        for place, record in enumerate(trace.records):
            self._take(place, record)

    def _take(self, place: int, record: object) -> None:
        history = self.history
        match record:
            case Plan():
                self._plan(record)
            case Commit():
                self._commit(record)
            case Arrival():
                history.micros += record.delay
                life = Life(record, history.micros, len(history.steps), history.num_turns, place)
                life.last_turn = history.num_turns
                history.lives.append(life)
                self._know(record.number, 0, record.num_prompt_tokens, record.content)
            case Admit():
                self._admit(record)
            case Finish():
                life = history.lives[record.number]
                life.finish, life.finish_at, life.finish_step = record, history.micros, len(history.steps)
                life.finish_turn, life.finish_place = history.num_turns, place
                if record.in_commit and record.reason == "error" and self.flights:
                    life.fault_end = next(
                        (share.end for share in self.flights[0].shares if share.number == record.number), -1
                    )
                self._leave(life)
            case Preempt():
                life = history.lives[record.number]
                life.stays[-1].preempted_by, life.stays[-1].num_lost = record.by, record.num_lost
                self._leave(life)
            case Seal():
                self._know(record.number, record.start // self.size, record.count, record.content)
            case Evict():
                self.evicted.update(record.blocks)
            case Stall():
                history.num_turns += 1
            case Reset():
                history.resets.append((history.num_turns, place))
            case Clear():
                history.clears.append((history.num_turns, place))
                self.flights.clear()

    def _admit(self, record: Admit) -> None:
        stay = Stay(record.slot, len(self.history.steps), num_shared=record.num_shared, num_known=record.num_tokens)
        stay.blocks = [(stay.first, block) for block in record.blocks]
        self.history.lives[record.number].stays.append(stay)
        self.positions[record.number] = record.num_shared
        self._reused(record.number, record.blocks)
        first = self.history.lives[record.number].arrival.num_prompt_tokens // self.size
        self._know(record.number, first, len(record.content) * self.size, record.content)

    def _know(self, number: int, first: int, num_positions: int, content: list[int]) -> None:
        """Labels of the blocks from `first` on."""
        for i, label in enumerate(content):
            one = min(self.size, num_positions - i * self.size), label
            labels = self.history.lives[number].content.setdefault(first + i, [])
            if one not in labels:
                labels.append(one)

    def _reused(self, number: int, blocks: list[int]) -> None:
        for block in self.evicted.intersection(blocks):
            self.history.evictions.append((len(self.history.steps), block, number))
            self.evicted.discard(block)

    def _plan(self, record: Plan) -> None:
        history = self.history
        history.num_turns += 1
        history.micros += record.delay
        self.numbers = self.numbers if record.numbers is None else record.numbers
        lengths = record.lengths or [1] * len(self.numbers)
        new_blocks = dict(record.new_blocks)
        targets = {target for _, target in record.copies}
        step, shares = len(history.steps), []
        for i, (number, length) in enumerate(zip(self.numbers, lengths, strict=True)):
            life = history.lives[number]
            stay = life.stays[-1]
            if targets and stay.first == step and targets & {block for _, block in stay.blocks}:
                stay.num_copied = stay.num_known - 1 - stay.num_shared
                self.positions[number] = stay.num_known - 1
            start = self.positions[number]
            end = start + length
            samples = end >= stay.num_known
            if record.repeat > 1:
                end = min(start + record.repeat, self._max_length(life) - 1)
            self.positions[number] = end
            stay.ends.append((step, end))
            blocks = new_blocks.get(i, [])
            if blocks:
                stay.blocks += [(step, block) for block in blocks]
                self._reused(number, blocks)
            shares.append(Share(number, start, end, samples, tuple(blocks)))
        planned = StepOf(history.micros, record.repeat, shares, record.copies, record.masked)
        history.steps.append(planned)
        self.flights.append(planned)

    def _commit(self, record: Commit) -> None:
        history = self.history
        history.micros += record.delay
        if not self.flights:
            return
        step = self.flights.popleft()
        index = len(history.steps) - 1 - len(self.flights)
        step.began, step.committed = max(step.launched, self.committed), history.micros
        self.committed = history.micros
        for share in step.shares:
            life, finish = history.lives[share.number], history.lives[share.number].finish
            if not share.samples or (finish and not (finish.in_commit and life.finish_turn == history.num_turns)):
                continue
            most = finish.num_generated if finish else self._max_length(life) - life.arrival.num_prompt_tokens
            count = min(life.num_generated + step.repeat, most)
            if count > life.num_generated:
                life.num_generated, life.last_turn = count, history.num_turns
                if life.first_token < 0:
                    life.first_token = index

    def _max_length(self, life: Life) -> int:
        most = life.arrival.max_tokens
        return self.max_model_len if most < 0 else min(life.arrival.num_prompt_tokens + most, self.max_model_len)

    def _leave(self, life: Life) -> None:
        if life.stays and life.stays[-1].end < 0:
            life.stays[-1].end = len(self.history.steps)
