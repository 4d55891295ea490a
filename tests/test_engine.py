"""The engine from outside: samples, seeds, limits, aborts, prefix hits, faults; each case of the field with its id."""

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny_models
from conftest import Make
from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.worker.machine import resident_memory
from test_invariance import assert_idle, same, texts

GREEDY = {"temperature": 0, "ignore_eos": True}


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 600) for _ in range(length)]


def run(llm: LLM, prompts: Any, params: Any = None, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(llm: LLM, prompt: list[int], **params: Any) -> list[int]:
    return run(llm, [prompt], SamplingParams(**params))[0].outputs[0].token_ids


# Samples and seeds


@pytest.mark.case("SMP-01", "KV-09")
@pytest.mark.parametrize("caching", [True, False])
def test_n_samples_are_those_of_n_requests(make_llm: Make, caching: bool) -> None:
    llm = make_llm(enable_prefix_caching=caching)
    prompt = ids(21)
    (output,) = run(llm, [prompt], SamplingParams(n=4, seed=42, max_tokens=40, ignore_eos=True))
    samples = output.outputs
    assert [s.index for s in samples] == [0, 1, 2, 3]
    assert [s.finish_reason for s in samples] == ["length"] * 4
    assert len({tuple(s.token_ids) for s in samples}) == 4
    for i, sample in enumerate(samples):
        assert sample.token_ids == tokens(llm, prompt, seed=42 + i, max_tokens=40, ignore_eos=True)
    assert_idle(llm)


@pytest.mark.case("KV-09")
def test_samples_share_the_prompt_s_full_blocks(make_llm: Make) -> None:
    """21 prompt ids and 10 more each: one shared full block, and a private one for each of the four."""
    llm = make_llm(num_gpu_blocks_override=8, max_model_len=32, block_size=16)
    peak = 0
    pool = llm.engine.scheduler.pool
    allocate = pool.allocate

    def watched(count: int) -> list[int] | None:
        nonlocal peak
        blocks = allocate(count)
        peak = max(peak, pool.num_usable - pool.num_free)
        return blocks

    pool.allocate = watched  # type: ignore[method-assign]
    run(llm, [ids(21)], SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True))
    assert peak == 5
    assert llm.engine.scheduler.num_preemptions == 0


@pytest.mark.case("SMP-02")
def test_seeds_repeat_and_differ(make_llm: Make) -> None:
    llm, other = make_llm(), make_llm()
    prompt = ids(9)
    found = {}
    for seed in (0, 1, 2**31, 2**63 - 1, -5):
        found[seed] = tokens(llm, prompt, seed=seed, max_tokens=20, ignore_eos=True)
        assert tokens(other, prompt, seed=seed, max_tokens=20, ignore_eos=True) == found[seed]
    assert len({tuple(t) for t in found.values()}) == len(found)
    three = [
        run(x, [prompt], SamplingParams(n=3, seed=7, max_tokens=20, ignore_eos=True))[0].outputs for x in (llm, other)
    ]
    assert len({tuple(s.token_ids) for s in three[0]}) == 3
    assert [s.token_ids for s in three[0]] == [s.token_ids for s in three[1]]


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engine_s(make_llm: Make) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = texts(run(make_llm(seed=3), [ids(5)] * 3, params))
    assert len({tuple(t) for t in first}) == 3
    assert texts(run(make_llm(seed=3), [ids(5)] * 3, params)) == first
    assert texts(run(make_llm(seed=4), [ids(5)] * 3, params)) != first


