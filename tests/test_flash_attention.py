"""The FlashAttention-3 plug: when it is refused, and that whole prompts through it say the same."""

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import tiny_models
from interpreted import on_interpreter
from octavo import LLM, SamplingParams
from octavo.attention import flash_attention
from octavo.attention.flash_attention import FlashAttention
from octavo.model_spec import ModelSpec

SPEC = ModelSpec.from_config({**tiny_models.F_BPE, "architectures": ["LlamaForCausalLM"], "head_dim": 64})
BF16, HOPPER = torch.bfloat16, (9, 0)


def stub(query: Tensor, key: Tensor, value: Tensor, *, calls: list[int], **given: Any) -> Tensor:
    """The function's contract, in plain torch: causal attention within each sequence's rows."""
    calls.append(len(query))
    assert given["causal"]
    assert given["max_seqlen_q"] >= len(query)
    out = torch.full_like(query, math.nan)
    group = query.shape[1] // key.shape[1]
    starts = given["cu_seqlens_q"].tolist()
    left = given["window_size"][0]
    for begin, end in itertools.pairwise(starts):
        q = query[begin:end].transpose(0, 1)
        k, v = (side[begin:end].transpose(0, 1).repeat_interleave(group, 0) for side in (key, value))
        scores = q @ k.transpose(1, 2) * given["softmax_scale"]
        ahead = torch.arange(end - begin)[None] - torch.arange(end - begin)[:, None]
        hidden = (ahead > 0) | ((ahead < -left) if left >= 0 else False)
        out[begin:end] = (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)
    return out


@pytest.mark.parametrize(
    ("dtype", "cache", "capability", "changed", "reason"),
    [
        (BF16, BF16, (8, 0), {}, "9.0"),
        (torch.float32, torch.float32, HOPPER, {}, "16-bit"),
        (BF16, torch.float8_e4m3fn, HOPPER, {}, "KV cache"),
        (BF16, BF16, HOPPER, {"head_dim": 80}, "80"),
        (BF16, BF16, HOPPER, {"attention_softcap": 50.0}, "soft-cap"),
    ],
)
def test_what_it_cannot_do_is_refused(
    dtype: torch.dtype, cache: torch.dtype, capability: tuple[int, int], changed: dict[str, Any], reason: str
) -> None:
    found = FlashAttention.find(dataclasses.replace(SPEC, **changed), dtype, cache, capability)
    assert isinstance(found, str)
    assert reason in found


def test_absent_or_broken_it_is_not_used() -> None:
    with mock.patch.dict(sys.modules, {"flash_attn_interface": None}):
        assert "cannot be used" in str(FlashAttention.find(SPEC, BF16, BF16, HOPPER))
    with mock.patch.dict(sys.modules, {"flash_attn_interface": ModuleType("flash_attn_interface")}):
        assert "flash_attn_varlen_func" in str(FlashAttention.find(SPEC, BF16, BF16, HOPPER))


def test_installed_it_is_found() -> None:
    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = stub
    with mock.patch.dict(sys.modules, {"flash_attn_interface": module}):
        found = FlashAttention.find(SPEC, BF16, BF16, HOPPER)
    assert isinstance(found, FlashAttention)
    assert found.attend is stub


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")
def test_whole_prompts_go_through_it(family: str, tmp_path: Path) -> None:
    """Bias, key norm and window; ten sequences, so that decoding rows share steps with whole prompts."""
    config: dict[str, Any] = {"model_type": family, "num_hidden_layers": 1, "vocab_size": 600}
    if family == "mistral":
        config["sliding_window"] = 6
    folder = tiny_models.save(tiny_models.oracle(**config), tmp_path)
    options: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 10, "device": "cpu",
        "max_num_batched_tokens": 49, "enable_prefix_caching": False,
    }  # fmt: skip
    prompts = [[10 + 7 * i + j for j in range(4 + i)] for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    calls: list[int] = []

    def choose(spec: ModelSpec, *_: Any) -> FlashAttention:
        return FlashAttention(spec, lambda *rows, **given: stub(*rows, calls=calls, **given))

    found = []
    for chosen in (None, choose):
        with (
            mock.patch.object(flash_attention, "LEAST_ROWS", 9),
            mock.patch.object(flash_attention, "choose", chosen or (lambda *_: None)),
            on_interpreter(0),
            LLM(str(folder), **options) as llm,
        ):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert len(calls) >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 300])
def test_the_library_itself(window: int | None) -> None:
    """Ragged prompts in one step, beside attention in float64."""
    spec = dataclasses.replace(SPEC, num_heads=12, num_kv_heads=2, head_dim=128, dtype="bfloat16")
    found = FlashAttention.find(spec, BF16, BF16, torch.cuda.get_device_capability())
    if isinstance(found, str):
        pytest.skip(found)
    lengths = [1, 700, 0, 129, 1024]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    qkv = torch.randn(sum(lengths) + 5, 16 * 128, dtype=BF16, device="cuda")
    out = found.prompts(qkv, starts, scale=0.1, window=window)[: sum(lengths)]
    heads = qkv.cpu().double().view(len(qkv), 16, 128)
    expected = stub(
        heads[:, :12], heads[:, 12:14], heads[:, 14:], calls=[], cu_seqlens_q=starts, softmax_scale=0.1, causal=True,
        max_seqlen_q=len(qkv), window_size=(-1, -1) if window is None else (window - 1, 0),
    ).view(len(qkv), -1)[: sum(lengths)]  # fmt: skip
    assert (out.cpu().double() - expected).norm() < 1e-2 * expected.norm()
