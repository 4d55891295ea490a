"""The sampler as the worker uses it: slots that change hands, batches of every mix, faults, frequencies, logprobs."""

import math
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.errors import InvalidConfig
from octavo.sampling import sampler as sampler_module
from octavo.sampling.bias import LogitBias
from octavo.sampling.draw import uniforms
from octavo.sampling.penalties import Penalties
from octavo.sampling.sampler import Sampled, Sampler
from octavo.sampling.temperature import Temperature
from octavo.types import Request, SamplingParams, TokenLogprobs

VOCAB = 150


def request(seed: int = 0, prompt: Sequence[int] = (1, 2, 3), **fields: object) -> Request:
    given = {name: fields.pop(name) for name in ("bad_words", "eos_token_ids") if name in fields}
    params = SamplingParams(**{"max_tokens": 1000, **fields})
    return Request("r", tuple(prompt), params, seed=seed, **given)


def enter(sampler: Sampler, slot: int, request: Request, output: Sequence[int] = ()) -> None:
    sampler.add(Admit(slot, (*request.prompt_token_ids, *output), (), request))


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def many(one: Request, logits: Tensor, rows: int, first_position: int = 3) -> Tensor:
    """Tokens of one request at `rows` positions that all have the same logits [V]."""
    sampler = Sampler(1, logits.shape[0], "cpu")
    enter(sampler, 0, one)
    positions = range(first_position, first_position + rows)
    return sampler.sample(logits.expand(rows, -1).clone(), [0] * rows, positions).tokens


