"""The scheduler on a device of digests: text depends on the request alone, whatever else goes on."""

import gc
import random
from collections import Counter
from itertools import count
from typing import Any, get_args

import pytest

from fake_device import (
    VOCABULARY,
    Core,
    Engine,
    FakeDevice,
    Received,
    one_by_one,
    received,
    request,
    run_workload,
)
from octavo.core import blocks, scheduler
from octavo.core.events import Admitted, Event, Evicted, Finished, Freed, Planned, Preempted, Sealed
from octavo.core.policy import MAX_BYPASS
from octavo.core.sequence import Sequence
from octavo.core.step import Step, StepResult
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.types import FinishReason, Request, SamplingParams

OURS = Core()


def make(
    core: Core = OURS,
    *,
    num_blocks: int = 65,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 1000,
    max_model_len: int = 256,
    depth: int = 0,
    faults: dict[str, int] | None = None,
    **options: Any,
) -> Engine:
    pool = core.BlockPool(num_blocks, block_size)
    made = core.Scheduler(pool, max_num_seqs, max_num_batched_tokens, max_model_len, **options)
    return Engine(made, FakeDevice(num_blocks, block_size, faults), depth)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def assert_texts(requests: list[Request], texts: dict[str, Received], max_model_len: int = 256) -> None:
    for one in requests:
        expected = one_by_one(one, max_model_len)
        assert texts[one.id].token_ids == expected.token_ids, one.id
        assert texts[one.id].finish_reason is expected.finish_reason


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


def heard(engine: Engine, *kinds: type[Event]) -> list[Any]:
    log: list[Any] = []
    engine.scheduler.subscribers.append(lambda event: log.append(event) if isinstance(event, kinds) else None)
    return log


# Text depends on the request alone.


