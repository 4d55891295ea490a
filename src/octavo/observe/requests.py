"""One sequence from its arrival to its end, as the metrics and the traces see it."""

from dataclasses import dataclass, field

from octavo.types import FinishReason, Request


@dataclass(slots=True)
class Group:
    """A user's request: what its n sequences have in common."""

    n: int
    most_generated: int = 0
    num_finished: int = 0


@dataclass(slots=True)
class Record:
    """Times are seconds of the metrics' clock; None for what has not happened (yet)."""

    request: Request
    group: Group
    arrived_at: float
    traceparent: str = ""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrived_at, self.first_token_at)

    @property
    def e2e(self) -> float | None:
        return _between(self.arrived_at, self.finished_at)

    @property
    def queue_time(self) -> float | None:
        """From the arrival at the server; of a sequence that never got a slot, all the time it waited for one."""
        return _between(self.arrived_at, self.finished_at if self.admitted_at is None else self.admitted_at)

    @property
    def prefill_time(self) -> float | None:
        return _between(self.admitted_at, self.first_token_at)

    @property
    def decode_time(self) -> float | None:
        return _between(self.first_token_at, self.last_token_at)

    @property
    def inference_time(self) -> float | None:
        return _between(self.admitted_at, self.last_token_at)

    @property
    def time_per_output_token(self) -> float | None:
        decode = self.decode_time
        return None if decode is None or self.num_generated < 2 else decode / (self.num_generated - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class Live:
    """All sequences that have not ended."""

    records: dict[str, Record] = field(default_factory=dict)
    _groups: dict[str, Group] = field(default_factory=dict)

    def add(self, request: Request, arrived_at: float, traceparent: str) -> None:
        n = request.params.n
        # The n sequences of a request differ in what follows the last dot of their ids.
        group = self._groups.setdefault(request.id.rpartition(".")[0], Group(n)) if n > 1 else Group(1)
        self.records[request.id] = Record(request, group, arrived_at, traceparent)

    def finish(self, record: Record) -> bool:
        """Whether it was the last of its request."""
        group = record.group
        del self.records[record.request.id]
        group.num_finished += 1
        group.most_generated = max(group.most_generated, record.num_generated)
        if group.num_finished < group.n:
            return False
        self._groups.pop(record.request.id.rpartition(".")[0], None)
        return True
