"""Fair sharing between tenants, on the scheduler with the fake device: long prompts of one leave the others quick."""

import random

import pytest

from fake_device import Engine, FakeDevice, one_by_one, request
from octavo.core.blocks import BlockPool
from octavo.core.policy import ABSENT_STEPS, Fairness
from octavo.core.scheduler import Scheduler
from octavo.types import Request

BUDGET = 2048
BLOCK = 64
STEP_SECONDS, POSITION_SECONDS = 4e-3, 20e-6  # of a step: a 1.5B model on a large GPU, roughly


class Clocked:
    """An engine whose steps take time by their positions, and requests that come at given times."""

    def __init__(self, num_blocks: int = 24_000, max_num_seqs: int = 64, depth: int = 1) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, max_num_seqs, BUDGET, 700_000)
        self.engine = Engine(self.scheduler, NoDevice(num_blocks, BLOCK), depth)
        self.now = 0.0

    def first_tokens(self, arrivals: list[tuple[float, Request]]) -> dict[str, float]:
        """Seconds from each arrival to its first token; ends when every request of "0..." tenants is done."""
        arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        begin = {r.id: at for at, r in arrivals}
        waited: dict[str, float] = {}
        open_ids = {r.id for _, r in arrivals if r.tenant != "long"}
        place = 0
        while open_ids:
            while place < len(arrivals) and arrivals[place][0] <= self.now:
                self.scheduler.add(arrivals[place][1])
                place += 1
            if not self.engine.has_work:
                self.now = arrivals[place][0]
                continue
            self.engine.num_steps = 0
            step = self.engine.step()
            self.now += STEP_SECONDS + POSITION_SECONDS * (step.num_tokens if step else 0)
            for delta in self.engine.deltas:
                waited.setdefault(delta.request_id, self.now - begin[delta.request_id])
                if delta.finish_reason is not None:
                    open_ids.discard(delta.request_id)
            self.engine.deltas.clear()
        return waited


class NoDevice(FakeDevice):
    """Keeps no KV: a prompt of 600,000 tokens costs nothing but its steps."""

    def _run_chunk(self, i, chunk, run, result):  # type: ignore[no-untyped-def]
        if chunk.samples:
            result.tokens[i].append(1)


def ordinary(seed: int, num_tenants: int, load: float, seconds: float = 30.0) -> list[tuple[float, Request]]:
    """Prompts of 200 to 3,000 tokens that come at random and together ask for `load` of the positions there are."""
    rng = random.Random(seed)
    rate = load / (POSITION_SECONDS * 1600 + STEP_SECONDS)
    arrivals, now, number = [], 0.0, 0
    while (now := now + rng.expovariate(rate)) < seconds:
        tenant = f"tenant {rng.randrange(num_tenants)}"
        prompt = [rng.randrange(7) for _ in range(4)] + [number % 7] * rng.randint(196, 2996)
        arrivals.append((now, request(f"{number}", prompt, rng.randint(1, 60), tenant=tenant, namespace=str(number))))
        number += 1
    return arrivals


