"""A device whose KV is a digest of everything before it, and workloads that find out whether the core abuses it.

The value at a position depends on every token up to it and is read through block tables only, so a block
that was freed too early, shared wrongly or hit before it was computed changes the text.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from octavo.core import blocks, scheduler
from octavo.core.events import Event, Preempted
from octavo.core.step import Chunk, Step, StepResult
from octavo.types import Delta, FinishReason, Request, SamplingParams, TokenLogprobs

VOCABULARY = 7


def fold(digest: int, token: int) -> int:
    return hash((digest, token))


def first_digest(request: Request, weights: int) -> int:
    """Adapters and the like are in the namespace: equal tokens have another KV there."""
    return crc32(repr((weights, request.namespace)).encode())


def sample(digest: int, seed: int) -> int:
    return hash((digest, seed)) % VOCABULARY


@dataclass
class Expected:
    """What a request generates when nothing else is in the engine."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None = None


def one_by_one(request: Request, max_model_len: int = 10**9, weights: int = 0) -> Expected:
    digest = first_digest(request, weights)
    for token in request.prompt_token_ids:
        digest = fold(digest, token)
    params, generated = request.params, []
    while True:
        token = sample(digest, request.seed)
        digest = fold(digest, token)
        generated.append(token)
        if token in request.stop_token_ids and len(generated) >= params.min_tokens:
            return Expected(generated, FinishReason.STOP, token if token in params.stop_token_ids else None)
        if len(generated) == params.max_tokens or len(request.prompt_token_ids) + len(generated) == max_model_len:
            return Expected(generated, FinishReason.LENGTH)


@dataclass
class Row:
    """A device slot."""

    tokens: list[int]
    blocks: list[int]
    request: Request
    digest: int


class FakeDevice:
    """Runs steps at once, in the order they are launched; their results may be fetched any time later.

    `faults` gives, by request id, the number of generated tokens at which the device reports a fault.
    """

    def __init__(self, num_blocks: int, block_size: int, faults: dict[str, int] | None = None) -> None:
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self.faults = faults or {}
        self.weights = 0
        self.num_computed = 0

    def run(self, step: Step) -> StepResult:
        for admit in step.admits:
            digest = first_digest(admit.request, self.weights)
            self.rows[admit.slot] = Row(list(admit.tokens), list(admit.blocks), admit.request, digest)
        copied = [list(self.kv[source]) for source, _ in step.copies]
        for (_, target), line in zip(step.copies, copied, strict=True):
            self.kv[target] = line
        assert len({chunk.slot for chunk in step.chunks}) == len(step.chunks) > 0
        result = StepResult([[] for _ in step.chunks], [[] for _ in step.chunks])
        for chunk in step.chunks:
            assert chunk.length > 0 and (step.repeat == 1 or (chunk.samples and chunk.length == 1))
            self.rows[chunk.slot].blocks.extend(chunk.new_blocks)
        for run in range(step.repeat):
            for i, chunk in enumerate(step.chunks):
                self._run_chunk(i, chunk, run, result)
        return result

    def _run_chunk(self, i: int, chunk: Chunk, run: int, result: StepResult) -> None:
        row, params = self.rows[chunk.slot], self.rows[chunk.slot].request.params
        num_prompt_tokens = len(row.request.prompt_token_ids)
        digest = row.digest
        for position in range(chunk.start + run, chunk.start + run + chunk.length):
            if position:
                before = self._line(row, position - 1, run)[(position - 1) % self.block_size]
                assert before is not None, "a position is read that was never computed"
                digest = before
            digest = fold(digest, row.tokens[position])
            self._line(row, position, run)[position % self.block_size] = digest
            self.num_computed += 1
            if params.prompt_logprobs is not None and position + 1 < num_prompt_tokens:
                entry = TokenLogprobs((row.tokens[position + 1],), (float(position + 1),), 1)
                result.prompt_logprobs.setdefault(i, []).append(entry)
        if not chunk.samples:
            return
        token = sample(digest, row.request.seed)
        result.tokens[i].append(token)
        row.tokens.append(token)
        if params.logprobs is not None:
            result.logprobs[i].append(TokenLogprobs((token,), (float(len(row.tokens) - 1),), 1))
        if len(row.tokens) - num_prompt_tokens == self.faults.get(row.request.id):
            result.faults[i] = "not a number"

    def _line(self, row: Row, position: int, run: int) -> list[int | None]:
        index = position // self.block_size
        assert index < len(row.blocks) or run, "a position lies past the blocks of its sequence"
        block = row.blocks[index] if index < len(row.blocks) else 0
        assert block or run, "block 0 belongs to nobody"
        return self.kv[block]