@pytest.mark.parametrize("group", range(5))
def test_text_depends_on_the_request_alone(group: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(group * 200, group * 200 + 200):
        try:
            counts += run_workload(seed)
        except BaseException as error:
            error.add_note(f"run_workload({seed}) shows it again")
            raise
    exercised = {
        "preemptions": 200,
        "prefix hits": 300,
        "promise waits": 300,
        "shared blocks": 300,
        "repeats": 500,
        "mixed": 500,
        "aborts": 50,
        "faults": 10,
        "resets": 20,
        "ended by stop": 200,
        "ended by length": 500,
        "Evicted": 500,
        "depth 0": 20,
        "depth 1": 20,
        "depth 2": 20,
        "depth 3": 20,
        "depth 4": 20,
    }
    assert {name: counts[name] for name, least in exercised.items() if counts[name] < least} == {}


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_the_asked_depth_and_repeat_are_reached(depth: int, steps: int) -> None:
    engine = make(depth=depth, num_scheduler_steps=steps)
    requests = [request(str(i), prompt(20, i), 50) for i in range(5)]
    planned = heard(engine, Planned)
    assert_texts(requests, engine.run(requests))
    assert engine.deepest == depth
    assert max(event.step.repeat for event in planned) == steps
    assert_idle(engine)


def test_nothing_is_planned_beyond_what_may_be_generated(core: Core = OURS) -> None:
    engine = make(core, depth=4, num_scheduler_steps=8, block_size=4)
    requests = [request("a", prompt(3), 2), request("b", prompt(5), 11), request("c", prompt(250), None)]
    planned = heard(engine, Planned)
    assert_texts(requests, engine.run(requests))
    ends = Counter[str]()
    for event in planned:
        for chunk, request_id in zip(event.step.chunks, event.request_ids, strict=True):
            ends[request_id] = max(ends[request_id], chunk.start + chunk.length)
    # The last token is never fed back. 256 is max_model_len.
    assert ends["a"] <= 4 and ends["b"] <= 15 and ends["c"] <= 255


def test_a_repeat_is_no_longer_than_the_longest_needs(core: Core = OURS) -> None:
    engine = make(core, num_scheduler_steps=8)
    engine.scheduler.add(request("a", prompt(5), 3))
    engine.scheduler.add(request("b", prompt(6), 5))
    assert (engine.step() or Step()).repeat == 1
    step = engine.step()
    assert step and step.repeat == 4
    assert engine.step() is None
    assert_idle(engine)


def test_without_blocks_for_a_repeat_nobody_is_preempted_for_it(core: Core = OURS) -> None:
    # In the end a needs 4 blocks and b 2 of the 5 there are, but not at the same time.
    engine = make(core, num_blocks=6, block_size=4, num_scheduler_steps=8, max_model_len=20)
    requests = [request("a", prompt(6), 8), request("b", prompt(2, 1), 4)]
    planned = heard(engine, Planned)
    assert_texts(requests, engine.run(requests), 20)
    repeats = [event.step.repeat for event in planned]
    assert repeats == [1, 1, 1, 1, 4]
    assert engine.scheduler.num_preemptions == 0


def test_nobody_repeats_while_someone_can_be_admitted_or_prefills(core: Core = OURS) -> None:
    engine = make(core, num_scheduler_steps=8, max_num_batched_tokens=8)
    planned = heard(engine, Planned)
    engine.scheduler.add(request("a", prompt(4), 60))
    engine.step()
    engine.scheduler.add(request("b", prompt(60), 8))
    engine.run()
    for event in planned:
        assert event.step.repeat == 1 or (not event.step.admits and event.step.num_tokens == len(event.step.chunks))
    assert max(event.step.repeat for event in planned) > 1


def test_a_long_prefill_does_not_make_decoding_wait(core: Core = OURS) -> None:
    engine = make(core, max_num_batched_tokens=16, policy="priority")
    engine.scheduler.add(request("decoding", prompt(4), 60, priority=1))
    engine.step()
    engine.scheduler.add(request("prefill", prompt(200), 4))
    engine.step()
    for _ in range(10):
        step = engine.step()
        assert step and sorted(chunk.length for chunk in step.chunks) == [1, 15]


# Ends.


def test_stop_reasons(core: Core = OURS) -> None:
    def run(**params: Any) -> Received:
        one = Request("a", (1, 2, 3), SamplingParams(max_tokens=40, **params), frozenset({4}))
        expected, got = one_by_one(one), make(core).run([one])["a"]
        assert (got.token_ids, got.finish_reason, got.stop_reason) == (
            expected.token_ids,
            expected.finish_reason,
            expected.stop_reason,
        )
        return got

    plain = run()
    assert (plain.token_ids[-1], plain.finish_reason, plain.stop_reason) == (4, FinishReason.STOP, None)
    named = run(stop_token_ids=(4,))
    assert (named.token_ids, named.stop_reason) == (plain.token_ids, 4)
    assert run(ignore_eos=True).finish_reason is FinishReason.LENGTH
    other = next(token for token in plain.token_ids if token != 4) if len(plain.token_ids) > 1 else 5
    assert run(stop_token_ids=(other,)).stop_reason in (None, other)
    late = run(min_tokens=len(plain.token_ids) + 1)
    assert late.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert len(late.token_ids) > len(plain.token_ids)


def test_the_context_ends_a_text() -> None:
    engine = make(max_model_len=33, num_scheduler_steps=4, depth=1)
    got = engine.run([request("a", prompt(30), None), request("b", prompt(32), 10)])
    assert (len(got["a"].token_ids), got["a"].finish_reason) == (3, FinishReason.LENGTH)
    assert (len(got["b"].token_ids), got["b"].finish_reason) == (1, FinishReason.LENGTH)


def test_a_fault_ends_its_request_alone_and_is_not_cached(core: Core = OURS) -> None:
    engine = make(core, faults={"bad": 20})
    requests = [request(name, prompt(40), 30) for name in ("bad", "good")]
    texts = engine.run(requests)
    assert_texts(requests[1:], texts)
    assert (len(texts["bad"].token_ids), texts["bad"].finish_reason) == (19, FinishReason.ERROR)
    assert [delta.error for delta in engine.deltas if delta.finish_reason is FinishReason.ERROR] == ["not a number"]
    again = engine.run([request("again", prompt(40), 30)])
    assert again["again"].num_cached_tokens == 0
    assert_idle(engine)


def test_ids_and_prompts_that_cannot_run_are_refused() -> None:
    engine = make(max_model_len=32)
    engine.scheduler.add(request("a", prompt(31), 5))
    with pytest.raises(InvalidRequest, match="'a'"):
        engine.scheduler.add(request("a", prompt(3), 5))
    for length in (0, 32, 33):
        with pytest.raises(InvalidRequest, match=f"{length} tokens.*max_model_len=32"):
            engine.scheduler.add(request("b", prompt(length), 5))
    assert len(engine.run()["a"].token_ids) == 1
    engine.run([request("c", prompt(3), 5)])
    assert_idle(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 1},
        {"num_scheduler_steps": 0},
        {"policy": "lifo"},
    ],
)
def test_senseless_limits_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InvalidConfig, match=f"{name}={value!r}"):
        make(**options)


