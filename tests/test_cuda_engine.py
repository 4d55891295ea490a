"""The engine on a GPU says what the CPU engine says: float32 exactly, bfloat16 nearly; and keeps to its memory."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny_models
from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import InvalidConfig
from test_greedy import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


@contextmanager
def engine(folder: Path, device: str = "cuda", **options: Any) -> Iterator[LLM]:
    given = {"dtype": "float32", "kv_cache_memory_bytes": "64M", "skip_tokenizer_init": True, **OPTIONS, **options}
    llm = LLM(str(folder), device=device, **given)
    try:
        yield llm
    finally:
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def prompts(seed: int = 7, count: int = 7, longest: int = 130) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(3, 600) for _ in range(48)]
    drawn = [[rng.randrange(3, 600) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [*drawn, [*stem, 5, 6], [*stem, 9]]


def greedy(max_tokens: int = 40, **given: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **given)


def texts(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def assert_logprobs_close(found: list[RequestOutput], expected: list[RequestOutput], tolerance: float = 1e-3) -> None:
    for a, b in zip(found, expected, strict=True):
        for mine, theirs in zip(a.outputs[0].logprobs or [], b.outputs[0].logprobs or [], strict=True):
            for token, entry in theirs.items():
                assert mine[token].logprob == pytest.approx(entry.logprob, abs=tolerance)
                assert abs((mine[token].rank or 0) - (entry.rank or 0)) <= 2  # nearly equal ones may change places


@pytest.mark.case("MOD-01")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_the_cpu_says(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.oracle(**FAMILIES[family]), tmp_path)
    params = greedy(logprobs=2)
    with engine(folder, "cpu") as llm:
        expected = llm.generate(prompts(), params, use_tqdm=False)
    with engine(folder) as llm:
        found = llm.generate(prompts(), params, use_tqdm=False)
        again = llm.generate(prompts(), greedy(), use_tqdm=False)  # without features: other graphs
    assert texts(found) == texts(expected)
    assert texts(again) == texts(expected)
    assert_logprobs_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 0},
        {"depth": 4},
        {"num_scheduler_steps": 8},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 512, "max_num_seqs": 16},
        {"enable_prefix_caching": False},
        {"block_size": 64},
        {"num_gpu_blocks_override": 17, "max_num_seqs": 8},
    ],
    ids=str,
)
def test_nothing_but_the_request_matters(options: dict[str, Any], tiny_folder: Path) -> None:
    """Chunks, preemption (17 blocks), cache, depth, repeated steps and capture change no token."""
    kinds = [
        greedy(30, logprobs=1),
        greedy(20, repetition_penalty=1.3, frequency_penalty=0.4),
        greedy(25, logit_bias={5: 3.0}, min_tokens=4),
        SamplingParams(temperature=1.0, seed=3, max_tokens=33),
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, top_k=50, min_p=0.02, max_tokens=28, logprobs=2),
        greedy(12, allowed_token_ids=list(range(40, 90))),
        greedy(10, logprobs=5, prompt_logprobs=1),
        greedy(9),
        greedy(31),
    ]
    with engine(tiny_folder) as llm:
        expected = llm.generate(prompts(), kinds, use_tqdm=False)
    with engine(tiny_folder, **options) as llm:
        for _ in range(2):
            found = llm.generate(prompts(), kinds, use_tqdm=False)
            assert texts(found) == texts(expected)
            assert_logprobs_close(found, expected, 1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}], ids=str
)
def test_equal_prompts_come_from_one_prefill(options: dict[str, Any], tiny_folder: Path) -> None:
    rng = random.Random(3)
    with engine(tiny_folder, **options) as llm:
        for length in (21, 64, 100):  # the copied block is partly filled, and full
            prompt = {"prompt_token_ids": [rng.randrange(3, 600) for _ in range(length)]}
            together = llm.generate([prompt] * 4, greedy(), use_tqdm=False)
            alone = llm.generate([prompt | {"cache_salt": "alone"}], greedy(), use_tqdm=False)
            assert texts(together) == texts(alone) * 4


def test_what_the_kernels_do_not_serve_is_sampled_by_torch(tiny_folder: Path) -> None:
    params = [greedy(12, logprobs=25), greedy(12), greedy(12, logprobs=-1), greedy(20, logprobs=3)]
    few = prompts()[:4]
    found = []
    for device in ("cpu", "cuda"):
        with engine(tiny_folder, device, max_logprobs=-1, num_scheduler_steps=4) as llm:
            found.append(llm.generate(few, params, use_tqdm=False))
    assert texts(found[0]) == texts(found[1])
    assert_logprobs_close(found[1], found[0])


def test_draws_have_the_distribution(tiny_folder: Path) -> None:
    """First tokens of many seeds against the softmax that their logprobs report."""
    count = 3000
    with engine(tiny_folder, max_num_seqs=64) as llm:
        (whole,) = llm.generate([[5, 6, 7]], greedy(1, logprobs=20), use_tqdm=False)
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=1, ignore_eos=True) for i in range(count)]
        drawn = [tokens[0] for tokens in texts(llm.generate([[5, 6, 7]] * count, params, use_tqdm=False))]
    for token, entry in whole.outputs[0].logprobs[0].items():
        probability = torch.tensor(entry.logprob).exp().item()
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(drawn.count(token) / count - probability) < 5 * deviation + 1e-3


def test_bfloat16_is_near(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Logprobs of forced tokens, decoded one by one on the fused path, against float32 in one pass."""
    folder = tiny_models.save(tiny_models.oracle(scale=0.08), tmp_path)
    oracle = tiny_models.oracle(scale=0.08)
    prompt = prompts()[-1]
    with engine(folder, dtype="bfloat16") as llm:
        (output,) = llm.generate([prompt], greedy(60, logprobs=0), use_tqdm=False)
    ids = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + list(ids)])).logits[0].float()
    table = torch.log_softmax(logits, -1)
    scale = logits.std().item()
    for i, token in enumerate(ids):
        expected = table[len(prompt) + i - 1, token].item()
        assert output.outputs[0].logprobs[i][token].logprob == pytest.approx(expected, abs=0.1 * max(scale, 1))


