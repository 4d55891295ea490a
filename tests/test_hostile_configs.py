"""Impossible values in config.json and in engine options: each refusal names key, value and what is allowed."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from octavo.config import EngineConfig, parse_length
from octavo.errors import InvalidConfig
from octavo.hub import ModelFiles
from octavo.model_spec import ModelSpec
from octavo.worker import machine
from octavo.worker.load import load_model

CPU = torch.device("cpu")
HUGE = 10**5000  # Python refuses to write it out
NAN, INFINITY = float("nan"), float("inf")
NOT_POSITIVE = ["x", [1.0], True, NAN, INFINITY, -INFINITY, -1, 0, HUGE, -HUGE]


def read(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**tiny_models.F_BPE, "architectures": ["LlamaForCausalLM"], **changes})


def refusal(**changes: Any) -> str:
    with pytest.raises(InvalidConfig) as caught:
        read(**changes)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("value", ["x", [2], True, NAN, INFINITY, 2.0, -1, 0, HUGE, -HUGE, 10**12], ids=range(11))
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings",
    ],
)  # fmt: skip
def test_sizes_are_positive_integers(key: str, value: object) -> None:
    message = refusal(**{key: value})
    assert f"{key}={'<int>' if value in (HUGE, -HUGE) else repr(value)} " in message
    assert "a positive integer, from 1 to " in message


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=range(len(NOT_POSITIVE)))
@pytest.mark.parametrize(
    "key",
    ["rms_norm_eps", "rope_theta", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
     "partial_rotary_factor"],
)  # fmt: skip
def test_numbers_are_positive(key: str, value: object) -> None:
    assert f"{key}=" in (message := refusal(**{key: value})) and "must be a number from 1e-30 to 1" in message


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
LONGROPE = {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0}, "dynamic": {"factor": 2.0}, "llama3": LLAMA3, "yarn": YARN, "longrope": LONGROPE,
}  # fmt: skip


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=range(len(NOT_POSITIVE)))
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in ROPES.items() for key in keys])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_rope_numbers_are_positive(where: str, kind: str, key: str, value: object) -> None:
    good = {"rope_type": kind, **ROPES[kind]}
    read(**{where: good})
    message = refusal(**{where: {**good, key: value}})
    assert f"rope parameters: {key}=" in message and "must be a" in message


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=range(len(NOT_POSITIVE)))
@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_each_factor_of_a_list_is_positive(key: str, value: object) -> None:
    message = refusal(rope_scaling={"rope_type": "longrope", **LONGROPE, key: [1.0] * 7 + [value]})
    assert f"{key}[7]=" in message and "must be a number from 1e-30 to 1e+30" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling='linear' .*object of keys"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] .*object of keys"),
        ({"text_config": "llama"}, "text_config='llama' .*object of keys"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] .*a string"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] .*a string"),
        ({"dtype": 16}, "dtype=16 .*a string"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not one of"),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "short_factor": "1" * 8}}, "short_factor='1+' .*list"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor=1.0 .*above"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": -1}}, "mscale=-1 .*from 0"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 1e30}}, "factor=1e[+]30 stretches 64"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-9}}, "factor=1e-09 stretches 2048 positions to 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "turns 2 of 2 .*at least 4"),
        ({"rope_theta": 1}, "rope_theta=1.0 must be above 1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 .*to 1"),
        ({"head_dim": 15}, "head_dim=15 .*even"),
        ({"head_dim": None, "hidden_size": 2}, "head_dim=1 .hidden_size=2, num_attention_heads=4. .*even"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"eos_token_id": True}, "eos_token_id=True .*token id"),
        ({"eos_token_id": [HUGE]}, "eos_token_id=<list> .*token id"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": 3}, "layer_types=3 .*list of strings"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": [[], {}]}, "layer_types=.*list of strings"),
        ({"num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": "all"}, "mlp_only_layers='all' .*list"),
        ({"rope_scaling": {"rope_type": "default", "frequency_factors": [1.0]}}, "frequency_factors=.*list of 8"),
    ],
)  # fmt: skip
def test_wrong_kinds_of_value_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        read(**changes)


def test_a_billion_layers_are_refused_before_they_are_listed() -> None:
    tracemalloc.start()
    message = refusal(num_hidden_layers=10**9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "num_hidden_layers=1000000000 " in message and message.endswith("from 1 to 10000.")
    assert peak < 2**20


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2**31 - 2},
        {"vocab_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1},
        {"num_hidden_layers": 10_000, "hidden_size": 65536, "intermediate_size": 65536},
        {"num_experts": 2**31 - 1, "num_experts_per_tok": 2},
    ],
)
def test_weights_above_the_memory_are_refused_before_they_are_allocated(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"weights take [\d,.]+ GiB .*hidden_size=.* [\d,.]+ GiB .*available"):
        load(read(**changes))


def test_weights_are_compared_with_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    load(read())
    monkeypatch.setattr(machine, "available_memory", lambda: 2**16)
    with pytest.raises(InvalidConfig, match=r"and 0\.00 GiB of memory are available"):
        load(read())


def load(spec: ModelSpec) -> None:
    config = EngineConfig.from_keywords("LLM", load_format="dummy")
    load_model(config, ModelFiles(Path(), None), spec, None, torch.float32, CPU)


@pytest.mark.parametrize(
    "name",
    [
        "seed", "max_model_len", "kv_cache_memory_bytes", "max_logprobs", "block_size", "max_num_seqs", "depth",
        "max_num_batched_tokens", "num_scheduler_steps", "num_threads", "gpu_memory_utilization",
        "num_gpu_blocks_override", "dtype", "load_format", "enforce_eager", "revision",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [HUGE, -HUGE, [HUGE]], ids=["positive", "negative", "listed"])
def test_options_of_thousands_of_digits_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"^{name}=<(int|list)> is not allowed: it must be"):
        EngineConfig.from_keywords("LLM", **{name: value})


@pytest.mark.parametrize("value", ["9" * 5000, "x" * 5000])
def test_long_texts_are_cut(value: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig.from_keywords("LLM", max_model_len=value)
    assert len(str(caught.value)) < 250


def test_a_share_of_memory_is_no_truth_value() -> None:
    with pytest.raises(InvalidConfig, match="gpu_memory_utilization=True"):
        EngineConfig.from_keywords("LLM", gpu_memory_utilization=True)


@pytest.mark.parametrize("value", [1, "1", 0])
def test_a_length_has_room_for_a_prompt_and_an_answer(value: object) -> None:
    assert parse_length(2) == 2
    with pytest.raises(InvalidConfig, match=f"max_model_len={value!r} is not allowed: it must be .* from 2 "):
        parse_length(value)  # type: ignore[arg-type]