class Engine:
    """The loop of an engine on a fake device: up to `depth` steps are launched ahead of the last commit."""

    def __init__(self, core_scheduler: scheduler.Scheduler, device: FakeDevice, depth: int = 0) -> None:
        self.scheduler, self.device, self.depth = core_scheduler, device, depth
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.deltas: list[Delta] = []
        self.deepest = 0
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self) -> Step | None:
        self.num_steps += 1
        assert self.num_steps < 20_000, "no progress"
        step = self.scheduler.plan()
        assert step or self.in_flight or not self.scheduler.has_work, "work, and nothing to wait for"
        if step:
            self.in_flight.append((step, self.device.run(step)))
            self.deepest = max(self.deepest, len(self.in_flight) - 1)
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.commit()
        return step

    def commit(self) -> None:
        self.deltas += self.scheduler.commit(*self.in_flight.popleft())

    def run(self, requests: Iterable[Request] = ()) -> dict[str, "Received"]:
        """Add the requests, go on until there is no work, and say what came, by request id."""
        for request in requests:
            self.scheduler.add(request)
        while self.has_work:
            self.step()
        return received(self.deltas)


@dataclass
class Received:
    """The deltas of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0

    def take(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        assert delta.token_ids or delta.prompt_logprobs or delta.finish_reason, "an empty delta"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs |= dict(enumerate(delta.prompt_logprobs, delta.prompt_logprobs_start))
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens


def received(deltas: Iterable[Delta]) -> dict[str, Received]:
    by_request: dict[str, Received] = {}
    for delta in deltas:
        by_request.setdefault(delta.request_id, Received()).take(delta)
    return by_request


def request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    namespace: str = "",
    tenant: str = "",
    priority: int = 0,
    seed: int = 0,
    **params: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **params)
    return Request(request_id, tuple(prompt), params, namespace=namespace, tenant=tenant, priority=priority, seed=seed)


@dataclass(frozen=True)
class Core:
    """The parts under test; the mutants hand in theirs."""

    BlockPool: type[blocks.BlockPool] = blocks.BlockPool
    Scheduler: type[scheduler.Scheduler] = scheduler.Scheduler


def run_workload(seed: int, core: Core | None = None) -> Counter[str]:
    """One random workload. Asserts that text depends on the request alone; returns what was exercised."""
    return Workload(seed, core or Core()).run()


class Workload:
    """Mixed requests, limits, pool sizes, depths and aborts, all drawn from one seed."""

    def __init__(self, seed: int, core: Core) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 8])
        self.max_model_len = rng.choice([40, 64])
        self.num_seqs = rng.randint(1, 6)
        num_blocks = -(-(self.max_model_len - 1) // self.block_size) + rng.choice([0, 0, 1, 3, 20]) + 1
        self.pool = core.BlockPool(num_blocks, self.block_size)
        self.scheduler = core.Scheduler(
            self.pool,
            self.num_seqs,
            rng.choice([1, 3, 7, 30, 200]),
            self.max_model_len,
            rng.choice([1, 1, 2, 4, 8]),
            rng.choice(["fcfs", "fcfs", "priority"]),
        )
        self.requests = self._requests()
        faults = {r.id: rng.randint(1, 6) for r in self.requests if rng.random() < 0.04}
        self.engine = Engine(
            self.scheduler, FakeDevice(num_blocks, self.block_size, faults), rng.choice([0, 1, 1, 2, 3, 4])
        )
        self.abort_rate = rng.choice([0, 0, 0.02, 0.1])
        self.reset_rate = rng.choice([0, 0, 0, 0.02])
        self.ended_at: dict[str, int] = {}  # aborted: the number of deltas there were
        self.counts: Counter[str] = Counter()
        if rng.random() < 0.7:
            self.scheduler.subscribers.append(self._count)

    def run(self) -> Counter[str]:
        rng, engine = self.rng, self.engine
        waiting = deque(self.requests)
        while waiting or engine.has_work:
            while waiting and rng.random() < 0.5:
                self.scheduler.add(waiting.popleft())
            if rng.random() < self.abort_rate:
                self._abort(rng.choice(self.requests).id)
            if rng.random() < self.reset_rate:
                self.pool.reset_cache()
                self.counts["resets"] += 1
            step = engine.step()
            self._check_step(step)
            self.scheduler.check()
        self._check_texts()
        assert self.pool.num_free == self.pool.num_usable
        self.counts["preemptions"] += self.scheduler.num_preemptions
        self.counts[f"depth {engine.deepest}"] += 1
        return self.counts

    def _requests(self) -> list[Request]:
        rng, requests = self.rng, []
        several = rng.random() < 0.5
        stems = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 20))] for _ in range(2)]
        for i in range(rng.randint(1, 12)):
            prompt = rng.choice(stems) + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 18))]
            copies = rng.choice([1, 1, 1, 2, 4])
            max_tokens = rng.choice([1, 2, rng.randint(1, 24), None])
            params = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens or 30)]),
                stop_token_ids=(rng.randrange(VOCABULARY),) if rng.random() < 0.3 else (),
                ignore_eos=rng.random() < 0.3,
                logprobs=rng.choice([None, 1]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                skip_reading_prefix_cache=rng.random() < 0.1,
            )
            eos = frozenset({rng.randrange(VOCABULARY)}) if rng.random() < 0.3 else frozenset()
            namespace, priority = rng.choice(["", "", "tenant"]), rng.randint(0, 2)
            tenant = rng.choice(["", "", "b", "c"]) if several else ""
            for copy in range(copies):
                requests.append(
                    Request(
                        f"{i}.{copy}", tuple(prompt), params, eos, (), rng.randrange(3), priority, namespace, tenant
                    )
                )
        return requests

    def _abort(self, request_id: str) -> None:
        live = self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id), "aborted twice"
        assert not self.scheduler.abort("never added")
        if live:
            assert request_id not in self.ended_at
            self.ended_at[request_id] = len(self.engine.deltas)
            self.counts["aborts"] += 1

    def _check_step(self, step: Step | None) -> None:
        if step is None:
            return
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(step.chunks) <= self.num_seqs
        assert 1 <= step.repeat <= self.scheduler.num_scheduler_steps
        self.counts["steps"] += 1
        self.counts["repeats"] += step.repeat > 1
        self.counts["mixed"] += any(c.length > 1 for c in step.chunks) and any(c.length == 1 for c in step.chunks)
        held = sum(len(seq.blocks) for seq in self.scheduler._running)
        self.counts["promise waits"] += any(self.pool.is_promised(seq.awaits) for seq in self.scheduler._waiting)
        self.counts["shared blocks"] += held > self.pool.num_usable - self.pool.num_free

    def _check_texts(self) -> None:
        for request_id, number in self.ended_at.items():
            assert all(delta.request_id != request_id for delta in self.engine.deltas[number:]), "a delta after abort"
        texts = received(self.engine.deltas)
        for one in self.requests:
            expected, got = one_by_one(one, self.max_model_len), texts.get(one.id, Received())
            num_tokens, num_prompt_tokens = len(got.token_ids), len(one.prompt_token_ids)
            assert got.token_ids == expected.token_ids[:num_tokens], one
            if got.finish_reason is FinishReason.ERROR:
                assert one.id in self.engine.device.faults
                self.counts["faults"] += 1
            elif one.id in self.ended_at:
                assert got.finish_reason is None
            else:
                assert got.token_ids == expected.token_ids, one
                assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason), one
                if one.params.prompt_logprobs is not None:
                    assert sorted(got.prompt_logprobs) == list(range(1, num_prompt_tokens))
                self.counts[f"ended by {expected.finish_reason}"] += 1
            for position, entry in got.prompt_logprobs.items():
                assert (entry.token_ids[0], entry.logprobs[0]) == (one.prompt_token_ids[position], position)
            if one.params.logprobs is not None:
                positions = range(num_prompt_tokens, num_prompt_tokens + num_tokens)
                assert [(e.token_ids[0], e.logprobs[0]) for e in got.logprobs] == list(
                    zip(got.token_ids, positions, strict=True)
                )
            if not one.reads_prefix_cache:
                assert got.num_cached_tokens == 0
            assert got.num_cached_tokens <= (num_prompt_tokens - 1) // self.block_size * self.block_size
            self.counts["prefix hits"] += got.num_cached_tokens > 0

    def _count(self, event: Event) -> None:
        self.counts[type(event).__name__] += 1
        if isinstance(event, Preempted):
            ranks = {seq.request.id: seq.rank for seq in self.scheduler._running}
            assert ranks[event.request_id] != min(ranks.values()), "the first in rank was preempted"
            assert ranks[event.request_id] >= ranks[event.by], "preempted for one behind it"