def test_steps_are_committed_in_order() -> None:
    made = make().scheduler
    made.add(request("a", prompt(3), 5))
    first, second = made.plan(), made.plan()
    assert first and second
    with pytest.raises(ValueError, match="order"):
        made.commit(second, StepResult([[1]]))
    made.commit(first, StepResult([[1]]))
    with pytest.raises(ValueError, match="order"):
        made.commit(first, StepResult([[1]]))


# Aborts and leaks.


@pytest.mark.case("ABT-03")
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_abort_at_awkward_moments(depth: int, core: Core = OURS) -> None:
    engine = make(
        core, num_blocks=20, block_size=4, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=40, depth=depth
    )
    neighbours = [request(f"n{i}", prompt(9, i), 30) for i in range(2)]
    made = engine.scheduler
    for one in neighbours:
        made.add(one)
    made.add(request("prefilling", prompt(30), 5))
    made.add(request("waiting", prompt(9), 5))
    assert made.abort("waiting") and not made.abort("waiting")
    while not any(seq.request.id == "prefilling" and seq.scheduled for seq in made._running):
        engine.step()
    assert made.abort("prefilling") and not made.abort("prefilling")
    made.check()
    preempted = heard(engine, Preempted)
    made.add(request("preempted", prompt(5, 7), 30))
    while not any(event.request_id == "preempted" for event in preempted):
        engine.step()
    assert made.abort("preempted") and not made.abort("preempted")
    made.check()
    assert_texts(neighbours, engine.run(), 40)
    made.add(request("last step", prompt(5), depth + 2))
    while made._live["last step"].room:
        step = made.plan()
        assert step
        engine.in_flight.append((step, engine.device.run(step)))
        if len(engine.in_flight) > depth + 1:
            engine.commit()
    assert made.abort("last step") and not made.abort("last step")
    assert len(engine.in_flight) == depth + 1
    num_deltas = len(engine.deltas)
    engine.run()
    assert len(engine.deltas) == num_deltas
    assert not made.abort("last step") and not made.abort("n0") and not made.abort("never there")
    assert_idle(engine)


@pytest.mark.case("ABT-03")
def test_300_requests_aborted_at_random() -> None:
    rng = random.Random(3)
    engine = make(num_blocks=30, block_size=4, max_num_seqs=8, max_num_batched_tokens=20, depth=1, max_model_len=64)
    requests = [
        request(f"{i}.{sample}", prompt(rng.randint(1, 40), i % 9), rng.randint(1, 24), seed=sample)
        for i in range(150)
        for sample in range(2)
    ]
    left, victims = list(requests), {r.id for r in requests if rng.random() < 0.5}
    aborted = set()
    while left or engine.has_work:
        if left and engine.scheduler.num_waiting < 6:
            engine.scheduler.add(left.pop(0))
        for live in list(engine.scheduler._live):
            if live in victims and rng.random() < 0.1:
                aborted.add(live)
                assert engine.scheduler.abort(live)
        assert not engine.scheduler.abort(rng.choice(["unknown", *aborted]))
        engine.step()
        engine.scheduler.check()
    assert len(aborted) > 100
    assert_texts([r for r in requests if r.id not in aborted], received(engine.deltas), 64)
    assert_idle(engine)


@pytest.mark.case("ABT-03")
def test_a_slot_and_an_id_are_free_at_once() -> None:
    engine = make(max_num_seqs=1, depth=2)
    engine.scheduler.add(request("a", prompt(20), 30))
    for _ in range(3):
        engine.step()
    engine.scheduler.abort("a")
    again = request("a", prompt(22, 1), 10)
    engine.scheduler.add(again)
    before = len(engine.deltas)
    engine.run()
    assert received(engine.deltas[before:])["a"].token_ids == one_by_one(again).token_ids
    assert_idle(engine)


def test_another_reason_than_abort_can_be_given() -> None:
    engine = make()
    finished = heard(engine, Finished)
    engine.scheduler.add(request("a", prompt(20), 30))
    engine.step()
    assert engine.scheduler.abort("a", FinishReason.STOP)
    assert finished == [Finished("a", FinishReason.STOP, 20, 1)]