class Model:
    """Logits that depend on every token before them, so that one wrong token changes all that follow."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).normal(size=(997, VOCAB)).astype(np.float32) * 2

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self.table[crc32(np.array(tokens, np.int32).tobytes()) % 997]


# Seeds


@pytest.mark.case("SMP-02")
def test_a_seed_repeats_and_seeds_differ() -> None:
    logits = random_logits(1, scale=1.0)[0]
    seeds = [0, 1, -2, 2**31, 2**63 - 1, -(2**63)]
    texts = [tuple(many(request(seed), logits, 20).tolist()) for seed in seeds]
    assert texts == [tuple(many(request(seed), logits, 20).tolist()) for seed in seeds]
    assert len(set(texts)) == len(seeds)
    assert all(len(set(text)) > 5 for text in texts)


@pytest.mark.case("SMP-01")
def test_n_children_differ_and_repeat_as_a_set() -> None:
    logits = random_logits(1, scale=1.0)[0]
    texts = [tuple(many(request(42 + child), logits, 50).tolist()) for child in range(4)]
    assert len(set(texts)) == 4
    assert texts == [tuple(many(request(42 + child), logits, 50).tolist()) for child in range(4)]
    together = Sampler(4, VOCAB, "cpu")
    for child in range(4):
        enter(together, child, request(42 + child))
    steps = [
        together.sample(logits.expand(4, -1).clone(), [0, 1, 2, 3], [3 + i] * 4).tokens.tolist() for i in range(50)
    ]
    assert list(zip(*steps, strict=True)) == texts


def test_greedy_is_the_argmax_and_needs_no_seed() -> None:
    logits = random_logits(5)
    sampler = Sampler(8, VOCAB, "cpu")
    for slot in range(8):
        enter(sampler, slot, request(seed=slot, temperature=0))
    sampled = sampler.sample(logits.clone(), [7, 0, 3, 1, 2], [9, 3, 5, 4, 4])
    assert sampled == Sampled(sampled.tokens)
    assert torch.equal(sampled.tokens, logits.argmax(-1))
    assert sampler.sample(logits[:0].clone(), [], []).tokens.shape == (0,)


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = random_logits(1)[0].round()
    assert (many(request(top_k=1, temperature=2.0), logits, 100) == logits.argmax()).all()


# Frequencies


FREQUENCIES: list[dict[str, object]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 9},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"logit_bias": {3: 4.0, 9: -100.0}, "presence_penalty": 1.0},
    {"allowed_token_ids": [5, 6, 7, 80]},
]


def expected(logits: np.ndarray, params: dict[str, object]) -> np.ndarray:
    x = logits.astype(np.float64)
    if "allowed_token_ids" in params:
        x = np.where(np.isin(np.arange(len(x)), params["allowed_token_ids"]), x, -np.inf)
    for token, bias in params.get("logit_bias", {}).items():
        x[token] += bias
    x /= params.get("temperature", 1.0)
    p = np.exp(x - x.max())
    p[p < params.get("min_p", 0.0)] = 0.0
    order = np.argsort(-p, kind="stable")
    p[order[params.get("top_k", len(p)) :]] = 0.0
    p /= p.sum()
    p[order[np.cumsum(p[order]) - p[order] >= params.get("top_p", 1.1)]] = 0.0
    return p / p.sum()


def check_frequencies(params: dict[str, object], rows: int = 20000) -> None:
    """Chi-square with the p of a one-in-ten-thousand event, after Wilson and Hilferty."""
    logits = random_logits(1, scale=1.5)[0]
    wanted = expected(logits.numpy(), params) * rows
    got = np.bincount(many(request(7, **params), logits, rows).numpy(), minlength=VOCAB)
    assert got[wanted == 0].sum() == 0
    large = wanted >= 5
    rest = wanted[~large].sum()
    wanted_bins, got_bins = wanted[large], got[large]
    if rest >= 5:
        wanted_bins, got_bins = np.append(wanted_bins, rest), np.append(got_bins, got[~large].sum())
    freedom = len(wanted_bins) - 1
    chi_square = ((got_bins - wanted_bins) ** 2 / wanted_bins).sum()
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit, (chi_square, limit, freedom)


@pytest.mark.parametrize("params", FREQUENCIES, ids=str)
def test_frequencies_are_those_of_the_softmax(params: dict[str, object]) -> None:
    check_frequencies(params)


@pytest.mark.parametrize("fault", ["temperature", "uniform", "bias"])
def test_frequencies_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "temperature":
        monkeypatch.setattr(
            Temperature, "apply", lambda self, logits, rows: logits.div_(self.values[rows.index] + 0.05)
        )
        with pytest.raises(AssertionError):
            check_frequencies({"temperature": 0.5})
    elif fault == "uniform":
        monkeypatch.setattr(sampler_module, "uniforms", lambda seeds, positions: uniforms(seeds, positions) * 0.97)
        with pytest.raises(AssertionError):
            check_frequencies({})
    else:
        monkeypatch.setattr(LogitBias, "apply", lambda self, logits, rows: None)
        with pytest.raises(AssertionError):
            check_frequencies({"logit_bias": {3: 4.0}})


# A schedule of mixed requests over few slots


def mixed_requests(count: int) -> list[tuple[Request, int]]:
    """Requests with random parameters, and how many tokens each generates."""
    rng = np.random.default_rng(5)
    result = []
    for i in range(count):
        fields: dict[str, object] = {"temperature": float(rng.choice([0.0, 0.4, 1.0, 1.5]))}
        choices: dict[str, object] = {
            "top_k": int(rng.integers(1, 30)),
            "top_p": float(rng.uniform(0.1, 1)),
            "min_p": float(rng.uniform(0, 0.3)),
            "repetition_penalty": float(rng.uniform(0.7, 1.5)),
            "presence_penalty": float(rng.uniform(-1, 1)),
            "frequency_penalty": float(rng.uniform(-1, 1)),
            "logit_bias": {int(token): float(rng.uniform(-5, 5)) for token in rng.integers(0, VOCAB, 4)},
            "allowed_token_ids": rng.integers(0, VOCAB, 60).tolist(),
            "min_tokens": int(rng.integers(1, 30)),
            "logprobs": int(rng.choice([0, 3, -1], p=[0.4, 0.4, 0.2])),
            "bad_words": tuple(tuple(rng.integers(0, VOCAB, rng.integers(1, 3)).tolist()) for _ in range(40)),
        }
        fields |= {name: value for name, value in choices.items() if rng.random() < 0.3}
        eos = frozenset(rng.integers(0, VOCAB, 20).tolist())
        prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        result.append((request(int(rng.integers(-(2**62), 2**62)), prompt, eos_token_ids=eos, **fields), 1 + i % 60))
    return result


Outcome = tuple[list[int], list[TokenLogprobs | None]]


def generate(model: Model, requests: list[tuple[Request, int]], num_slots: int, seed: int) -> list[Outcome]:
    """All requests to their end: random arrival, order of rows and preemption; slots are reused without notice."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(num_slots, VOCAB, "cpu")
    waiting, running = list(range(len(requests))), dict[int, int]()
    outcomes: list[Outcome] = [([], []) for _ in requests]
    while waiting or running:
        if len(running) > 1 and rng.random() < 0.2:
            slot = int(rng.choice(list(running)))
            waiting.append(running.pop(slot))
        free = [slot for slot in range(num_slots) if slot not in running]
        while free and waiting and (not running or rng.random() < 0.6):
            i, slot = waiting.pop(0), free.pop(int(rng.integers(len(free))))
            enter(sampler, slot, requests[i][0], outcomes[i][0])
            running[slot] = i
        slots = rng.permutation(list(running)).tolist()
        texts = [(*requests[running[slot]][0].prompt_token_ids, *outcomes[running[slot]][0]) for slot in slots]
        logits = torch.tensor(np.stack([model.logits(text) for text in texts]))
        sampled = sampler.sample(logits, slots, [len(text) for text in texts])
        assert not sampled.faults
        for row, slot in enumerate(slots):
            tokens, logprobs = outcomes[running[slot]]
            tokens.append(int(sampled.tokens[row]))
            logprobs.append(sampled.logprobs[row] if sampled.logprobs else None)
            if len(tokens) == requests[running[slot]][1]:
                del running[slot]
    return outcomes


