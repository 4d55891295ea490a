"""The output of a request depends on nothing but the request: exact token ids, logprobs within 1e-4, fp32."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import Make
from octavo import LLM, RequestOutput, SamplingParams

OPTIONS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([1, 2, 7, 16, 17, 64, 512]),
        "block_size": st.sampled_from([1, 4, 16, 32]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "enable_prefix_caching": st.booleans(),
        "depth": st.sampled_from([0, 1, 4]),
        "num_scheduler_steps": st.sampled_from([1, 8]),
        "scarce": st.booleans(),
    }
)
MAX_LEN = 128


def requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, with every kind of sampling."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 600) for _ in range(rng.randint(8, 60))] for _ in range(2)]
    prompts, params = [], []
    for i in range(8):
        prompts.append(
            rng.choice(stems)[: rng.randint(4, 60)] + [rng.randrange(3, 600) for _ in range(rng.randint(1, 8))]
        )
        kind: dict[str, Any] = rng.choice(
            [
                {"temperature": 0},
                {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
                {"temperature": 1.0, "seed": i},
                {"temperature": 0.8, "seed": i, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
                {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 3},
            ]
        )
        params.append(SamplingParams(max_tokens=rng.randint(3, 40), logprobs=2, **kind))
    return prompts, params


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert texts(found) == texts(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
        for row, other in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert {t: e.logprob for t, e in row.items()} == pytest.approx(
                {t: e.logprob for t, e in other.items()}, abs=1e-4
            )


@pytest.mark.case("KV-04", "SMP-05", "PFX-07", "KV-08")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS, seed=st.integers(0, 5))
def test_nothing_but_the_request_decides(options: dict[str, Any], seed: int, make_llm: Make) -> None:
    prompts, params = requests(seed)
    expected = alone(make_llm, seed)
    options = dict(options)
    blocks = -(-MAX_LEN // options["block_size"])
    options["num_gpu_blocks_override"] = blocks if options.pop("scarce") else 8 * blocks
    with make_llm(max_model_len=MAX_LEN, **options) as llm:
        same(llm.generate(prompts, params, use_tqdm=False), expected)
        same(llm.generate(prompts, params, use_tqdm=False), expected)  # again, on a warm cache
        assert_idle(llm)


_alone: dict[int, list[RequestOutput]] = {}


def alone(make_llm: Make, seed: int) -> list[RequestOutput]:
    """Each request in an engine of its own kind: one at a time, nothing shared, nothing ahead."""
    if seed not in _alone:
        with make_llm(max_model_len=MAX_LEN, max_num_seqs=1, enable_prefix_caching=False, depth=0) as llm:
            prompts, params = requests(seed)
            _alone[seed] = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    return _alone[seed]


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert llm.engine.num_unfinished == 0
    assert not llm.engine.loop.has_work
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_usable


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_the_asked_depth_is_reached(make_llm: Make, depth: int) -> None:
    llm = make_llm(depth=depth)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert llm.engine.loop.deepest == depth


def test_scarce_blocks_force_preemption_and_change_nothing(make_llm: Make) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 600) for _ in range(20)] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    expected = make_llm(max_model_len=96).generate(prompts, params, use_tqdm=False)
    llm = make_llm(max_model_len=96, block_size=4, num_gpu_blocks_override=40)
    same(llm.generate(prompts, params, use_tqdm=False), expected)
    assert llm.engine.scheduler.num_preemptions > 0


def test_repeated_steps_really_repeat(make_llm: Make) -> None:
    llm = make_llm(num_scheduler_steps=8)
    repeats: list[int] = []
    launch = llm.engine.loop.executor.launch
    llm.engine.loop.executor.launch = lambda step: (repeats.append(step.repeat), launch(step))[1]
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=33, ignore_eos=True), use_tqdm=False)
    assert max(repeats) == 8