@pytest.mark.case("KV-03")
def test_no_object_outlives_its_request() -> None:
    def alive() -> Counter[type]:
        gc.collect()
        return Counter(type(thing) for thing in gc.get_objects() if type(thing) in (Sequence, Request, Step))

    rng, before = random.Random(1), alive()
    engine = make(num_blocks=40, block_size=4, max_num_seqs=16, depth=1, max_model_len=64)
    number = count()
    for _ in range(3):
        for _ in range(300):
            i = next(number)
            stop = (rng.randrange(VOCABULARY),) if rng.random() < 0.5 else ()
            if rng.random() < 0.1:
                engine.device.faults[f"{i}.0"] = rng.randint(1, 4)
            for sample in range(rng.choice([1, 1, 3])):
                engine.scheduler.add(
                    request(f"{i}.{sample}", prompt(rng.randint(1, 20), i % 5), 8, stop_token_ids=stop, seed=sample)
                )
            while engine.scheduler.num_waiting + engine.scheduler.num_running > 16:
                engine.step()
            if rng.random() < 0.2:
                engine.scheduler.abort(f"{i}.0")
        engine.run()
        engine.deltas.clear()
        engine.device.faults.clear()
        engine.device.rows.clear()
        assert_idle(engine)
        assert alive() == before
        assert len(engine.scheduler.pool._hash_of) <= engine.scheduler.pool.num_usable


# The pool is full.


@pytest.mark.case("KV-01")
def test_a_sequence_that_could_outgrow_the_pool_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidConfig, match=r"max_model_len=512.*7 blocks of 16 hold 112 positions"):
        make(num_blocks=8, max_model_len=512)
    with pytest.raises(InvalidConfig):
        make(num_blocks=8, max_model_len=114)


@pytest.mark.case("KV-01")
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("steps", [1, 8])
def test_whoever_fills_the_pool_ends_and_the_next_is_served(depth: int, steps: int) -> None:
    engine = make(num_blocks=8, max_model_len=113, depth=depth, num_scheduler_steps=steps)
    requests = [request("grows", prompt(100), 200), request("full", prompt(112), 9), request("short", prompt(5, 1), 5)]
    with pytest.raises(InvalidRequest, match="113 tokens"):
        engine.scheduler.add(request("over", prompt(113), 1))
    assert_texts(requests, engine.run(requests), 113)
    assert engine.num_steps < 200
    assert_idle(engine)


@pytest.mark.case("KV-07")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_big_head_is_overtaken_but_never_starved(policy: str, core: Core = OURS) -> None:
    engine = make(core, num_blocks=102, block_size=4, max_num_seqs=64, max_model_len=400, policy=policy)
    admitted = heard(engine, Admitted)
    engine.scheduler.add(request("long", prompt(200), 60))
    engine.step()
    engine.scheduler.add(request("head", prompt(240), 4))
    number = count()
    while not any(event.request_id == "head" for event in admitted):
        for _ in range(3):
            i = next(number)
            assert i < 1000, "the head starves"
            engine.scheduler.add(request(f"small {i}", prompt(6, i), 4))
        engine.step()
    order = [event.request_id for event in admitted]
    assert order.index("head") == 1 + MAX_BYPASS, "small ones went ahead while there was room, up to the bound"
    engine.run()
    assert_idle(engine)


@pytest.mark.case("KV-07")
@pytest.mark.parametrize("depth", [0, 2])
def test_priorities_hold_under_preemption(depth: int, core: Core = OURS) -> None:
    engine = make(core, num_blocks=16, block_size=4, max_num_seqs=6, max_model_len=60, depth=depth, policy="priority")
    requests = [
        request(f"{i}.{sample}", prompt(8, i), 24, priority=5 * (i % 2), seed=sample)
        for i in range(12)
        for sample in range(2)
    ]
    importance = {one.id: (one.priority, i) for i, one in enumerate(requests)}
    started: dict[str, int] = {}

    def follow(event: Event) -> None:
        if isinstance(event, Admitted):
            started.setdefault(event.request_id, importance[event.request_id][0])
        elif isinstance(event, Preempted):
            running = [importance[seq.request.id] for seq in engine.scheduler._running]
            behind = [rank for rank in running if rank >= importance[event.by]]
            assert importance[event.request_id] in behind
            assert importance[event.request_id][0] == max(priority for priority, _ in behind)

    engine.scheduler.subscribers.append(follow)
    engine.run(requests)
    assert engine.scheduler.num_preemptions > 5
    assert list(started.values()) == [0] * 12 + [5] * 12, "all important ones start before any other"
    assert_texts(requests, received(engine.deltas), 60)
    assert_idle(engine)