def check_schedules(seeds: Sequence[int], count: int = 40) -> None:
    model, requests = Model(), mixed_requests(count)
    alone = [generate(model, [one], 1, 0)[0] for one in requests]
    for seed in seeds:
        for (one, _), got, wanted in zip(requests, generate(model, requests, 8, seed), alone, strict=True):
            assert got == wanted, one.params
    for (one, _), (tokens, logprobs) in zip(requests, alone, strict=True):
        assert all((entry is None) == (one.params.logprobs is None) for entry in logprobs)
        for word in one.bad_words:
            assert all(tuple(tokens[i : i + len(word)]) != word for i in range(len(tokens)))
        assert not one.stop_token_ids & set(tokens[: one.params.min_tokens])


@pytest.mark.case("SMP-05")
def test_mixed_requests_over_eight_slots_are_as_alone() -> None:
    check_schedules([1, 2, 3])


@pytest.mark.case("SMP-05")
@pytest.mark.parametrize("fault", ["stale bias", "stale counts", "row for slot", "order matters"])
def test_leaks_between_slots_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "stale bias":
        add = LogitBias.add
        monkeypatch.setattr(LogitBias, "add", lambda self, a: add(self, a) if a.request.params.logit_bias else None)
    elif fault == "stale counts":
        add_penalties = Penalties.add
        monkeypatch.setattr(
            Penalties,
            "add",
            lambda self, a: add_penalties(self, Admit(a.slot, a.request.prompt_token_ids, (), a.request)),
        )
    elif fault == "row for slot":
        apply = LogitBias.apply
        monkeypatch.setattr(
            LogitBias,
            "apply",
            lambda self, logits, rows: apply(self, logits, type(rows)(range(len(rows.slots)), rows.device)),
        )
    else:
        monkeypatch.setattr(
            sampler_module,
            "uniforms",
            lambda seeds, positions: uniforms(seeds, positions + torch.arange(len(positions))),
        )
    with pytest.raises(AssertionError):
        check_schedules([1])


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05}], ids=str)
def test_a_row_gets_the_same_in_any_batch_of_a_large_vocabulary(params: dict[str, object]) -> None:
    logits = random_logits(12, 49152)
    sampler = Sampler(12, 49152, "cpu")
    for slot in range(12):
        enter(sampler, slot, request(seed=slot, logprobs=2, **(params if slot % 3 else {"temperature": 0})))
    whole = sampler.sample(logits.clone(), list(range(12)), [5] * 12)
    for slots in ([4], [11, 1, 7], [0, 3, 5, 8, 2]):
        part = sampler.sample(logits[slots], slots, [5] * len(slots))
        assert part.tokens.tolist() == whole.tokens[slots].tolist()
        assert part.logprobs == [whole.logprobs[slot] for slot in slots]


