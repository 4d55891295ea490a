"""The CUDA engine's steps on the CPU, in Triton's interpreter: the same text as the CPU engine, whatever is asked."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tiny_models
from interpreted import on_interpreter
from octavo import LLM, RequestOutput, SamplingParams

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # the interpreter's
]
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 600}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 2,
    "max_num_batched_tokens": 24, "max_logprobs": 30,
}  # fmt: skip


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 600) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int, **given: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **given})


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Any]:
    """`both(config, fused_rows, prompts, params)`: outputs of the CPU engine and of the CUDA engine."""
    with ExitStack() as stack:

        def run(
            config: dict[str, Any], fused_rows: int, asked: list[list[int]], params: Any, **options: Any
        ) -> tuple[list[RequestOutput], list[RequestOutput]]:
            folder = tiny_models.save(tiny_models.oracle(**{**SMALL, **config}), tmp_path)
            plain = stack.enter_context(LLM(str(folder), device="cpu", **{**OPTIONS, **options}))
            with on_interpreter(fused_rows):
                ours = stack.enter_context(LLM(str(folder), device="cpu", **{**OPTIONS, **options}))
            return tuple(llm.generate(asked, params, use_tqdm=False) for llm in (plain, ours))  # type: ignore[return-value]

        yield run


def assert_same(expected: list[RequestOutput], found: list[RequestOutput]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert b.outputs[0].token_ids == a.outputs[0].token_ids
        for mine, theirs in zip(b.outputs[0].logprobs or [], a.outputs[0].logprobs or [], strict=True):
            assert {token: entry.rank for token, entry in mine.items()} == {t: e.rank for t, e in theirs.items()}
            assert all(mine[t].logprob == pytest.approx(e.logprob, abs=1e-4) for t, e in theirs.items())
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)


FAMILIES = {
    "qwen2, fused": ({"model_type": "qwen2"}, 64),
    "qwen3": ({"model_type": "qwen3"}, 0),
    "gemma2": ({"model_type": "gemma2", "sliding_window": 16, "num_hidden_layers": 2, "query_pre_attn_scalar": 16}, 0),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, 0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, both: Any) -> None:
    """Prompts of one, two and three chunks, so that prompts and decoding rows meet in a step."""
    config, fused = FAMILIES[family]
    assert_same(*both(config, fused, prompts(1, 20, 30), greedy(2)))


def test_features_and_repeated_steps(both: Any) -> None:
    """What the kernels serve beside what torch samples, and prompt logprobs."""
    params = [
        greedy(3, repetition_penalty=1.3, frequency_penalty=0.4, prompt_logprobs=1),
        greedy(3, logit_bias={5: 3.0}, logprobs=25),
        greedy(2, allowed_token_ids=[4, 5, 100, 599], logprobs=1),
        greedy(3, min_tokens=2, ignore_eos=False, stop_token_ids=list(range(300, 312))),
    ]
    asked = prompts(9, 3, 8, 5)
    assert_same(*both({"model_type": "qwen2"}, 64, asked, params, num_scheduler_steps=3))


def test_preemption_and_many_sequences(both: Any) -> None:
    """More decoding rows than are treated as prompts, with too few blocks for all of them."""
    options = {"max_num_seqs": 10, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 21, "block_size": 4}
    assert_same(*both({}, 0, prompts(*range(2, 12)), greedy(4), **options))