@pytest.mark.case("KV-07")
def test_the_less_important_gives_up_though_it_loses_more(core: Core = OURS) -> None:
    engine = make(core, num_blocks=9, block_size=4, max_model_len=33, policy="priority")
    preempted = heard(engine, Preempted)
    requests = [request("a", prompt(4), 8), request("b", prompt(4, 1), 8), request("c", prompt(20), 8, priority=5)]
    assert_texts(requests, engine.run(requests), 33)
    assert preempted == [Preempted("c", by="b", num_lost_tokens=20)]


def test_of_equals_the_one_that_loses_least_gives_up() -> None:
    engine = make(num_blocks=9, block_size=4, max_model_len=33)
    preempted = heard(engine, Preempted)
    requests = [request("a", prompt(4), 8), request("b", prompt(4, 1), 8), request("c", prompt(20), 8)]
    assert_texts(requests, engine.run(requests), 33)
    assert preempted[0] == Preempted("b", by="b", num_lost_tokens=4)


def test_results_in_flight_of_a_preempted_sequence_count(core: Core = OURS) -> None:
    engine = make(core, num_blocks=9, block_size=4, max_model_len=33, policy="priority", depth=2)
    requests = [request("a", prompt(4), 8), request("b", prompt(4, 1), 8), request("c", prompt(20), 8, priority=5)]
    for one in requests:
        engine.scheduler.add(one)
    while not engine.scheduler.num_preemptions:
        engine.step()
    (waiting,) = engine.scheduler._waiting
    assert (waiting.request.id, waiting.pending, waiting.num_generated) == ("c", 1, 0)
    engine.step()
    assert (waiting.pending, waiting.num_generated) == (0, 1)
    assert_texts(requests, engine.run(), 33)


@pytest.mark.case("KV-07")
def test_the_preempted_return_before_newer_ones(core: Core = OURS) -> None:
    engine = make(core, num_blocks=9, block_size=4, max_num_seqs=4, max_model_len=33)
    log = heard(engine, Admitted, Preempted)
    requests = [request(str(i), prompt(7, i), 12) for i in range(6)]
    assert_texts(requests, engine.run(requests), 33)
    away: set[str] = set()
    for event in log:
        if isinstance(event, Preempted):
            away.add(event.request_id)
            continue
        away.discard(event.request_id)
        assert all(event.request_id < other for other in away), "a newer one was admitted first"
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.case("KV-08")
@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("budget", [1, 6, 17])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("max_model_len", [17, 33])
def test_odd_limits(max_num_seqs: int, budget: int, block_size: int, max_model_len: int) -> None:
    for depth, steps in ((0, 1), (1, 1), (2, 4)):
        engine = make(
            num_blocks=-(-max_model_len // block_size) + 1,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            depth=depth,
            num_scheduler_steps=steps,
        )
        requests = [request(str(i), prompt(length, i), 12) for i, length in enumerate((10, 12, 13, 15, 16))]
        assert_texts(requests, engine.run(requests), max_model_len)
        assert_idle(engine)


@pytest.mark.parametrize(("num_free", "num_running"), [(1, 4), (2, 4), (3, 5)])
def test_an_admission_leaves_room_to_grow(num_free: int, num_running: int, core: Core = OURS) -> None:
    """Half a block for each that runs: the fifth takes one and leaves two to the four before it."""
    engine = make(core, num_blocks=1 + 4 + num_free, max_model_len=65)
    for i in range(4):
        engine.scheduler.add(request(f"running {i}", prompt(2, i), 5))
    engine.step()
    assert engine.scheduler.num_running == 4
    engine.scheduler.add(request("fifth", prompt(2, 5), 5))
    engine.step()
    assert engine.scheduler.num_running == num_running
    engine.run()


# Blocks are shared.


@pytest.mark.case("KV-09")
@pytest.mark.parametrize("depth", [0, 1])
def test_samples_share_full_blocks_only(depth: int, core: Core = OURS) -> None:
    # 60 positions each: the first block is shared, three are each one's own. Two more stay free while four run.
    engine = make(core, num_blocks=1 + 1 + 4 * 3 + 1, max_model_len=96, depth=depth)
    requests = [request(f"{i}", prompt(21), 40, seed=i) for i in range(4)]
    for one in requests:
        engine.scheduler.add(one)
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.scheduler.pool.num_usable - engine.scheduler.pool.num_free)
    together = received(engine.deltas)
    assert peak == 1 + 4 * 3
    assert engine.scheduler.num_preemptions == 0
    assert engine.device.num_computed == 21 + 3 * 1 + 4 * 39
    apart = {one.id: make(core).run([one])[one.id] for one in requests}
    assert {i: text.token_ids for i, text in together.items()} == {i: text.token_ids for i, text in apart.items()}
    assert len({tuple(text.token_ids) for text in together.values()}) == 4