def p99(waited: dict[str, float]) -> float:
    values = sorted(seconds for name, seconds in waited.items() if not name.startswith("long"))
    return values[int(len(values) * 0.99)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_tenants", "load"), [(1, 0.3), (3, 0.4), (8, 0.5)])
def test_long_prompts_of_one_tenant_do_not_double_the_others_time_to_first_token(
    seed: int, num_tenants: int, load: float
) -> None:
    others = ordinary(seed, num_tenants, load)
    long = [
        (seconds, request(f"long {seconds}", [3] * 600_000, 4, tenant="long", namespace=f"long {seconds}"))
        for seconds in range(0, 30, 5)
    ]
    alone = p99(Clocked().first_tokens(others))
    crowded = p99(Clocked().first_tokens(others + long))
    assert crowded < 2 * alone, f"{crowded:.3f} s beside long prompts, {alone:.3f} s without"


def test_the_test_above_would_see_sharing_by_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ordinary(0, 3, 0.4, 10.0)
    long = [(0.0, request("long", [3] * 600_000, 4, tenant="long", namespace="long"))]
    alone = p99(Clocked().first_tokens(others))
    monkeypatch.setattr(Fairness, "has_several", property(lambda self: False))
    assert p99(Clocked().first_tokens(others + long)) > 2 * alone


def test_a_long_prompt_goes_on_beside_tenants_that_want_everything() -> None:
    scheduler = Scheduler(BlockPool(2000, 16), 8, 64, 5000)
    engine = Engine(scheduler, NoDevice(2000, 16))
    for tenant, length in [("long", 2000), ("b", 0), ("c", 0)]:
        for number in range(40 if not length else 1):
            name = f"{tenant}{number}"
            scheduler.add(request(name, [1] * (length or 300), 2, tenant=tenant, namespace=name))
    while all(delta.request_id != "long0" for delta in engine.deltas):
        engine.step()
    first_of = [delta.request_id for delta in engine.deltas if len(delta.token_ids)]
    assert len(set(first_of)) < 40, "the long prompt had less than its share"


def test_a_free_place_goes_to_the_tenant_that_had_the_least() -> None:
    scheduler = Scheduler(BlockPool(200, 16), 1, 256, 300)
    engine = Engine(scheduler, NoDevice(200, 16))
    for number in range(20):
        scheduler.add(request(f"many{number}", [1] * 40, 2, tenant="many", namespace=str(number)))
    engine.step()
    scheduler.add(request("one", [1] * 40, 2, tenant="one"))
    engine.run()
    done = [delta.request_id for delta in engine.deltas if delta.finish_reason]
    assert done[:2] == ["many0", "one"]


def test_background_waits_for_all_others_and_then_runs() -> None:
    scheduler = Scheduler(BlockPool(200, 16), 1, 256, 300)
    engine = Engine(scheduler, NoDevice(200, 16))
    names = ["running", "background", "late", "later"]
    for name in names:
        scheduler.add(request(name, [1] * 40, 2, priority=1_000_000 if name == "background" else 0, namespace=name))
        engine.step()
    engine.run()
    assert [d.request_id for d in engine.deltas if d.finish_reason] == ["running", "late", "later", "background"]


def test_shares_fit_the_step_and_nobody_goes_without() -> None:
    rng = random.Random(1)
    for _ in range(300):
        fairness = Fairness(rng.choice([1, 7, 64, 2048]))
        tenants = [str(n) for n in range(rng.randint(2, 12))]
        for tenant in tenants:
            fairness.join(tenant)
            fairness.charge(tenant, rng.choice([0, 10, 10_000]))
        wanted = {t: rng.randint(1, 5000) for t in tenants if rng.random() < 0.7}
        shares = fairness.shares(wanted)
        assert shares.keys() == wanted.keys()
        assert all(0 < shares[t] <= wanted[t] for t in wanted)


def test_tenants_are_forgotten() -> None:
    fairness = Fairness(64)
    for number in range(1000):
        fairness.join(str(number))
        fairness.leave(str(number))
        fairness.join("always")
        fairness.shares({"always": 1})
    assert len(fairness.served) <= ABSENT_STEPS + 2


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_text_does_not_depend_on_tenants(depth: int) -> None:
    rng = random.Random(depth)
    requests = [
        request(f"{n}", [rng.randrange(7) for _ in range(rng.randint(1, 60))], 9, tenant=rng.choice("abc"), seed=n)
        for n in range(40)
    ]
    scheduler = Scheduler(BlockPool(40, 4), 6, 24, 100)
    got = Engine(scheduler, FakeDevice(40, 4), depth).run(requests)
    assert {name: one.token_ids for name, one in got.items()} == {r.id: one_by_one(r, 100).token_ids for r in requests}
    scheduler.check()