@pytest.mark.case("SMP-05")
def test_forty_mixed_requests_in_eight_slots_equal_their_solo_runs(make_llm: Make) -> None:
    rng = random.Random(5)
    prompts = [ids(rng.randint(1, 60), i) for i in range(40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {7: 4.0, 9: -100}}, {"min_tokens": 5},
        {"allowed_token_ids": list(range(50, 90))}, {"temperature": 1.7},
    ]  # fmt: skip
    params = [SamplingParams(**{"seed": i, "max_tokens": rng.randint(5, 40), **rng.choice(kinds)}) for i in range(40)]
    solo = make_llm(max_num_seqs=1)
    expected = [run(solo, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    for schedule in range(3):
        order = list(range(40))
        random.Random(schedule).shuffle(order)
        llm = make_llm(max_num_seqs=8, max_num_batched_tokens=32)
        found = run(llm, [prompts[i] for i in order], [params[i] for i in order])
        for i, output in zip(order, found, strict=True):
            assert output.outputs[0].token_ids == expected[i].outputs[0].token_ids, params[i]


@pytest.mark.case("SMP-08")
def test_ids_outside_the_vocabulary_are_refused_and_allowed_ones_obeyed(make_llm: Make) -> None:
    llm = make_llm()
    for bad in ({"logit_bias": {999999: 5}}, {"allowed_token_ids": [10**7]}, {"stop_token_ids": [600]}):
        with pytest.raises(InvalidRequest, match="0 to 599"):
            run(llm, [[5]], SamplingParams(**bad))
    assert set(tokens(llm, ids(4), allowed_token_ids=[3], max_tokens=8, ignore_eos=True)) == {3}


# Lengths


@pytest.mark.case("LEN-01", "LEN-02")
def test_the_border_of_the_context(make_llm: Make) -> None:
    llm = make_llm(max_model_len=64)
    for length, max_tokens, count in ((62, 1, 1), (62, 2, 2), (63, 1, 1), (63, None, 1), (62, None, 2)):
        output = run(llm, [ids(length)], SamplingParams(max_tokens=max_tokens, **GREEDY))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (count, "length")
    for length in (64, 65, 1000):
        with pytest.raises(InvalidRequest, match=rf"64 tokens.*has {length}"):
            run(llm, [ids(length)], SamplingParams(max_tokens=1))
    for length, max_tokens in ((62, 3), (63, 2), (1, 64)):
        with pytest.raises(InvalidRequest, match=rf"64 tokens.*{length + max_tokens} in all"):
            run(llm, [ids(length)], SamplingParams(max_tokens=max_tokens))
    with pytest.raises(InvalidRequest, match="64 tokens"):
        run(llm, [ids(64)], SamplingParams(n=2, max_tokens=1))
    assert len(tokens(llm, ids(10), max_tokens=3, **GREEDY)) == 3


@pytest.mark.case("LEN-07", "LEN-08")
def test_odd_prompts_are_refused_and_the_engine_lives(make_llm: Make) -> None:
    llm = make_llm()
    assert run(llm, []) == []
    good = tokens(llm, [5, 6], max_tokens=4, **GREEDY)
    refused: list[Any] = [
        [[]], [[-1]], [[600]], [[10**12]], [[True]], [[1.0]], [[5, "a"]], [None], 5, [{}], [{"prompt_token_ids": []}],
        [{"prompt_token_ids": [5], "multi_modal_data": {}}], ["text without a tokenizer"], [{"prompt": 5}],
    ]  # fmt: skip
    for prompts in refused:
        with pytest.raises(InvalidRequest):
            run(llm, prompts)
    assert tokens(llm, [5, 6], max_tokens=4, **GREEDY) == good
    one, several = run(llm, [5, 6]), run(llm, [[5, 6], [7]])
    assert (len(one), len(several)) == (1, 2)
    assert one[0].prompt_token_ids == [5, 6]
    assert (
        run(llm, {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=4, **GREEDY))[0].outputs[0].token_ids == good
    )
    assert_idle(llm)


def test_lists_of_parameters_must_fit_the_prompts(make_llm: Make) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest, match="2 items for 1"):
        run(llm, [[5]], [SamplingParams()] * 2)
    with pytest.raises(InvalidRequest, match="SamplingParams, not dict"):
        run(llm, [[5]], [{"temperature": 0}])
    with pytest.raises(InvalidRequest, match="priority"):
        run(llm, [[5]], priority=["high"])


@pytest.mark.case("LP-06")
def test_logprobs_have_a_limit(make_llm: Make) -> None:
    llm = make_llm(max_logprobs=5)
    for params in ({"logprobs": 6}, {"logprobs": 10**9}, {"logprobs": -1}, {"prompt_logprobs": 6}):
        with pytest.raises(InvalidRequest, match="max_logprobs=5"):
            run(llm, [[5]], SamplingParams(**params))
    (output,) = run(make_llm(max_logprobs=-1), [[5]], SamplingParams(logprobs=-1, max_tokens=1))
    assert len(output.outputs[0].logprobs[0]) == 600


@pytest.mark.case("LP-02")
def test_the_sampled_token_is_always_among_the_logprobs(make_llm: Make) -> None:
    llm = make_llm()
    for count in (0, 1, 5):
        params = [SamplingParams(temperature=1.5, seed=s, max_tokens=8, logprobs=count) for s in range(20)]
        outside = 0
        for output in run(llm, [[5, 6, 7]] * 20, params):
            for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                assert token in row
                outside += row[token].rank > count
                assert len(row) == count + (row[token].rank > count)
        assert outside > 0


@pytest.mark.case("LEN-03")
def test_ignoring_the_end_of_sequence_ignores_every_such_id(tmp_path: Path, make_llm: Make) -> None:
    """The chain 3 -> 1 (end) -> 4 -> 2 (another end) -> 3 goes on for as long as it is asked to."""
    folder = tiny_models.save(tiny_models.chain_model({3: 1, 1: 4, 4: 2, 2: 3}, 8), tmp_path)
    llm = make_llm(folder, max_model_len=600)
    output = run(llm, [[3]], SamplingParams(temperature=0, max_tokens=512, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (512, "length")
    output = run(llm, [[3]], SamplingParams(temperature=0, max_tokens=512))[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([1], "stop", None)
    output = run(llm, [[3]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[4]))[
        0
    ].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([1, 4], "stop", 4)


def test_min_tokens_holds_the_end_back(tmp_path: Path, make_llm: Make) -> None:
    folder = tiny_models.save(tiny_models.chain_model({3: 1}, 8), tmp_path)
    output = run(make_llm(folder), [[3]], SamplingParams(temperature=0, max_tokens=9, min_tokens=4))[0].outputs[0]
    assert not set(output.token_ids[:4]) & {1, 2}
    assert len(output.token_ids) >= 4


# Prefix cache


@pytest.mark.case("PFX-01")
@pytest.mark.parametrize("budget", [8, 512])
def test_a_repeated_prompt_hits_whole_blocks_and_says_the_same(make_llm: Make, budget: int) -> None:
    llm = make_llm(max_num_batched_tokens=budget)
    cold = make_llm(enable_prefix_caching=False)
    params = SamplingParams(max_tokens=6, logprobs=0, **GREEDY)
    for length in (1, 15, 16, 17, 31, 32, 33, 160):
        prompt = ids(length, length)
        expected = run(cold, [prompt], params)
        hits = []
        for _ in range(3):
            found = run(llm, [prompt], params)
            same(found, expected)
            hits.append(found[0].num_cached_tokens)
        assert hits == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]
        same(run(llm, [prompt] * 8, params), expected * 8)
    assert run(cold, [ids(160)] * 2, params)[1].num_cached_tokens == 0


@pytest.mark.case("PFX-02")
def test_only_equal_beginnings_are_shared(make_llm: Make) -> None:
    llm, cold = make_llm(), make_llm(enable_prefix_caching=False)
    base = ids(40)
    prompts = [base]
    for place in (0, 15, 16, 17, 31, 32, 39):
        for extra in (0, 1, 20):
            prompts.append([*base[:place], (base[place] + 1) % 600, *base[place + 1 :], *ids(extra, place)])
    params = SamplingParams(max_tokens=4, **GREEDY)
    expected = run(cold, prompts, params)
    for begin in range(0, len(prompts), 4):
        for prompt, output, wanted in zip(
            prompts[begin : begin + 4],
            run(llm, prompts[begin : begin + 4], params),
            expected[begin : begin + 4],
            strict=True,
        ):
            assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
            common = max((prefix_len(prompt, other) for other in prompts if other is not prompt), default=0)
            assert output.num_cached_tokens <= common


def prefix_len(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.case("PFX-06")
def test_salts_separate_caches(make_llm: Make, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm()
    prompt = ids(100)

    def hit(**salt: Any) -> int:
        (output,) = run(llm, [{"prompt_token_ids": prompt, **salt}], SamplingParams(max_tokens=1, **GREEDY))
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens

    assert [hit(cache_salt="s1"), hit(cache_salt="s1"), hit(cache_salt="s2"), hit(), hit(), hit(cache_salt="s2")] == [
        0, 96, 0, 0, 96, 96,
    ]  # fmt: skip
    for salt in ("", "x" * 2**20, 5):
        with pytest.raises(InvalidRequest, match="cache_salt"):
            hit(cache_salt=salt)
    assert "s1" not in caplog.text


@pytest.mark.case("PFX-07")
def test_equal_prompts_in_one_step_and_turns_of_a_talk(make_llm: Make) -> None:
    llm, cold = (
        make_llm(max_num_batched_tokens=16, max_model_len=512),
        make_llm(enable_prefix_caching=False, max_model_len=512),
    )
    params = SamplingParams(max_tokens=12, **GREEDY)
    together = run(llm, [ids(100)] * 8, params)
    assert texts(together) == texts(run(cold, [ids(100)], params)) * 8
    assert sum(output.num_cached_tokens or 0 for output in together) >= 7 * 96
    talks = [ids(30, seed) for seed in range(8)]
    for turn in range(6):
        before = [len(talk) for talk in talks]
        talks = [talk + ids(7, 100 * turn + i) for i, talk in enumerate(talks)] if turn else talks
        found = run(llm, talks, params)
        assert texts(found) == texts(run(cold, talks, params))
        if turn:
            for length, output in zip(before, found, strict=True):
                assert (output.num_cached_tokens or 0) >= (length - 1) // 16 * 16
        talks = [talk + output.outputs[0].token_ids for talk, output in zip(talks, found, strict=True)]


@pytest.mark.case("PFX-08")
def test_a_reset_while_requests_run_changes_no_answer(make_llm: Make) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=20, **GREEDY)
    prompts = [ids(50, i) for i in range(8)]
    expected = texts(run(make_llm(), prompts, params))
    engine = llm.engine
    for prompt in prompts:
        engine.add(engine.check(prompt, params))
    found: dict[str, list[int]] = {}
    for step in range(10**4):
        if not engine.has_unfinished:
            break
        if step in (1, 5):
            llm.reset_prefix_cache()
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    assert list(dict(sorted(found.items(), key=lambda item: int(item[0]))).values()) == expected
    llm.reset_prefix_cache()
    assert run(llm, [prompts[0]], params)[0].num_cached_tokens == 0
    assert_idle(llm)


@pytest.mark.case("LP-01")
def test_prompt_logprobs_do_not_read_the_cache_and_survive_preemption(make_llm: Make) -> None:
    params = SamplingParams(max_tokens=60, prompt_logprobs=1, **GREEDY)
    prompts = [ids(20, i) for i in range(6)]
    expected = run(make_llm(max_model_len=96), prompts, params)
    llm = make_llm(max_model_len=96, block_size=4, num_gpu_blocks_override=40)
    for _ in range(2):
        found = run(llm, prompts, params)
        assert llm.engine.scheduler.num_preemptions > 0
        for a, b in zip(found, expected, strict=True):
            assert a.num_cached_tokens == 0
            assert len(a.prompt_logprobs) == 20
            for row, other in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
                assert {t: e.logprob for t, e in row.items()} == pytest.approx(
                    {t: e.logprob for t, e in other.items()}, abs=1e-4
                )


# Blocks, limits, order


@pytest.mark.case("KV-01")
def test_what_cannot_fit_is_refused_and_others_are_served(make_llm: Make) -> None:
    with pytest.raises(InvalidConfig, match="max_model_len to 128"):
        make_llm(max_model_len=512, num_gpu_blocks_override=8)
    llm = make_llm(max_model_len="auto", num_gpu_blocks_override=8)
    assert llm.engine.max_model_len == 128
    with pytest.raises(InvalidRequest, match="128 tokens"):
        run(llm, [ids(200)], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="300 in all"):
        run(llm, [ids(100)], SamplingParams(max_tokens=200))
    assert len(tokens(llm, ids(100), max_tokens=28, **GREEDY)) == 28
    assert len(tokens(llm, ids(5), max_tokens=3, **GREEDY)) == 3


@pytest.mark.case("KV-08")
@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("budget", [1, 6, 17])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("max_model_len", [17, 33])
def test_tiny_and_odd_limits_work(
    make_llm: Make, max_num_seqs: int, budget: int, block_size: int, max_model_len: int
) -> None:
    llm = make_llm(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=block_size, max_model_len=max_model_len
    )
    prompts = [ids(length, length) for length in (10, 12, 14, 15, 16)]
    params = [SamplingParams(max_tokens=17 - len(p), **GREEDY) for p in prompts]
    assert texts(run(llm, prompts, params)) == texts(run(make_llm(), prompts, params))


@pytest.mark.case("KV-07")
def test_priority_decides_who_comes_first(make_llm: Make) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1, depth=0)
    engine = llm.engine
    for i, priority in enumerate([5, 0, 5, 0]):
        engine.add(
            engine.check(ids(8, i), SamplingParams(max_tokens=2, **GREEDY), request_id=str(i), priority=priority)
        )
    order = []
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["1", "3", "0", "2"]


# Aborts and faults


@pytest.mark.case("ABT-03", "KV-03")
def test_aborts_at_any_moment_leave_nothing_and_harm_nobody(make_llm: Make) -> None:
    rng = random.Random(9)
    llm = make_llm(max_num_batched_tokens=24, block_size=4, num_gpu_blocks_override=80, max_num_seqs=6)
    prompts = [ids(rng.randint(1, 60), i % 7) for i in range(120)]
    params = [
        SamplingParams(n=rng.choice([1, 1, 2]), seed=i, max_tokens=rng.randint(1, 20), ignore_eos=True)
        for i in range(120)
    ]
    expected = run(make_llm(), prompts, params)
    engine = llm.engine
    doomed = {i for i in range(120) if rng.random() < 0.5}
    found: dict[str, RequestOutput] = {}
    queued = 0
    for _ in range(10**5):
        if queued == 120 and not engine.has_unfinished:
            break
        if queued < 120 and rng.random() < 0.7:
            engine.add(engine.check(prompts[queued], params[queued], request_id=str(queued)))
            queued += 1
        if rng.random() < 0.3 and queued:
            victim = rng.randrange(queued)
            if victim in doomed:
                engine.abort(str(victim))
                engine.abort(str(victim))  # twice
        engine.abort("never seen")
        found |= {o.request_id: o for o in engine.step() if o.finished}
    for i in set(range(120)) - doomed:
        assert [s.token_ids for s in found[str(i)].outputs] == [s.token_ids for s in expected[i].outputs]
    assert_idle(llm)


@pytest.mark.case("ABT-05")
def test_equal_ids_are_refused_while_one_lives(make_llm: Make) -> None:
    engine = make_llm().engine
    params = SamplingParams(max_tokens=3, **GREEDY)
    engine.add(engine.check([5], params, request_id="same\n" + "x" * 10**4))
    with pytest.raises(InvalidRequest, match="still running"):
        engine.add(engine.check([6], params, request_id="same\n" + "x" * 10**4))
    finished = []
    while engine.has_unfinished:
        finished += [o for o in engine.step() if o.finished]
    assert len(finished) == 1
    engine.add(engine.check([6], params, request_id="same\n" + "x" * 10**4))  # free again
    engine.abort("same\n" + "x" * 10**4)
    engine.drain()


@pytest.mark.case("ABT-06")
def test_one_bad_prompt_leaves_nothing_queued(make_llm: Make) -> None:
    llm = make_llm(max_model_len=64)
    params = SamplingParams(max_tokens=4, **GREEDY)
    expected = texts(run(make_llm(max_model_len=64), [[5, 6]], params))
    with pytest.raises(InvalidRequest, match="Prompt 1: "):
        run(llm, [[5], ids(100), [7]], params)
    assert llm.engine.num_unfinished == 0
    assert texts(run(llm, [[5, 6]], params)) == expected


@pytest.mark.case("ABT-06")
def test_an_interrupt_leaves_an_idle_engine(make_llm: Make) -> None:
    llm = make_llm(depth=4)
    expected = texts(run(llm, [[5, 6]], SamplingParams(max_tokens=4, **GREEDY)))
    step, count = llm.engine.step, 0

    def interrupted() -> list[RequestOutput]:
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt
        return step()

    llm.engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(llm, [ids(30, i) for i in range(5)], SamplingParams(max_tokens=50, **GREEDY))
    assert_idle(llm)
    assert texts(run(llm, [[5, 6]], SamplingParams(max_tokens=4, **GREEDY))) == expected


@pytest.mark.case("SMP-07")
def test_a_nan_ends_its_own_request_only(make_llm: Make) -> None:
    """Token 9's embedding is made NaN in memory: who feeds it gets an error, neighbours and later users do not."""
    prompts = [ids(20, 1), [*ids(20, 2)[:-1], 9], ids(20, 3)]
    assert all(9 not in p for p in (prompts[0], prompts[2]))
    params = SamplingParams(max_tokens=30, logit_bias={9: -100}, **GREEDY)
    clean = run(make_llm(), [prompts[0], prompts[2]], params)
    llm = make_llm(block_size=4, num_gpu_blocks_override=64)
    runner = llm.engine.loop.executor.runner
    runner.model.model.embed_tokens.weight.data[9] = float("nan")
    for _ in range(3):
        good, bad, fine = run(llm, prompts, params)
        assert bad.outputs[0].finish_reason == "error"
        assert "NaN" in str(bad.outputs[0].stop_reason)
        assert texts([good, fine]) == texts(clean)
    many = run(llm, [ids(20, 10 + i) for i in range(12)], params)  # through every block that was ever poisoned
    assert all(o.outputs[0].finish_reason == "length" for o in many)
    assert_idle(llm)


# Loading and unloading


@pytest.mark.case("MEM-04")
def test_deleting_gives_everything_back(tiny_folder: Path) -> None:
    before = sum(torch.is_tensor(x) for x in gc.get_objects())
    llm = LLM(str(tiny_folder), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes="8M")
    run(llm, [[5, 6]], SamplingParams(max_tokens=2))
    engine, runner = weakref.ref(llm.engine), weakref.ref(llm.engine.loop.executor.runner)
    del llm
    assert engine() is None, "the engine must go without the garbage collector's help"
    assert runner() is None
    gc.collect()
    assert sum(torch.is_tensor(x) for x in gc.get_objects()) <= before + 2


@pytest.mark.case("MEM-04")
def test_five_in_a_row_take_the_memory_of_one(tiny_folder: Path) -> None:
    sizes = []
    for _ in range(6):
        llm = LLM(str(tiny_folder), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes="64M")
        for key, value in llm.engine.loop.executor.runner.caches:
            key.fill_(1), value.fill_(1)
        run(llm, [[5, 6]], SamplingParams(max_tokens=2))
        del llm
        sizes.append(resident_memory())
    assert sizes[-1] < 1.05 * sizes[0], sizes


def test_a_closed_llm_says_so(make_llm: Make) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(Exception, match="closed"):
        run(llm, [[5]])


@pytest.mark.case("LOAD-06")
def test_defaults_come_from_generation_config_and_explicit_values_win(
    tiny: PreTrainedModel, tmp_path: Path, make_llm: Make, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_models.save(tiny, tmp_path)
    config = folder / "generation_config.json"
    config.write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "do_sample": true}')
    caplog.set_level("INFO", logger="octavo")
    llm = make_llm(folder)
    stated = SamplingParams(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.3)
    assert llm.get_default_sampling_params() == stated
    assert "temperature=0.6" in caplog.text
    prompt = ids(6)
    with_default, with_stated = make_llm(folder, seed=1), make_llm(folder, seed=1)
    assert texts(run(with_default, [prompt])) == texts(run(with_stated, [prompt], stated))
    explicit = SamplingParams(temperature=1.0, seed=5)  # equal to the API's default, and still what was asked for
    assert texts(run(llm, [prompt], explicit)) == texts(run(make_llm(), [prompt], explicit))
    config.write_text('{"do_sample": false, "temperature": 0.6}')
    assert make_llm(folder).get_default_sampling_params().greedy
    assert make_llm(folder, generation_config="vllm").get_default_sampling_params() == SamplingParams()


def test_dummy_weights_need_a_config_alone(tiny_folder: Path, tmp_path: Path, make_llm: Make) -> None:
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    llm = make_llm(tmp_path, load_format="dummy")
    assert len(tokens(llm, [5, 6], max_tokens=5, **GREEDY)) == 5
    with pytest.raises(InvalidConfig, match="load_format=gguf"):
        make_llm(tiny_folder, load_format="gguf")


def test_calls_take_the_keywords_of_other_engines(make_llm: Make) -> None:
    llm = make_llm()
    assert run(llm, [[5]], SamplingParams(max_tokens=1), lora_request=None)
    with pytest.raises(ValueError, match="lora_request=.* is not available: there are no adapters yet"):
        run(llm, [[5]], lora_request="adapter")
    with pytest.raises(TypeError, match="'prioritys'"):
        run(llm, [[5]], prioritys=[1])
    assert run(llm, [[5]], SamplingParams(max_tokens=1))[0].outputs[0].finished()


@pytest.mark.case("MEM-02")
def test_more_memory_than_there_is_is_refused_with_numbers(make_llm: Make) -> None:
    for options in ({"kv_cache_memory_bytes": 2**50}, {"num_gpu_blocks_override": 2**40}):
        with pytest.raises(InvalidConfig, match=r"KV cache of .* GiB was asked for, and .* GiB are available"):
            make_llm(**options)


@pytest.mark.case("LOAD-06")
def test_a_hostile_generation_config_is_refused_by_name(tiny: PreTrainedModel, tmp_path: Path, make_llm: Make) -> None:
    folder = tiny_models.save(tiny, tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": -3}')
    with pytest.raises(InvalidConfig, match=r"generation_config.json: temperature=-3"):
        make_llm(folder)
    make_llm(folder, generation_config="vllm")