@pytest.mark.case("PFX-01")
@pytest.mark.parametrize("budget", [8, 10_000])
def test_the_same_prompt_again(budget: int) -> None:
    lengths = (1, 15, 16, 17, 31, 32, 33, 160)
    for length in lengths:
        hit = (length - 1) // 16 * 16
        engine = make(max_num_batched_tokens=budget, num_blocks=200)
        for time in range(3):
            one = request(str(time), prompt(length), 5)
            got = engine.run([one])
            assert_texts([one], got)
            assert got[one.id].num_cached_tokens == (hit if time else 0)
        engine = make(max_num_batched_tokens=budget, num_blocks=200)
        for time in range(3):
            requests = [request(f"{time} {i}", prompt(length), 5) for i in range(8)]
            got = engine.run(requests)
            assert_texts(requests, got)
            hits = [got[one.id].num_cached_tokens for one in requests]
            assert sorted(hits) == [hit if time else 0] + [hit] * 7
    engine = make(max_num_batched_tokens=budget, num_blocks=200)
    # Caching off is a namespace for each request.
    off = [request(f"off {i} {n}", prompt(n), 5, namespace=f"{i} {n}") for i in range(3) for n in lengths]
    got = engine.run(off)
    assert all(got[one.id].num_cached_tokens == 0 for one in off)
    assert all(len(got[one.id].token_ids) == 5 for one in off)
    assert_idle(engine)


@pytest.mark.case("PFX-02")
def test_prompts_that_part_inside_a_block(core: Core = OURS) -> None:
    rng, base = random.Random(2), prompt(40)
    engine = make(core, num_blocks=400, max_num_seqs=4, max_num_batched_tokens=30)
    prompts = []
    for place in (0, 15, 16, 17, 31, 32, 39):
        other = [*base[:place], (base[place] + 1) % VOCABULARY, *base[place + 1 :]]
        prompts += [other + prompt(n, place) for n in range(0, 21, 4)]
    prompts += [base + prompt(n, 99) for n in range(21)]
    rng.shuffle(prompts)
    requests = [request(str(i), tokens, 6) for i, tokens in enumerate(prompts)]
    got = engine.run(requests)
    assert_texts(requests, got)

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    for i, tokens in enumerate(prompts):
        most = max((common(tokens, other) for j, other in enumerate(prompts) if j != i), default=0)
        assert got[str(i)].num_cached_tokens <= min(most, len(tokens) - 1) // 16 * 16
    assert sum(text.num_cached_tokens for text in got.values()) > 32 * 20


@pytest.mark.case("PFX-06")
def test_hits_stay_inside_a_namespace(core: Core = OURS) -> None:
    engine, seen = make(core, num_blocks=400, max_model_len=600), set[str]()
    for i, name in enumerate(
        ["salt 1", "", "salt 2", "salt 1", "x" * 1_000_000, "", "salt 2", "\udcff", "x" * 1_000_000]
    ):
        one = request(str(i), prompt(512), 3, namespace=name)
        got = engine.run([one])[one.id]
        assert got.token_ids == one_by_one(one).token_ids
        assert got.num_cached_tokens == (496 if name in seen else 0)
        seen.add(name)


