"""Engines with weights in blocks of whole numbers: the file's own text, whatever else runs, kernels or not."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import tiny_models
from conftest import Make
from octavo import LLM, SamplingParams
from octavo.errors import InvalidConfig
from octavo.kernels.cpu import library as kernels
from octavo.layers.linear import Linear
from octavo.quant.blocks import Blocks, Quantized
from test_greedy import FAMILIES
from test_invariance import assert_idle, same

needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="no compiler for the CPU kernels")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
ARRANGED: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 7, "max_num_seqs": 3},  # prompts in pieces
    {"max_num_seqs": 8, "enable_prefix_caching": False},  # rows enough for widened weights
    {"block_size": 4, "num_gpu_blocks_override": 40},  # preempted
    {"depth": 4, "num_scheduler_steps": 8, "num_threads": 3},
]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    stem = [rng.randrange(3, 600) for _ in range(40)]
    return [stem[: rng.randint(4, 40)] + [rng.randrange(3, 600) for _ in range(rng.randint(1, 9))] for _ in range(8)]


@pytest.fixture(params=[True, False], ids=["kernels", "no kernels"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if not request.param:
        monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
        kernels.library.cache_clear()
    elif kernels.library() is None:
        pytest.skip("no compiler for the CPU kernels")
    yield request.param
    monkeypatch.undo()
    kernels.library.cache_clear()


def methods(llm: LLM) -> set[type]:
    runner: Any = llm.engine.loop.executor.runner  # type: ignore[attr-defined]
    return {type(module.method) for module in runner.model.modules() if isinstance(module, Linear)}


def arranged(make_llm: Make, model: Path, quantization: str, kept_as: type, with_kernels: bool) -> list[list[int]]:
    """Greedy text of each prompt alone, after every other arrangement has given the same."""
    options = {"quantization": quantization, "max_model_len": 96, "skip_tokenizer_init": True}
    with make_llm(model, max_num_seqs=1, enable_prefix_caching=False, depth=0, **options) as llm:
        assert (kept_as in methods(llm)) == with_kernels
        alone = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in prompts()]
    for arrangement in ARRANGED:
        with make_llm(model, **arrangement, **options) as llm:
            same(llm.generate(prompts(), PARAMS, use_tqdm=False), alone)
            same(llm.generate(prompts(), PARAMS, use_tqdm=False), alone)  # again, on a warm cache
            assert_idle(llm)
    return [output.outputs[0].token_ids for output in alone]


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q4_1"), ("qwen3", "Q8_0")])
def test_a_file_s_own_weights(family: str, kind: str, with_kernels: bool, make_llm: Make, tmp_path: Path) -> None:
    oracle = tiny_models.oracle(**FAMILIES[family])
    model = tmp_path / "model.gguf"
    oracle.load_state_dict(gguf_files.export(oracle, model, kind))
    found = arranged(make_llm, model, "gguf", Blocks, with_kernels)
    assert found == [tiny_models.greedy(oracle, prompt, PARAMS.max_tokens) for prompt in prompts()]


def test_8_bits(with_kernels: bool, make_llm: Make, tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.oracle(**FAMILIES["llama"]), tmp_path)
    found = arranged(make_llm, model, "int8", Quantized, with_kernels)
    plain = make_llm(model, max_model_len=96, quantization="none").generate(prompts(), PARAMS, use_tqdm=False)
    first = [a[0] == b.outputs[0].token_ids[0] for a, b in zip(found, plain, strict=True)]
    assert sum(first) >= 7, "rounding changes few of the likeliest tokens"


@needs_kernels
def test_refusals(make_llm: Make, tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.oracle(), tmp_path)
    with pytest.raises(InvalidConfig, match="quantization=gguf needs a GGUF file"):
        make_llm(model, quantization="gguf")
    with pytest.raises(InvalidConfig, match="quantization"):
        make_llm(model, quantization="int3")


@needs_kernels
@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_bfloat16_rows_on_tiles_or_not(quantization: str, make_llm: Make, tmp_path: Path) -> None:
    """One row, some rows and many give logprobs that differ by no more than bfloat16 does."""
    oracle = tiny_models.oracle(scale=0.1, **FAMILIES["llama"])
    model = tmp_path / "model.gguf"
    oracle.load_state_dict(gguf_files.export(oracle, model, "Q4_1"))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = {"dtype": "bfloat16", "quantization": quantization, "max_model_len": 96, "skip_tokenizer_init": True}
    llm = make_llm(model, enable_prefix_caching=False, **options)
    pieces = make_llm(model, enable_prefix_caching=False, max_num_batched_tokens=3, max_num_seqs=1, **options)
    for prompt in prompts()[:3]:
        with torch.inference_mode():
            rows = oracle(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = rows.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        for engine in (llm, pieces):
            found = engine.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs[1:]
            got = [row[token].logprob for row, token in zip(found, prompt[1:], strict=True)]
            assert got == pytest.approx(wanted, abs=0.3)
