"""Each sampling feature against a plain numpy reference of its definition."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from octavo.core.step import Admit
from octavo.sampling import penalties, top_k_top_p
from octavo.sampling.bad_words import BadWords
from octavo.sampling.base import LogitsProcessor, Rows, editing
from octavo.sampling.bias import AllowedTokens, LogitBias
from octavo.sampling.blocks import argmax, top
from octavo.sampling.draw import draw, mix, uniforms
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.min_p import MinP
from octavo.sampling.min_tokens import MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.sampler import PROCESSORS
from octavo.sampling.temperature import Temperature
from octavo.sampling.thinking import ThinkingBudget
from octavo.sampling.top_k_top_p import TopKTopP
from octavo.types import Request, SamplingParams, Thinking

CPU = torch.device("cpu")
NEVER = -math.inf


def admit(
    slot: int,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    bad_words: Sequence[Sequence[int]] = (),
    eos: Sequence[int] = (),
    thinking: Thinking | None = None,
    **params: object,
) -> Admit:
    request = Request(
        id=str(slot),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 1000, **params}),
        eos_token_ids=frozenset(eos),
        bad_words=tuple(tuple(word) for word in bad_words),
        thinking=thinking,
    )
    return Admit(slot, (*prompt, *output), (), request)


def applied(processor: LogitsProcessor, logits: Tensor, slots: Sequence[int]) -> np.ndarray:
    logits = logits.clone()
    processor.apply(logits, Rows(slots, CPU))
    return logits.numpy()


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# The largest logits


def in_order(logits: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """By a full sort: larger logits first, then lower ids."""
    x = logits.numpy()
    ids = np.stack([np.lexsort((np.arange(x.shape[1]), -row))[:k] for row in x])
    return np.take_along_axis(x, ids, 1), ids


@pytest.mark.parametrize("k", [1, 2, 5, 31, 300, 5000])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("ties", [False, True])
def test_top_is_a_full_sort_that_breaks_ties_by_id(k: int, vocab_size: int, ties: bool) -> None:
    logits = random_logits(5, vocab_size)
    if ties:
        logits = logits.round()
        logits[1] = 0.0
        logits[1, ::2] = -0.0
        logits[2, vocab_size // 3 :] = NEVER
    values, ids = top(logits, k)
    wanted_values, wanted_ids = in_order(logits, k)
    assert (ids.numpy() == wanted_ids).all()
    assert (values.numpy() == wanted_values).all()
    best, token = argmax(logits)
    assert (token.numpy() == wanted_ids[:, 0]).all()
    assert (best.numpy() == wanted_values[:, 0]).all()


def test_a_shorter_list_is_the_start_of_a_longer_one() -> None:
    logits = random_logits(4, 5000).round()
    assert torch.equal(top(logits, 7)[1], top(logits, 900)[1][:, :7])
    assert torch.equal(top(logits[2:3], 20)[1], top(logits, 20)[1][2:3])


def test_nan_is_the_largest() -> None:
    logits = random_logits(2, 200)
    logits[1, 150] = math.nan
    assert argmax(logits)[0][1].isnan()
    assert not argmax(logits)[0][0].isnan()


# Who is touched


FEATURES: dict[type[LogitsProcessor], dict[str, object]] = {
    AllowedTokens: {"allowed_token_ids": [3, 8]},
    BadWords: {"bad_words": [(4,), (5, 6)]},
    MinTokens: {"min_tokens": 5, "eos": [7]},
    LogitBias: {"logit_bias": {3: 2.0}},
    Penalties: {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    Temperature: {"temperature": 0.5},
    MinP: {"min_p": 0.3},
    TopKTopP: {"top_k": 4, "top_p": 0.7},
    ThinkingBudget: {"thinking": Thinking(begin=(3,), end=(4,), forced=(4,), opened=True, budget=1)},
}


def test_every_processor_is_checked_here() -> None:
    assert set(FEATURES) == set(PROCESSORS)


@pytest.mark.case("SMP-05")
@pytest.mark.parametrize("processor_type", PROCESSORS)
def test_only_rows_that_use_a_feature_change(processor_type: type[LogitsProcessor]) -> None:
    processor = processor_type(4, 90, CPU)
    for slot in range(4):
        processor.add(admit(slot, output=(5,), **(FEATURES[processor_type] if slot == 2 else {})))
    logits = random_logits(3, 90)
    assert (applied(processor, logits, [0, 1, 3]) == logits.numpy()).all()
    mixed, alone = applied(processor, logits, [0, 2, 3]), applied(processor, logits[1:2], [2])
    assert (mixed[[0, 2]] == logits[[0, 2]].numpy()).all()
    assert (mixed[1] != logits[1].numpy()).any()
    assert (mixed[1] == alone[0]).all()


@pytest.mark.case("SMP-05")
@pytest.mark.parametrize("processor_type", PROCESSORS)
def test_a_reused_slot_forgets(processor_type: type[LogitsProcessor]) -> None:
    used, fresh = processor_type(2, 90, CPU), processor_type(2, 90, CPU)
    used.add(admit(0, prompt=range(50), output=(5, 9, 9), **FEATURES[processor_type]))
    used.accept(Rows([0], CPU), torch.tensor([9]))
    logits = random_logits(1, 90)
    used.add(admit(0))
    assert (applied(used, logits, [0]) == logits.numpy()).all()
    for processor in (used, fresh):
        processor.add(admit(0, prompt=(8,), output=(5,), **FEATURES[processor_type]))
        processor.accept(Rows([0], CPU), torch.tensor([5]))
    assert (applied(used, logits, [0]) == applied(fresh, logits, [0])).all()


def test_editing_puts_back_what_was_edited() -> None:
    logits = torch.zeros(3, 4)
    with editing(logits, [0, 2]) as part:
        part += 1
    with editing(logits, [0, 1, 2]) as part:
        part += 1
    assert logits[:, 0].tolist() == [2, 1, 2]


# Bias


def test_logit_bias_adds() -> None:
    processor = LogitBias(3, 90, CPU)
    processor.add(admit(0, logit_bias={3: 2.5, 89: -100.0}))
    processor.add(admit(2, logit_bias={0: 1.0}))
    logits = random_logits(3, 90)
    wanted = logits.numpy().copy()
    wanted[0, 3] += 2.5
    wanted[0, 89] -= 100.0
    wanted[2, 0] += 1.0
    assert (applied(processor, logits, [0, 1, 2]) == wanted).all()


def test_allowed_token_ids_leave_no_others() -> None:
    processor = AllowedTokens(3, 90, CPU)
    processor.add(admit(0, allowed_token_ids=[5]))
    processor.add(admit(1, allowed_token_ids=[7, 2, 89]))
    logits = random_logits(3, 90)
    wanted = logits.numpy().copy()
    wanted[0, [i for i in range(90) if i != 5]] = NEVER
    wanted[1, [i for i in range(90) if i not in (7, 2, 89)]] = NEVER
    assert (applied(processor, logits, [0, 1, 2]) == wanted).all()


@pytest.mark.case("SMP-08")
def test_ids_without_a_logit_do_no_harm() -> None:
    outside = [90, 10**7]
    logits = random_logits(1, 90)
    for processor_type, wrong in (
        (LogitBias, {"logit_bias": {90: 5.0, 10**7: 1.0}}),
        (MinTokens, {"min_tokens": 3, "eos": outside}),
        (BadWords, {"bad_words": [(10**7,), (1, 90), ()]}),
        (Penalties, {"prompt": outside, "output": outside, "repetition_penalty": 1.5}),
    ):
        processor = processor_type(1, 90, CPU)
        processor.add(admit(0, **wrong))
        assert (applied(processor, logits, [0]) == logits.numpy()).all()
        processor.accept(Rows([0], CPU), torch.tensor([3]))
    processor = AllowedTokens(1, 90, CPU)
    processor.add(admit(0, allowed_token_ids=outside))
    assert (applied(processor, logits, [0]) == NEVER).all()


# Bad words


@pytest.mark.case("SMP-08")
def test_bad_words_rule_out_what_would_complete_one() -> None:
    rng = np.random.default_rng(0)
    words = {
        0: [(3,), (0, 1), (1, 1, 2)],
        1: [(0, 2), (1, 2), (2, 2, 2, 0)],  # several words that end alike
        2: [],
        3: [(4, 3, 2, 1, 0, 1), (4, 4)],
    }
    processor = BadWords(4, 5, CPU)
    # Prompts end with the start of a word, which does not count.
    prompts = {0: (0,), 1: (0, 2), 2: (1,), 3: (4, 3, 2, 1, 0)}
    outputs: dict[int, list[int]] = {slot: [] for slot in words}
    for slot in words:
        processor.add(admit(slot, prompts[slot], bad_words=words[slot]))
    for step in range(80):
        if step in (20, 50):  # comes back after a preemption
            processor.add(admit(1, prompts[1], outputs[1], bad_words=words[1]))
        slots = [slot for slot in rng.permutation(4).tolist() if rng.random() < 0.8] or [0]
        got = applied(processor, torch.zeros(len(slots), 5), slots)
        for row, slot in enumerate(slots):
            for token in range(5):
                text = (*outputs[slot], token)
                banned = any(text[-len(word) :] == word for word in words[slot])
                assert got[row, token] == (NEVER if banned else 0.0), (slot, text)
        tokens = rng.integers(0, 5, len(slots))
        processor.accept(Rows(slots, CPU), torch.tensor(tokens))
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            outputs[slot].append(token)


# Minimum length


@pytest.mark.case("LEN-03")
def test_min_tokens_rules_out_every_end_until_then() -> None:
    processor = MinTokens(3, 90, CPU)
    processor.add(admit(0, eos=[5, 6], stop_token_ids=[9], min_tokens=3))
    processor.add(admit(1, eos=[5, 6], stop_token_ids=[9], min_tokens=2, ignore_eos=True))
    logits = random_logits(3, 90)
    for step in range(5):
        got = applied(processor, logits, [0, 1, 2])
        masked = [np.flatnonzero(row == NEVER).tolist() for row in got]
        assert masked == [[5, 6, 9] if step < 3 else [], [9] if step < 2 else [], []]
        assert (got[got != NEVER] == logits.numpy()[got != NEVER]).all()
        processor.accept(Rows([0, 1, 2], CPU), torch.tensor([1, 1, 1]))
    processor.add(admit(0, output=[1, 1], eos=[5], min_tokens=3))
    assert applied(processor, logits, [0, 1, 2])[0, 5] == NEVER
    processor.add(admit(0, output=[1, 1, 1], eos=[5], min_tokens=3))
    assert (applied(processor, logits, [0, 1, 2]) == logits.numpy()).all()


def test_ignore_eos_without_stop_tokens_masks_nothing() -> None:
    processor = MinTokens(1, 90, CPU)
    processor.add(admit(0, eos=[5, 6], min_tokens=3, ignore_eos=True))
    logits = random_logits(1, 90)
    assert (applied(processor, logits, [0]) == logits.numpy()).all()


# Penalties


def penalized(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    logits = logits.astype(np.float64)
    for token in {*prompt, *output}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(output):
        logits[token] -= frequency * list(output).count(token) + presence
    return logits


def check_penalties_of_the_case() -> None:
    prompt, output = (9, 4, 9, 9), (11, 2, 11)
    logits = random_logits(1, 90)
    logits[0, 9], logits[0, 11] = 2.0, -1.5
    for repetition in (1.0, 1.3, 0.8):
        for presence in (0.0, 0.7):
            for frequency in (0.0, 0.5, -0.5):
                processor = Penalties(1, 90, CPU)
                processor.add(
                    admit(
                        0,
                        prompt,
                        output[:1],
                        repetition_penalty=repetition,
                        presence_penalty=presence,
                        frequency_penalty=frequency,
                    )
                )
                for token in output[1:]:
                    processor.accept(Rows([0], CPU), torch.tensor([token]))
                got = torch.tensor(applied(processor, logits, [0])).log_softmax(-1)[0].numpy()
                wanted = penalized(logits[0].numpy(), prompt, output, repetition, presence, frequency)
                wanted -= np.log(np.exp(wanted).sum())
                np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=f"{repetition} {presence} {frequency}")
                if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
                    assert (applied(processor, logits, [0]) == logits.numpy()).all()


@pytest.mark.case("SMP-04")
def test_penalties_count_the_right_tokens() -> None:
    check_penalties_of_the_case()


@pytest.mark.case("SMP-04")
@pytest.mark.parametrize("fault", ["prompt counts as output", "prompt is forgotten", "no count"])
def test_penalties_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "prompt counts as output":
        monkeypatch.setattr(penalties, "generated", lambda admit: admit.tokens)
    elif fault == "prompt is forgotten":
        monkeypatch.setattr(penalties, "in_vocabulary", lambda ids, size: [] if ids == (9, 4, 9, 9) else list(ids))
    else:
        monkeypatch.setattr(Penalties, "accept", lambda self, rows, tokens: None)
    with pytest.raises(AssertionError):
        check_penalties_of_the_case()


@pytest.mark.case("SMP-04")
def test_repetition_is_that_of_hugging_face() -> None:
    logits, tokens = random_logits(1, 90), [3, 8, 8, 60]
    processor = Penalties(1, 90, CPU)
    processor.add(admit(0, tokens[:2], tokens[2:], repetition_penalty=1.7))
    wanted = hf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    np.testing.assert_allclose(applied(processor, logits, [0]), wanted.numpy(), rtol=1e-6)


@pytest.mark.case("SMP-04", "SMP-05")
def test_penalties_over_a_random_schedule() -> None:
    rng = np.random.default_rng(1)
    params = {
        0: (1.2, 0.3, 0.2),
        1: (1.0, -0.5, 0.0),
        2: (1.0, 0.0, 0.0),
        3: (0.7, 0.0, 1.0),
        4: (1.0, 0.0, -0.3),
    }
    prompts = {slot: rng.integers(0, 30, [1, 100, 5, 7, 40][slot]).tolist() for slot in params}
    outputs: dict[int, list[int]] = {slot: [] for slot in params}
    processor = Penalties(5, 30, CPU)

    def enter(slot: int) -> None:
        repetition, presence, frequency = params[slot]
        processor.add(
            admit(
                slot,
                prompts[slot],
                outputs[slot],
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=frequency,
            )
        )

    for slot in params:
        enter(slot)
    for step in range(120):
        if step % 17 == 5:
            enter(int(rng.integers(0, 5)))
        slots = [slot for slot in rng.permutation(5).tolist() if rng.random() < 0.7] or [0]
        logits = random_logits(len(slots), 30, seed=step)
        got = applied(processor, logits, slots)
        for row, slot in enumerate(slots):
            wanted = penalized(logits[row].numpy(), prompts[slot], outputs[slot], *params[slot])
            np.testing.assert_allclose(got[row], wanted, atol=1e-4)
        tokens = rng.integers(0, 30, len(slots))
        processor.accept(Rows(slots, CPU), torch.tensor(tokens))
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            outputs[slot].append(token)


# Temperature and truncation


def test_temperature_divides() -> None:
    processor = Temperature(3, 90, CPU)
    for slot, temperature in enumerate((0.0, 1.0, 0.5)):
        processor.add(admit(slot, temperature=temperature))
    logits = random_logits(3, 90)
    wanted = logits.numpy() / np.array([[1], [1], [0.5]], np.float32)
    assert (applied(processor, logits, [0, 1, 2]) == wanted).all()


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_is_that_of_hugging_face(min_p: float) -> None:
    processor = MinP(2, 90, CPU)
    processor.add(admit(1, min_p=min_p))
    logits = random_logits(2, 90)
    got = applied(processor, logits, [0, 1])
    wanted = hf.MinPLogitsWarper(min_p)(torch.zeros(1, 1), logits[1:].clone())
    assert (got[1] == wanted[0].numpy()).all()
    assert (got[0] == logits[0].numpy()).all()


def kept(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The definition: a full sort (equal logits by id), top-k, then top-p on the renormalised rest."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    return set(order[before < top_p].tolist()) if top_p < 1 else set(order.tolist())


CUTS = [(1, 1.0), (7, 1.0), (0, 0.5), (0, 0.9), (0, 1e-9), (50, 0.8), (200, 0.6), (6000, 0.999), (10**9, 1.0), (0, 1.0)]


def check_top_k_top_p(logits: Tensor) -> None:
    """All cuts in one batch, each alone, and some of them."""
    processor = TopKTopP(len(CUTS), logits.shape[1], CPU)
    for slot, (top_k, top_p) in enumerate(CUTS):
        processor.add(admit(slot, top_k=top_k, top_p=top_p))
    together = applied(processor, logits, range(len(CUTS)))
    some = applied(processor, logits[[3, 0, 5]], [3, 0, 5])
    assert (some == together[[3, 0, 5]]).all()
    for slot, (top_k, top_p) in enumerate(CUTS):
        assert (applied(processor, logits[slot : slot + 1], [slot]) == together[slot]).all()
        left = np.flatnonzero(together[slot] != NEVER)
        assert set(left.tolist()) == kept(logits[slot].numpy(), top_k, top_p), (top_k, top_p)
        assert (together[slot][left] == logits[slot].numpy()[left]).all()


@pytest.mark.parametrize("scale", [8.0, 2.0, 0.1], ids=["peaked", "broad", "flat"])
@pytest.mark.parametrize("vocab_size", [60, 203, 20000])
def test_top_k_top_p_keeps_what_its_definition_says(scale: float, vocab_size: int) -> None:
    check_top_k_top_p(random_logits(len(CUTS), vocab_size, scale=scale))


@pytest.mark.parametrize("vocab_size", [60, 203, 2000])
def test_top_k_top_p_with_ties_keeps_lower_ids(vocab_size: int) -> None:
    logits = random_logits(len(CUTS), vocab_size).round()
    check_top_k_top_p(logits)
    processor = TopKTopP(1, vocab_size, CPU)
    processor.add(admit(0, top_k=1))
    logits[0] = 0.0
    assert np.flatnonzero(applied(processor, logits[:1], [0])[0] == 0.0).tolist() == [0]


def test_top_k_top_p_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k_top_p, "top", lambda logits, k: top(logits, max(k - 1, 1)))
    with pytest.raises(AssertionError):
        check_top_k_top_p(random_logits(len(CUTS), 203))


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (0, 0.7), (20, 0.7)])
def test_top_k_top_p_is_that_of_hugging_face(top_k: int, top_p: float) -> None:
    processor = TopKTopP(3, 500, CPU)
    for slot in range(3):
        processor.add(admit(slot, top_k=top_k, top_p=top_p))
    logits = random_logits(3, 500)
    wanted = logits.clone()
    if top_k:
        wanted = hf.TopKLogitsWarper(top_k)(torch.zeros(1, 1), wanted)
    wanted = hf.TopPLogitsWarper(top_p)(torch.zeros(1, 1), wanted)
    assert (applied(processor, logits, [0, 1, 2]) == wanted.numpy()).all()


# Drawing


def splitmix64(state: int) -> int:
    """The published finalizer, in Python's unbounded integers."""
    mask = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