# Faults


@pytest.mark.case("SMP-07")
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_a_faulty_row_harms_no_neighbour(value: float, params: dict[str, object]) -> None:
    def steps(broken: bool) -> list[Sampled]:
        sampler = Sampler(3, VOCAB, "cpu")
        for slot in range(3):
            enter(sampler, slot, request(seed=slot, logprobs=2, frequency_penalty=0.5, **params))
        found = []
        for step in range(3):
            logits = random_logits(3, seed=step)
            if broken and step == 1:
                logits[1, 77] = value
            found.append(sampler.sample(logits, [0, 1, 2], [3 + step] * 3))
        return found

    clean, broken = steps(broken=False), steps(broken=True)
    for good, bad in zip(clean, broken, strict=True):
        assert bad.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
        assert [bad.logprobs[0], bad.logprobs[2]] == [good.logprobs[0], good.logprobs[2]]
    assert list(broken[1].faults) == [1]
    assert "position 4" in broken[1].faults[1]
    assert ("NaN" if math.isnan(value) else "infinite") in broken[1].faults[1]
    assert broken[1].tokens[1] == 0
    assert broken[1].logprobs[1] is None
    assert not broken[0].faults and not broken[2].faults


@pytest.mark.case("SMP-07")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_left_is_a_fault(temperature: float) -> None:
    sampler = Sampler(2, VOCAB, "cpu")
    eos = frozenset({5, 6})
    enter(
        sampler,
        0,
        request(temperature=temperature, allowed_token_ids=[5, 6], min_tokens=1, eos_token_ids=eos, top_p=0.5),
    )
    enter(sampler, 1, request(temperature=temperature))
    sampled = sampler.sample(random_logits(2), [0, 1], [3, 3])
    assert list(sampled.faults) == [0]
    assert "min_tokens" in sampled.faults[0]
    sampled = sampler.sample(random_logits(2), [0, 1], [4, 4])
    assert not sampled.faults
    assert sampled.tokens[0] in (5, 6)


# Ids


@pytest.mark.case("SMP-08")
def test_a_single_allowed_id_is_always_generated() -> None:
    logits = random_logits(1)[0]
    for token in (0, 3, VOCAB - 1):
        assert (many(request(allowed_token_ids=[token], temperature=1.5), logits, 200) == token).all()
        assert (many(request(allowed_token_ids=[token], temperature=0), logits, 5) == token).all()


@pytest.mark.case("SMP-08")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_bad_words_never_appear(temperature: float) -> None:
    words = ((1, 2, 3), (4,), (5, 6))
    sampler = Sampler(3, 8, "cpu")
    texts: list[list[int]] = [[], [], []]
    for slot in range(3):
        enter(sampler, slot, request(seed=slot, temperature=temperature, bad_words=words))
    for step in range(300):
        tokens = sampler.sample(random_logits(3, 8, seed=step, scale=1.0), [0, 1, 2], [3 + step] * 3).tokens.tolist()
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    for text in texts:
        joined = "".join(map(str, text))
        assert not any("".join(map(str, word)) in joined for word in words)
        assert all(start in joined for start in ("12", "5", "0", "7"))


# Logprobs