def test_a_nan_ends_its_own_request_only(tiny_folder: Path) -> None:
    asked = prompts()
    asked = [[token for token in prompt if token != 9] or [4] for prompt in asked]
    poisoned = [*asked[2][:-1], 9]
    params = greedy(30, logit_bias={9: -100})
    with engine(tiny_folder, num_gpu_blocks_override=80) as llm:
        clean = texts(llm.generate(asked, params, use_tqdm=False))
        llm.engine.loop.executor.runner.model.model.embed_tokens.weight.data[9] = float("nan")
        for _ in range(3):
            outputs = llm.generate([poisoned, *asked], params, use_tqdm=False)
            assert outputs[0].outputs[0].finish_reason == "error"
            assert "NaN" in str(outputs[0].outputs[0].stop_reason)
            assert texts(outputs[1:]) == clean


def test_the_share_of_memory_is_kept(tiny_folder: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    with engine(tiny_folder, gpu_memory_utilization=0.2, kv_cache_memory_bytes=None) as llm:
        llm.generate(prompts(), greedy(), use_tqdm=False)
        used = free - torch.cuda.mem_get_info()[0]
    assert 0.15 * total < used < 0.2 * total


@pytest.mark.case("MEM-01")
def test_too_little_memory_is_refused_with_numbers(tiny_folder: Path) -> None:
    with (
        pytest.raises(InvalidConfig, match=r"gpu_memory_utilization=0\.001"),
        engine(tiny_folder, gpu_memory_utilization=0.001, kv_cache_memory_bytes=None),
    ):
        pass