SEEDS = [0, 1, 2, -2, 7, 2**31, -(2**63), 2**63 - 1]


@pytest.mark.case("SMP-02")
@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_are_splitmix64_of_seed_and_position(seed: int) -> None:
    positions = torch.tensor([0, 1, 5, 131071])
    got = uniforms(mix(torch.tensor(seed)), positions).tolist()
    for number, position in zip(got, positions.tolist(), strict=True):
        state = (splitmix64(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        assert number == (splitmix64(state) >> 11) / 2**53


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    over_positions = uniforms(mix(torch.tensor(3)), torch.arange(50000))
    over_seeds = uniforms(mix(torch.arange(50000)), torch.tensor(12))
    for numbers in (over_positions, over_seeds):
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        counts = torch.histc(numbers.float(), 100, 0, 1).numpy()
        assert ((counts - 500) ** 2 / 500).sum() < 180  # chi-square, 99 degrees of freedom: p about 1e-6
        assert len(numbers.unique()) == 50000
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def check_draw(vocab_size: int) -> None:
    """Against a float64 inverse CDF, with uniforms over all of [0, 1) and at its ends."""
    rng = np.random.default_rng(0)
    uniform = np.concatenate([rng.random(200), 1 - rng.random(50) * 1e-6, [0.0, 1 - 2**-53]])
    logits = rng.normal(size=vocab_size) * 2
    logits[vocab_size // 7 : vocab_size // 5] = NEVER
    logits[-(vocab_size // 20) :] = NEVER
    logits[0] = NEVER
    logits[vocab_size // 2] = np.log(np.exp(logits).sum())  # half of the mass
    weights = np.exp(logits.astype(np.float32).astype(np.float64))
    ends = np.cumsum(weights / weights.sum())
    got = draw(torch.tensor(logits, dtype=torch.float32).expand(len(uniform), -1), torch.tensor(uniform)).numpy()
    for token, number in zip(got, uniform, strict=True):
        assert weights[token] > 0
        assert ends[token] - weights[token] / weights.sum() - 1e-6 <= number <= ends[token] + 1e-6
    assert (got == np.searchsorted(ends, uniform, side="right"))[:200].mean() > 0.98
    assert len(set(got.tolist())) > 30


@pytest.mark.parametrize("vocab_size", [500, 1000, 4096, 150001])
def test_draw_inverts_the_distribution_function(vocab_size: int) -> None:
    check_draw(vocab_size)


def test_draw_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "octavo.sampling.draw._first_above", lambda sums, target: (sums < target).sum(-1, keepdim=True).clamp(max=7)
    )
    with pytest.raises(AssertionError):
        check_draw(500)


def test_draw_reaches_the_far_tail() -> None:
    """Tokens of 1e-9 each behind one that has nearly everything: a float32 running sum would never get there."""
    logits = torch.full((1, 150000), math.log(1e-9))
    logits[0, 0] = 0.0
    total = 1 + 149999e-9
    for token in (1, 2, 77777, 149998, 149999):
        uniform = torch.tensor([(1 + (token - 0.5) * 1e-9) / total], dtype=torch.float64)
        assert abs(draw(logits, uniform).item() - token) <= 150  # weights are float32: 1e-7 of the whole


@pytest.mark.parametrize("only", [0, 63, 64, 199])
def test_draw_of_a_single_possible_token(only: int) -> None:
    logits = torch.full((5, 200), NEVER)
    logits[:, only] = -50.0
    assert (draw(logits, torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53, 0.9]).double()) == only).all()


# Logprobs


@pytest.mark.case("LP-01", "LP-02")
def test_token_logprobs_are_those_of_a_log_softmax() -> None:
    logits = random_logits(5, 203)
    tokens, ks = torch.tensor([3, 8, 202, 0, 50]), [0, 1, 5, -1, 1000]
    wanted = logits.double().log_softmax(-1).numpy()
    for i, entry in enumerate(token_logprobs(logits, tokens, ks)):
        k = min(203 if ks[i] == -1 else ks[i], 203)
        token = int(tokens[i])
        assert entry.token_ids[0] == token
        assert entry.rank == 1 + int((logits[i] > logits[i, token]).sum())
        assert entry.token_ids[1:] == tuple(in_order(logits[i : i + 1], k)[1][0].tolist())
        np.testing.assert_allclose(entry.logprobs, wanted[i, list(entry.token_ids)], atol=1e-5)
        assert all(isinstance(value, float) for value in entry.logprobs)
    assert token_logprobs(logits[:0], tokens[:0], []) == []


def test_token_logprobs_as_logits() -> None:
    logits = random_logits(1, 90)
    (entry,) = token_logprobs(logits, torch.tensor([4]), [3], as_logits=True)
    assert entry.logprobs == tuple(logits[0, list(entry.token_ids)].tolist())