@pytest.mark.case("LP-01", "LP-02")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_raw_and_as_many_as_asked(temperature: float) -> None:
    asked = [None, 0, 1, 5, None, -1]
    sampler = Sampler(6, VOCAB, "cpu")
    for slot, k in enumerate(asked):
        enter(
            sampler,
            slot,
            request(slot, temperature=temperature, logprobs=k, top_k=40, logit_bias={9: 5.0}, presence_penalty=1.0),
        )
    outside = 0
    for step in range(20):
        logits = random_logits(6, seed=step, scale=1.0)
        wanted = logits.double().log_softmax(-1)
        sampled = sampler.sample(logits.clone(), range(6), [3 + step] * 6)
        for row, k in enumerate(asked):
            entry = sampled.logprobs[row]
            if k is None:
                assert entry is None
                continue
            k = VOCAB if k == -1 else k
            token = int(sampled.tokens[row])
            assert entry is not None
            assert entry.token_ids[0] == token
            assert entry.token_ids[1:] == tuple(logits[row].topk(k).indices.tolist())
            assert entry.rank == 1 + int((logits[row] > logits[row, token]).sum())
            np.testing.assert_allclose(entry.logprobs, wanted[row, list(entry.token_ids)], atol=1e-5)
            assert (token in entry.token_ids[1:]) == (entry.rank <= k)
            outside += token not in entry.token_ids[1:]
    assert outside > 20


@pytest.mark.case("LP-02")
def test_no_row_asking_costs_no_list() -> None:
    sampler = Sampler(1, VOCAB, "cpu")
    enter(sampler, 0, request())
    assert sampler.sample(random_logits(1), [0], [3]).logprobs == []


def test_logprobs_modes() -> None:
    logits = random_logits(1)
    found = {}
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"):
        sampler = Sampler(1, VOCAB, "cpu", mode)
        enter(sampler, 0, request(temperature=0.5, top_k=3, logprobs=4, logit_bias={0: 20.0}))
        entry = sampler.sample(logits.clone(), [0], [3]).logprobs[0]
        assert entry is not None
        found[mode] = dict(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True))
        prompt = sampler.prompt_logprobs(logits, torch.tensor([8]), 2)
        reference = logits[0] if mode.endswith("logits") else logits[0].log_softmax(-1)
        np.testing.assert_allclose(prompt[0].logprobs, reference[list(prompt[0].token_ids)], atol=1e-5)
    best = logits[0].topk(4).indices.tolist()
    assert list(found["raw_logprobs"]) == list(found["raw_logits"]) == best
    assert next(iter(found["processed_logprobs"])) == 0
    assert [math.isinf(value) for value in found["processed_logits"].values()] == [False, False, False, True]
    biased = logits[0].clone()
    biased[0] += 20.0
    for token in list(found["processed_logits"])[:3]:
        assert found["processed_logits"][token] == pytest.approx(2 * biased[token].item())
    finite = [value for value in found["processed_logprobs"].values() if math.isfinite(value)]
    assert sum(map(math.exp, finite)) == pytest.approx(1.0)


def test_an_unknown_logprobs_mode_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="logprobs_mode='cooked'.*raw_logprobs"):
        Sampler(1, VOCAB, "cpu", "cooked")


@pytest.mark.case("LP-01")
@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_prompt_logprobs(k: int) -> None:
    logits = random_logits(150)
    targets = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(0))
    wanted = logits.double().log_softmax(-1)
    entries = Sampler(1, VOCAB, "cpu").prompt_logprobs(logits, targets, k)
    assert len(entries) == 150
    for row, entry in enumerate(entries):
        assert entry.token_ids[0] == targets[row]
        assert len(entry.token_ids) == 1 + (VOCAB if k == -1 else k)
        assert entry.rank == 1 + int((logits[row] > logits[row, targets[row]]).sum())
        np.testing.assert_allclose(entry.logprobs, wanted[row, list(entry.token_ids)], atol=1e-5)


# Length


@pytest.mark.case("LEN-03")
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_end_before_min_tokens_unless_it_is_no_end(ignore_eos: bool) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 50.0, 49.0
    sampler = Sampler(1, VOCAB, "cpu")
    enter(
        sampler,
        0,
        request(temperature=0, min_tokens=3, ignore_eos=ignore_eos, eos_token_ids=frozenset({5}), stop_token_ids=[6]),
    )
    tokens = [int(sampler.sample(logits.clone(), [0], [3 + step]).tokens[0]) for step in range(5)]
    assert tokens == ([5] * 5 if ignore_eos else [0, 0, 0, 5, 5])
