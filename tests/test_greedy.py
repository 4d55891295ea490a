"""Greedy text equals transformers' token for token, and logprobs within 1e-3, for every family."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny_models
from conftest import Make
from octavo import SamplingParams

NUM_TOKENS = 64
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 24, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 24, "num_hidden_layers": 4, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE},
}  # fmt: skip


def prompts(vocab_size: int) -> list[list[int]]:
    """Ragged, some longer than a chunk and a window."""
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (1, 5, 16, 17, 40, 90)]


def oracle_logprobs(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[float]:
    """The model's own logprob of each output token, teacher-forced in one pass."""
    ids = torch.tensor([prompt + output])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
    return [logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(output)]


@pytest.mark.case("MOD-01", "LP-01")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_transformers_says(family: str, make_llm: Make, tmp_path: Path) -> None:
    oracle = tiny_models.oracle(**FAMILIES[family])
    llm = make_llm(tiny_models.save(oracle, tmp_path), max_num_batched_tokens=48, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    asked = prompts(600)
    for prompt, output in zip(asked, llm.generate(asked, params, use_tqdm=False), strict=True):
        sample = output.outputs[0]
        assert sample.token_ids == tiny_models.greedy(oracle, prompt, NUM_TOKENS)
        expected = oracle_logprobs(oracle, prompt, sample.token_ids)
        found = [row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert found == pytest.approx(expected, abs=1e-3)
        assert sample.cumulative_logprob == pytest.approx(sum(found), abs=1e-6)
        assert len(set(sample.token_ids)) > 5, "a text without variety proves little"


@pytest.mark.case("LP-01", "LP-02")
def test_logprobs_are_the_model_s_own_for_mixed_requests(tiny: PreTrainedModel, make_llm: Make) -> None:
    """Prompts in chunks of 16; some ask for logprobs of the output, some of the prompt, some for none."""
    llm = make_llm(max_num_batched_tokens=16)
    rng = random.Random(1)
    asked = [[rng.randrange(3, 600) for _ in range(length)] for length in (1, 2, 15, 16, 17, 33, 70, 120)]
    wants = [(None, None), (0, None), (1, 0), (5, 1), (None, 5), (5, 5), (0, 0), (3, 2)]
    each = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=a, prompt_logprobs=b) for a, b in wants
    ]
    for prompt, (count, prompt_count), output in zip(
        asked, wants, llm.generate(asked, each, use_tqdm=False), strict=True
    ):
        sample = output.outputs[0]
        with torch.inference_mode():
            table = torch.log_softmax(tiny(torch.tensor([prompt + sample.token_ids])).logits[0].float(), -1)
        if count is None:
            assert sample.logprobs is None
            assert sample.cumulative_logprob is None
        else:
            for i, (token, row) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
                check_row(row, token, count, table[len(prompt) + i - 1])
        if prompt_count is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(prompt)
            for i in range(1, len(prompt)):
                check_row(output.prompt_logprobs[i], prompt[i], prompt_count, table[i - 1])


def check_row(row: dict[int, Any], token: int, count: int, logprobs: torch.Tensor) -> None:
    top = logprobs.topk(max(count, 1)).indices.tolist()[:count]
    assert set(row) == {token, *top}
    for found, entry in row.items():
        assert entry.logprob == pytest.approx(logprobs[found].item(), abs=1e-3)
        assert entry.rank == 1 + int((logprobs > logprobs[found]).sum())


@pytest.mark.case("MOD-02")
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_teacher_forced_decode_equals_one_pass(tiny: PreTrainedModel, make_llm: Make, length: int) -> None:
    """100 tokens forced one by one: a shifted position would show as a growing difference."""
    llm = make_llm(max_num_seqs=1, enable_prefix_caching=True)
    rng = random.Random(length)
    ids = [rng.randrange(3, 600) for _ in range(length + 100)]
    with torch.inference_mode():
        table = torch.log_softmax(tiny(torch.tensor([ids])).logits[0].float(), -1)
    for end in range(length, length + 100):
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[ids[end]], logprobs=0, ignore_eos=True)
        (output,) = llm.generate([ids[:end]], params, use_tqdm=False)
        assert output.outputs[0].token_ids == [ids[end]]
        assert output.outputs[0].logprobs[0][ids[end]].logprob == pytest.approx(
            table[end - 1, ids[end]].item(), abs=1e-3
        )
