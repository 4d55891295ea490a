"""Decide what the device computes next, and take in what it computed. No torch, no I/O, no clock."""

from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from operator import attrgetter

from octavo.core.blocks import BlockPool
from octavo.core.events import (
    Added,
    Admitted,
    Cleared,
    Committed,
    Event,
    Finished,
    Freed,
    Planned,
    Preempted,
    Sealed,
    Stalled,
)
from octavo.core.policy import LOOK_AHEAD, MAX_BYPASS, Fairness, Policy, headroom, loss, rank, victim
from octavo.core.sequence import Sequence
from octavo.core.step import Admit, Chunk, Step, StepResult
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.types import Delta, FinishReason, Request

by_rank = attrgetter("rank")


@dataclass(slots=True)
class Flight:
    """A step on its way. Chunk i may bring `counts[i]` tokens and computes the positions up to `ends[i]`."""

    step: Step = field(default_factory=Step)
    seqs: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Scheduler:
    """Continuous batching over a block pool.

    `plan` hands out a budget of positions: to the running sequences in the order of their rank, then to
    waiting ones. `commit` takes the results back, in the order of the plans. `plan` may be called again
    before `commit`: so the host gets ahead of the device. The device runs steps in the order they were
    planned; blocks and slots are therefore free the moment a sequence leaves, whatever is in flight.

    Args:
        max_num_seqs: sequences that run at a time, which is also the number of device slots.
        max_num_batched_tokens: positions of a step.
        max_model_len: tokens of a sequence, prompt and generated ones together.
        num_scheduler_steps: how often the device may repeat a step that only decodes.
        policy: "fcfs", or "priority" (smaller `Request.priority` first, then first come).
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_scheduler_steps: int = 1,
        policy: Policy = "fcfs",
    ) -> None:
        _check_limits(pool, max_num_seqs, max_num_batched_tokens, max_model_len, num_scheduler_steps, policy)
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_scheduler_steps = num_scheduler_steps
        self.policy = policy
        self.num_preemptions = 0
        self.fairness = Fairness(max_num_batched_tokens)
        self.subscribers = pool.subscribers
        self._num_added = 0
        self._live: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight: deque[Flight] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of what waits."""
        return sum(seq.num_prompt_tokens for seq in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Some request is not finished. Steps in flight are not counted: the loop that launched them knows."""
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: its id is that of a request still at work, or its prompt leaves no room for a token.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if request.id in self._live:
            raise InvalidRequest(f"A request with id {request.id!r} is still running.", "Give each its own id.", "id")
        if not 0 < num_prompt_tokens < self.max_model_len:
            raise InvalidRequest(
                f"A prompt of {num_prompt_tokens} tokens cannot run: it must have at least 1 and leave room for one "
                f"more within max_model_len={self.max_model_len}.",
                param="prompt_token_ids",
            )
        params = request.params
        end = self.max_model_len if params.max_tokens is None else num_prompt_tokens + params.max_tokens
        seq = Sequence(request, rank(request, self._num_added, self.policy), min(end, self.max_model_len))
        self._num_added += 1
        self._live[request.id] = seq
        insort(self._waiting, seq, key=by_rank)
        self.fairness.join(request.tenant)
        if self.subscribers:
            self._tell(Added(request.id, num_prompt_tokens, request))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, in whatever state it is. No delta of it follows. False if it is not at work."""
        seq = self._live.get(request_id)
        if seq is None:
            return False
        self._finish(seq, reason)
        return True

    def clear(self) -> None:
        """Drop all requests, steps in flight and cached blocks: for when a plan, a step or a commit broke off.

        Such a break can leave any of the books half written, so all are begun again.
        """
        if self.subscribers:
            self._tell(Cleared())
        seqs = list(self._live.values())
        for queue in (self._live, self._waiting, self._running, self._in_flight):
            queue.clear()
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self.fairness = Fairness(self.max_num_batched_tokens)
        self.pool.clear()
        if self.subscribers:
            for seq in seqs:
                if seq.blocks:
                    self._tell(Freed(seq.request.id, tuple(seq.blocks)))
                self._tell(Finished(seq.request.id, FinishReason.ABORT, seq.num_prompt_tokens, seq.num_generated))

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to launch before something is committed or added."""
        flight = Flight()
        num_preemptions = self.num_preemptions
        shares = self._shares()
        budget = self._plan_running(flight, shares)
        if self.num_preemptions == num_preemptions:
            self._plan_waiting(flight, budget, shares)
            if self.num_scheduler_steps > 1 and not flight.step.masked:
                self._repeat(flight)
        step = flight.step
        if not step.chunks:
            if self.subscribers:
                self._tell(Stalled())
            return None
        self._in_flight.append(flight)
        if self.subscribers:
            self._tell(Planned(step, tuple(seq.request.id for seq in flight.seqs)))
        return step

    def commit(self, step: Step, result: StepResult) -> list[Delta]:
        """Take in what the oldest step in flight brought: one delta for each sequence it changed.

        Results of sequences that ended meanwhile are dropped; those of preempted ones still count.

        Raises:
            ValueError: `step` is not the oldest in flight, or `result` is not of its shape.
        """
        if not self._in_flight or self._in_flight[0].step is not step:
            raise ValueError("commit must be given the steps in the order in which they were planned, each once")
        flight = self._in_flight.popleft()
        deltas = []
        faults, completed = result.faults, result.completed
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        chunks = zip(flight.seqs, flight.counts, flight.ends, result.tokens, strict=True)
        for i, (seq, count, end, tokens) in enumerate(chunks):
            ended_before = seq.finish_reason is not None
            seq.in_flight -= 1
            seq.pending -= count
            if ended_before:
                continue
            if i in faults:
                deltas.append(self._fail(seq, faults[i]))
                continue
            num_accepted = seq.accept(tokens)
            is_complete = i in completed and seq.finish_reason is not FinishReason.STOP
            if is_complete:
                seq.finish_reason = FinishReason.STOP
            if end >= seq.seals_at and seq.slot >= 0:
                # What a repeat computed after a stop is not the sequence's own.
                self._seal(seq, min(end, len(seq.tokens)))
            if not tokens and not prompt_logprobs.get(i):
                continue
            delta = Delta(seq.request.id, tokens if num_accepted == len(tokens) else tokens[:num_accepted])
            delta.num_cached_tokens = seq.num_cached_tokens or 0
            if logprobs:
                delta.logprobs = logprobs[i][:num_accepted]
            if i in prompt_logprobs:
                delta.prompt_logprobs = prompt_logprobs[i]
                delta.prompt_logprobs_start = step.chunks[i].start + 1
            if seq.finish_reason is not None:
                delta.finish_reason, delta.stop_reason = seq.finish_reason, seq.stop_reason
                delta.completed = is_complete
                self._finish(seq, seq.finish_reason)
            deltas.append(delta)
        if self.subscribers:
            self._tell(Committed(step, result, tuple(deltas)))
        return deltas

    def check(self) -> None:
        """Raise RuntimeError unless blocks and slots are with exactly those that run."""
        self.pool.check()
        held = [block for seq in self._running for block in seq.blocks]
        slots = [seq.slot for seq in self._running]
        ordered = all(sorted(queue, key=by_rank) == queue for queue in (self._running, self._waiting))
        if any(seq.blocks for seq in self._waiting) or not ordered or len(set(slots)) != len(slots):
            raise RuntimeError("The scheduler is inconsistent: its queues are out of order or share slots or blocks.")
        if len(self._live) != len(self._waiting) + len(self._running) or set(slots) & set(self._free_slots):
            raise RuntimeError("The scheduler is inconsistent: a request is lost, or a slot is both free and in use.")
        self.pool.check_references(held)

    def _shares(self) -> Counter[str]:
        """Prefill positions that each tenant may have in the next step; empty while there is one tenant."""
        if not self.fairness.has_several:
            return Counter()
        wanted = Counter[str]()
        for seq in self._running:
            if seq.remaining > 1:
                wanted[seq.request.tenant] += seq.remaining
        for seq in self._waiting:
            wanted[seq.request.tenant] += len(seq.tokens)
        return Counter(self.fairness.shares(wanted))

    def _plan_running(self, flight: Flight, shares: Counter[str]) -> int:
        """Give every running sequence its share. Returns what is left of the budget."""
        budget, block_size = self.max_num_batched_tokens, self.pool.block_size
        num_behind = len(self._running)
        for seq in self._running.copy():
            num_behind -= 1
            if not budget:
                break
            num_known = len(seq.tokens) + seq.pending
            if num_known >= seq.max_length or seq.slot < 0:  # all is in flight; preempted a moment ago
                continue
            length = num_known - seq.scheduled
            if length > 1:
                # One position is kept for each sequence behind: a long prefill never makes decoding wait.
                length = min(length, max(1, budget - num_behind))
                if shares:
                    length = min(length, shares[seq.request.tenant])
                    shares[seq.request.tenant] -= length
                    if not length:
                        continue
            new_blocks: tuple[int, ...] | None = ()
            if seq.scheduled + length > len(seq.blocks) * block_size:
                new_blocks = self._grow(seq, length)
            if new_blocks is not None:
                self._take(flight, seq, length, new_blocks)
                budget -= length
        return budget

    def _plan_waiting(self, flight: Flight, budget: int, shares: Counter[str]) -> None:
        """Admit in the order of rank; of several tenants, those that had the least come first.

        One that lacks blocks is overtaken by others as important, but only a bounded number of times, and
        not at all once it was preempted: then it comes back before anything newer starts. One whose next
        block another sequence is computing waits for it, and is passed meanwhile.
        """
        blocked: list[Sequence] = []
        queue = self._waiting.copy()
        if shares:
            queue.sort(key=lambda seq: (seq.rank[0], self.fairness.served[seq.request.tenant], seq.rank[1]))
        for seq in queue:
            if not budget or not self._free_slots or len(blocked) >= LOOK_AHEAD:
                break
            # A preempted one with results in flight comes back when they are in; the less important wait.
            if seq.in_flight or seq.rank[0] > self._waiting[0].rank[0]:
                break
            room = min(budget, shares[seq.request.tenant]) if shares else budget
            found = self._find(seq) if room else None
            if found is None:
                continue
            length = self._admit(flight, seq, *found, room)
            if length:
                _remove(self._waiting, seq)
                budget -= length
                if shares:
                    shares[seq.request.tenant] -= length
                for overtaken in blocked:
                    overtaken.num_bypasses += 1
            else:
                blocked.append(seq)
            if any(seq.was_preempted or seq.num_bypasses >= MAX_BYPASS for seq in blocked):
                break

    def _find(self, seq: Sequence) -> tuple[list[int], int | None] | None:
        """The blocks this sequence need not compute, and one to copy; None while another computes what it needs next.

        A promise ends when its block is sealed or released, so the wait ends with the other's prefill,
        preemption or end. The last known token is always computed: its logits are wanted. So the block it is in
        is never shared: with everything before it found, that block is copied.
        """
        pool = self.pool
        if pool.is_promised(seq.awaits):
            return None
        seq.renew_hashes(pool)
        if not seq.request.reads_prefix_cache:
            return [], None
        wanted = seq.hashes[: (len(seq.tokens) - 1) // pool.block_size]
        cached = pool.match(wanted)
        seq.awaits = wanted[len(cached)] if len(cached) < len(wanted) else seq.tail
        if pool.is_promised(seq.awaits):
            return None
        return cached, pool.find(seq.tail) if len(cached) == len(wanted) else None

    def _admit(self, flight: Flight, seq: Sequence, cached: list[int], copied: int | None, budget: int) -> int:
        """Reserve blocks for all known tokens and plan the first chunk; returns its length, 0 if blocks lack."""
        pool = self.pool
        needed = self._blocks_for(len(seq.tokens)) - len(cached)
        if needed + headroom(len(self._running)) > pool.num_free_without(cached):
            return 0
        pool.acquire(cached)
        reserved = pool.allocate(needed) or []
        for block, content_hash in zip(reserved, [*seq.hashes[len(cached) :], seq.tail], strict=False):
            if content_hash:
                pool.promise(block, content_hash)
        seq.slot = self._free_slots.pop()
        seq.blocks = cached + reserved
        seq.num_sealed = len(cached)
        seq.scheduled = num_shared = len(cached) * pool.block_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_shared
        if copied is not None:
            flight.step.copies.append((copied, reserved[0]))
            seq.scheduled = len(seq.tokens) - 1
        seq.num_cached = seq.scheduled
        seq.num_known = len(seq.tokens)
        seq.seals_at = min(num_shared + pool.block_size, seq.num_known)
        insort(self._running, seq, key=by_rank)
        blocks = tuple(seq.blocks)
        flight.step.admits.append(Admit(seq.slot, tuple(seq.tokens), blocks, seq.request))
        if self.subscribers:
            self._tell(Admitted(seq.request.id, seq.slot, blocks, num_shared, seq.num_prompt_tokens, len(seq.tokens)))
        length = min(seq.remaining, budget)
        self._take(flight, seq, length, ())
        return length

    def _grow(self, seq: Sequence, length: int) -> tuple[int, ...] | None:
        """Blocks for `length` more positions; None when the sequence had to give up its own instead."""
        needed = self._blocks_for(seq.scheduled + length) - len(seq.blocks)
        while (blocks := self.pool.allocate(needed)) is None:
            # The first in rank never gives up its own, so something always goes on. Those behind have
            # no chunk in this step yet.
            first = bisect_left(self._running, seq.rank, key=by_rank)
            loser = victim(self._running[max(first, 1) :])
            self._preempt(loser, seq)
            if loser is seq:
                return None
        seq.blocks += blocks
        return tuple(blocks)

    def _take(self, flight: Flight, seq: Sequence, length: int, new_blocks: tuple[int, ...]) -> None:
        start = seq.scheduled
        seq.scheduled = end = start + length
        samples = end == len(seq.tokens) + seq.pending
        flight.step.chunks.append(Chunk(seq.slot, start, length, new_blocks, samples))
        flight.seqs.append(seq)
        flight.counts.append(1 if samples else 0)
        flight.ends.append(end)
        seq.pending += samples
        seq.in_flight += 1
        if samples and seq.constrained:
            flight.step.masked = True
        if self.fairness.has_several:
            self.fairness.charge(seq.request.tenant, length)

    def _repeat(self, flight: Flight) -> None:
        """Let the device run a step of pure decoding several times, if blocks for all of it are free."""
        step = flight.step
        if not step.chunks or not all(chunk.samples and chunk.length == 1 for chunk in step.chunks):
            return
        repeat = min(self.num_scheduler_steps, 1 + max(seq.room for seq in flight.seqs))
        more = [min(repeat - 1, seq.room) for seq in flight.seqs]
        needed = [
            max(0, self._blocks_for(seq.scheduled + n) - len(seq.blocks))
            for seq, n in zip(flight.seqs, more, strict=True)
        ]
        if repeat == 1 or sum(needed) > self.pool.num_free:
            return
        step.repeat = repeat
        for i, seq in enumerate(flight.seqs):
            seq.scheduled += more[i]
            seq.pending += more[i]
            flight.counts[i] += more[i]
            flight.ends[i] += more[i]
            if needed[i]:
                blocks = self.pool.allocate(needed[i]) or []
                seq.blocks += blocks
                chunk = step.chunks[i]
                step.chunks[i] = replace(chunk, new_blocks=chunk.new_blocks + tuple(blocks))

    def _seal(self, seq: Sequence, num_final: int) -> None:
        """Publish the blocks that became full, now that their tokens and their KV are final, and a prompt's end."""
        block_size = self.pool.block_size
        num_full = num_final // block_size
        begin, end = seq.num_sealed * block_size, num_full * block_size
        if seq.tail and seq.seals_at <= seq.num_known <= num_final:
            self.pool.seal(seq.blocks[(seq.num_known - 1) // block_size], seq.tail)
            end = max(end, seq.num_known)
        seq.seals_at = (num_full + 1) * block_size
        if num_final < seq.num_known:
            seq.seals_at = min(seq.seals_at, seq.num_known)
        if num_full > seq.num_sealed:
            seq.hash_blocks(block_size)
            for i in range(seq.num_sealed, num_full):
                self.pool.seal(seq.blocks[i], seq.hashes[i])
            seq.num_sealed = num_full
        if self.subscribers and begin < end:
            blocks = seq.blocks[begin // block_size : self._blocks_for(end)]
            self._tell(Sealed(seq.request.id, tuple(blocks), begin, tuple(seq.tokens[begin:end])))

    def _preempt(self, seq: Sequence, by: Sequence) -> None:
        self.num_preemptions += 1
        if self.subscribers:
            self._tell(Preempted(seq.request.id, by.request.id, loss(seq)))
        self._leave(seq)
        seq.was_preempted = True
        insort(self._waiting, seq, key=by_rank)

    def _fail(self, seq: Sequence, error: str) -> Delta:
        # What a faulty computation left in the cache would be a fault of everybody who hits it.
        self.pool.forget([*seq.hashes, seq.tail])
        self._finish(seq, FinishReason.ERROR)
        return Delta(seq.request.id, [], finish_reason=FinishReason.ERROR, error=error)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.slot >= 0:
            self._leave(seq)
        else:
            _remove(self._waiting, seq)
        seq.finish_reason = reason
        del self._live[seq.request.id]
        self.fairness.leave(seq.request.tenant)
        if self.subscribers:
            self._tell(Finished(seq.request.id, reason, seq.num_prompt_tokens, seq.num_generated))

    def _leave(self, seq: Sequence) -> None:
        _remove(self._running, seq)
        self.pool.release(seq.blocks)
        self._free_slots.append(seq.slot)
        if self.subscribers:
            self._tell(Freed(seq.request.id, tuple(seq.blocks)))
        seq.blocks, seq.slot = [], -1

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.pool.block_size)

    def _tell(self, event: Event) -> None:
        for subscriber in self.subscribers:
            subscriber(event)


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    del queue[bisect_left(queue, seq.rank, key=by_rank)]


def _check_limits(
    pool: BlockPool, num_seqs: int, num_batched_tokens: int, model_len: int, num_steps: int, policy: str
) -> None:
    limits = {
        "max_num_seqs": (num_seqs, 1),
        "max_num_batched_tokens": (num_batched_tokens, 1),
        "max_model_len": (model_len, 2),
        "num_scheduler_steps": (num_steps, 1),
    }
    for name, (value, least) in limits.items():
        if value < least:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be at least {least}.")
    if policy not in ("fcfs", "priority"):
        raise InvalidConfig(f"policy={policy!r} is not allowed: it must be 'fcfs' or 'priority'.")
    capacity = pool.num_usable * pool.block_size
    if model_len - 1 > capacity:
        raise InvalidConfig(
            f"max_model_len={model_len} does not fit the KV cache: its {pool.num_usable} blocks of {pool.block_size} "
            f"hold {capacity} positions, so one sequence could never finish.",
            "Lower max_model_len or give the KV cache more memory.",
        )