@pytest.mark.case("PFX-07")
def test_equal_prompts_in_one_step_are_computed_once(core: Core = OURS) -> None:
    engine = make(core, max_num_batched_tokens=16, num_blocks=200)
    requests = [request(str(i), prompt(100), 10, seed=i) for i in range(8)]
    for one in requests:
        engine.scheduler.add(one)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    got = received(engine.deltas)
    assert_texts(requests, got)
    # The prompt once, its last position by each, and all generated tokens but the last.
    assert engine.device.num_computed == 100 + 7 + 8 * 9
    assert sorted(text.num_cached_tokens for text in got.values()) == [0] + 7 * [96]


def test_a_prompts_end_is_copied_only_with_all_before_it(core: Core = OURS) -> None:
    engine = make(core, block_size=4)
    pool = engine.scheduler.pool
    first, again, after = (request(name, prompt(10), 2, seed=1) for name in ("first", "again", "after"))
    engine.run([first])
    before = engine.device.num_computed
    got = engine.run([again])
    assert engine.device.num_computed == before + 1 + 1  # the last position, and the first of two generated tokens
    pool.forget([blocks.chain_hash(pool.seed(""), prompt(10)[:4])])
    got |= engine.run([after])
    assert_texts([first, again, after], received(engine.deltas))
    assert got["after"].num_cached_tokens == 0


@pytest.mark.case("PFX-07")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_many_turns(depth: int, steps: int, core: Core = OURS) -> None:
    engine = make(core, num_blocks=300, depth=depth, num_scheduler_steps=steps, max_num_batched_tokens=64)
    talks = [prompt(30, i) for i in range(8)]
    for turn in range(6):
        previous = [len(talk) for talk in talks]
        requests = []
        for i, talk in enumerate(talks):
            talk += prompt(7, 10 * turn + i)
            requests.append(request(f"{turn} {i}", talk, 13 + i))
        got = engine.run(requests)
        assert_texts(requests, got)
        for i, one in enumerate(requests):
            if turn:
                assert got[one.id].num_cached_tokens == (previous[i] - 1) // 16 * 16
            talks[i] += got[one.id].token_ids


@pytest.mark.case("PFX-08")
@pytest.mark.parametrize("depth", [0, 2])
def test_a_reset_during_running_requests(depth: int) -> None:
    engine = make(num_blocks=100, depth=depth, max_num_batched_tokens=40)
    requests = [request(str(i), prompt(50, i % 4), 20, seed=i) for i in range(8)]
    for one in requests:
        engine.scheduler.add(one)
    for _ in range(12):
        engine.step()
        engine.scheduler.pool.reset_cache()
        engine.scheduler.check()
    assert engine.scheduler.num_running == 8
    running = engine.run()
    assert_texts(requests, running)
    assert_idle(engine)


@pytest.mark.case("PFX-08")
@pytest.mark.parametrize("num_before", [1, 10, 16, 31, 40])
def test_nothing_old_is_hit_after_new_weights(num_before: int, core: Core = OURS) -> None:
    """A request that was running at the reset ends with KV of both weights: none of it may be found."""
    engine = make(core, max_num_batched_tokens=20)
    engine.run([request("old", prompt(60), 5)])
    engine.scheduler.add(request("running", prompt(num_before), 60))
    for _ in range(3):
        engine.step()
    engine.scheduler.add(request("waiting", prompt(60), 5))
    engine.device.weights = 1
    engine.scheduler.pool.reset_cache()
    before = engine.run()
    assert before["waiting"].num_cached_tokens == 0
    text = prompt(num_before) + before["running"].token_ids
    requests = [request("same", prompt(60), 5), request("more", [*text, 1, 2], 5)]
    after = engine.run(requests)
    assert after["same"].token_ids == one_by_one(requests[0], weights=1).token_ids
    assert after["more"].token_ids == one_by_one(requests[1], weights=1).token_ids
    assert after["more"].num_cached_tokens == 0
    again = engine.run([request("again", prompt(60), 5)])
    assert again["again"].num_cached_tokens == 48


# Waiting for what another computes.


def waiting_for_promise(core: Core = OURS, **params: Any) -> Engine:
    """The step that computes the prompt of "first" is in flight, and "second" has the same prompt."""
    engine = make(core, depth=3, num_blocks=400, max_num_seqs=100)
    engine.scheduler.add(request("first", prompt(64), 10))
    engine.step()
    engine.scheduler.add(request("second", prompt(64), 10, **params))
    engine.step()
    return engine


def test_a_promise_is_waited_for_and_shared(core: Core = OURS) -> None:
    engine = waiting_for_promise(core)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    engine.commit()
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 0)
    assert engine.run()["second"].num_cached_tokens == 48


def test_others_pass_while_a_sequence_waits_for_a_promise(core: Core = OURS) -> None:
    engine = waiting_for_promise(core)
    for i in range(MAX_BYPASS + 8):
        engine.scheduler.add(request(f"other {i}", [i, *prompt(3)], 2))
    engine.step()
    assert engine.scheduler.num_running == 1 + MAX_BYPASS + 8
    (second,) = engine.scheduler._waiting
    assert (second.request.id, second.num_bypasses) == ("second", 0)
    engine.run()


def test_a_promise_ends_with_the_abort_of_the_promiser(core: Core = OURS) -> None:
    engine = waiting_for_promise(core)
    engine.scheduler.abort("first")
    engine.step()
    assert engine.scheduler.num_running == 1
    second = engine.run()["second"]
    assert second.num_cached_tokens == 0
    assert second.token_ids == one_by_one(request("", prompt(64), 10)).token_ids
    assert_idle(engine)


@pytest.mark.parametrize("committed", [False, True])
def test_a_promise_ends_with_a_reset(committed: bool, core: Core = OURS) -> None:
    engine = waiting_for_promise(core)
    engine.scheduler.pool.reset_cache()
    if committed:
        engine.commit()
    engine.step()
    assert engine.scheduler.num_running == 2
    assert engine.run()["second"].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 3])
def test_a_promise_ends_with_the_preemption_of_the_promiser(depth: int) -> None:
    """The important one grows into the blocks of a promiser that is half-way through its prefill."""
    engine = make(
        num_blocks=11, block_size=4, max_num_batched_tokens=3, max_model_len=41, policy="priority", depth=depth
    )
    log = heard(engine, Preempted)
    requests = [request("important", prompt(3, 5), 30)]
    requests += [request(name, prompt(27), 4, priority=1) for name in ("first", "second")]
    texts = engine.run(requests)
    assert any(event.request_id == "first" for event in log)
    assert_texts(requests, texts, 41)
    assert_idle(engine)


@pytest.mark.parametrize("params", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}])
def test_who_does_not_read_the_prefix_cache_waits_for_nobody(params: dict[str, Any], core: Core = OURS) -> None:
    engine = waiting_for_promise(core, **params)
    assert engine.scheduler.num_running == 2
    texts = engine.run()
    assert texts["second"].num_cached_tokens == 0
    if "prompt_logprobs" in params:
        assert sorted(texts["second"].prompt_logprobs) == list(range(1, 64))


# Subscribers.


def test_a_block_table_can_be_followed_from_events_alone() -> None:
    engine = make(num_blocks=20, block_size=4, max_num_seqs=5, max_num_batched_tokens=15, max_model_len=64, depth=1)
    tables: dict[str, list[int]] = {}
    findable: set[int] = set()

    def follow(event: Event) -> None:
        match event:
            case Admitted():
                tables[event.request_id] = list(event.blocks)
                assert findable.issuperset(event.blocks[: event.num_cached_tokens // 4])
            case Planned():
                for chunk, request_id in zip(event.step.chunks, event.request_ids, strict=True):
                    tables[request_id] += chunk.new_blocks
            case Sealed():
                findable.update(event.blocks)
            case Evicted():
                findable.difference_update(event.blocks)
            case Freed():
                # What a request was handed in a step still being planned is told by that step.
                known = tables.pop(event.request_id)
                assert list(event.blocks[: len(known)]) == known

    engine.scheduler.subscribers.append(follow)
    for i in range(30):
        engine.scheduler.add(request(str(i), prompt(15, i % 3), 12, seed=i))
    while engine.has_work:
        engine.step()
        assert tables == {seq.request.id: seq.blocks for seq in engine.scheduler._running}
        assert findable >= set(engine.scheduler.pool._block_of.values())
    assert tables == {} and engine.scheduler.num_preemptions > 0


def test_without_subscribers_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an event was built")

    for kind in get_args(Event):
        for module in (blocks, scheduler):
            monkeypatch.setattr(module, kind.__name__, refuse, raising=False)
    engine = make(num_blocks=9, block_size=4, max_model_len=33)
    requests = [request(str(i), prompt(7, i), 12) for i in range(6)]
    assert_texts(requests, engine.run(requests), 33)
    assert engine.scheduler.num_preemptions > 0
