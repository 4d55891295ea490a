"""Every family gives transformers' logits over a paged cache, and a configuration is read or refused by name."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from octavo import registry
from octavo.errors import InvalidConfig
from octavo.layers.decoder import CausalLM
from octavo.model_spec import ModelSpec
from octavo.weights.dummy import dummy_tensors
from octavo.worker.build import build_model
from paged import Paged

CPU = torch.device("cpu")
SMALL_MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 7}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 6},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, **PARTIAL},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, **SMALL_MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 32, **SMALL_MOE},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama biases": {**FAMILIES["llama"], "attention_bias": True, "mlp_bias": True},
    "llama tied": {**FAMILIES["llama"], "tie_word_embeddings": True},
    "mistral full": {**FAMILIES["mistral"], "sliding_window": None},
    "qwen2 windows": {**FAMILIES["qwen2"], "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3 biases": {**FAMILIES["qwen3"], "attention_bias": True},
    "gemma2 uncapped": {**FAMILIES["gemma2"], "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma2 capped low": {**FAMILIES["gemma2"], "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3 capped": {**FAMILIES["gemma3"], "final_logit_softcapping": 30.0, "attention_bias": True},
    "phi3 window": {**FAMILIES["phi3"], "sliding_window": 7},
    "qwen3_moe sparse": {
        **FAMILIES["qwen3_moe"], "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 600, (length,), generator=generator).tolist() for length in lengths]


def build(oracle: PreTrainedModel, folder: Path) -> CausalLM:
    """Through the files that transformers writes: its names and its configuration."""
    tiny_models.save(oracle, folder)
    config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec.from_config(config)
    return build_model(spec, torch.float32, CPU, load_file(folder / "model.safetensors").items())


def logits_of(oracle: PreTrainedModel, ids: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [oracle(torch.tensor([one])).logits[0] for one in ids]


def check(oracle: PreTrainedModel, model: CausalLM, *max_chunks: int) -> None:
    ids = sequences(3, 17, 40)
    wanted = logits_of(oracle, ids)
    assert len({int(row.argmax()) for row in wanted[2]}) > 10, "the oracle's text is not varied"
    for max_chunk in max_chunks:
        for found, expected in zip(Paged(model, ids).all_logits(max_chunk), wanted, strict=True):
            assert found.dtype == torch.float32
            assert (found - expected).abs().max() < 1e-4


@pytest.mark.case("MOD-01", "KV-04")
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = tiny_models.oracle(**(FAMILIES | VARIANTS)[name])
    check(oracle, build(oracle, tmp_path), 1, 6, 50)


@pytest.mark.case("MOD-01")
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 24), (2, 24), (4, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_layouts(family: str, kv_heads: int, head_dim: int, tmp_path: Path) -> None:
    oracle = tiny_models.oracle(**FAMILIES[family], num_key_value_heads=kv_heads, head_dim=head_dim)
    check(oracle, build(oracle, tmp_path), 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_stays_near(family: str, tmp_path: Path) -> None:
    """At training's weight scale bfloat16 differs from float32 by little: the same code runs in both."""
    oracle = tiny_models.oracle(scale=0.06, **FAMILIES[family])
    tiny_models.save(oracle, tmp_path)
    spec = ModelSpec.from_config(json.loads((tmp_path / "config.json").read_text()))
    model = build_model(spec, torch.bfloat16, CPU, load_file(tmp_path / "model.safetensors").items())
    ids = sequences(20)
    (wanted,), (found,) = logits_of(oracle, ids), Paged(model, ids).all_logits(8)
    assert (found - wanted).pow(2).mean().sqrt() < 0.03 * wanted.std()  # a router may send single rows elsewhere


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    oracle = tiny_models.oracle(**FAMILIES["qwen3_moe"])
    model = build(oracle, tmp_path)
    ids = sequences(30, 30, 5, 12)
    alone, among = Paged(model, ids), Paged(model, ids)
    for paged in (alone, among):
        paged.step({0: 29, 1: 20, 2: 4})
    expected, found = alone.step({0: 1})[0], among.step({1: 5, 0: 1, 2: 1, 3: 12})[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_gemma3_of_a_checkpoint_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle = tiny_models.oracle(**FAMILIES["gemma3"])
    text = tiny_models.config_of(oracle)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    weights = {f"language_model.{name}": tensor for name, tensor in tiny_models.weights_of(oracle).items()}
    weights["vision_tower.embeddings.weight"] = torch.zeros(2)
    with caplog.at_level(logging.WARNING):
        model = build_model(ModelSpec.from_config(config), torch.float32, CPU, weights.items())
    assert "vision_tower.embeddings.weight" in caplog.text
    check(oracle, model, 6)


def test_names_of_a_bare_decoder() -> None:
    oracle = tiny_models.oracle(**FAMILIES["gemma3"])
    weights = {name.removeprefix("model."): tensor for name, tensor in tiny_models.weights_of(oracle).items()}
    spec = ModelSpec.from_config({**tiny_models.config_of(oracle), "architectures": ["Gemma3TextModel"]})
    check(oracle, build_model(spec, torch.float32, CPU, weights.items()), 6)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_configurations_of_older_transformers(family: str) -> None:
    """rope_theta and rope_scaling beside each other, torch_dtype, keys left at a class's default left out."""
    oracle = tiny_models.oracle(**FAMILIES[family])
    config = tiny_models.config_of(oracle)
    new = ModelSpec.from_config(config)
    rope = config.pop("rope_parameters")
    if family == "gemma3":
        config |= {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
        for key in ("layer_types", "tie_word_embeddings", "hidden_activation"):
            config.pop(key, None)
        config["tie_word_embeddings"] = False
    else:
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    assert ModelSpec.from_config(config) == new


def test_older_rope_scaling_is_read() -> None:
    config = {**tiny_models.F_BPE, "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = ModelSpec.from_config({**config, "rope_scaling": scaling})
    assert (spec.ropes[0].kind, spec.ropes[0].theta, spec.ropes[0].factor) == ("yarn", 5e5, 4.0)
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spec = ModelSpec.from_config({**config, "rope_scaling": scaling, "original_max_position_embeddings": 512})
    assert (spec.ropes[0].kind, spec.ropes[0].trained_len, spec.max_model_len) == ("longrope", 512, 2048)


def config(**changes: Any) -> dict[str, Any]:
    return {**tiny_models.F_BPE, "architectures": ["LlamaForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"compression_config": {"format": "x"}}, "unnamed"),
        ({"hidden_size": None, "head_dim": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"dtype": "float8"}, "float8"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["round"] * 2}, "round"),
        ({"num_experts": 2, "num_experts_per_tok": 4}, "num_experts_per_tok=4"),
    ],
)
def test_impossible_configurations_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        ModelSpec.from_config(config(**changes))


def test_an_unknown_activation_is_refused_by_name() -> None:
    spec = ModelSpec.from_config(config(hidden_act="relu2"))
    with pytest.raises(InvalidConfig, match=r"relu2.*silu"):
        build_model(spec, torch.float32, CPU, [])


def test_an_unknown_architecture_is_refused_with_those_served() -> None:
    with pytest.raises(InvalidConfig, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3MoeForCausalLM"):
        registry.check_architecture("GPT2LMHeadModel")


def test_what_is_served_is_known_without_torch() -> None:
    program = (
        "import sys; from octavo import registry; from octavo.model_spec import ModelSpec;"
        "print(registry.check_architecture('Gemma3ForCausalLM')); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "octavo.models.gemma3"


def test_every_architecture_in_the_folder_can_be_imported() -> None:
    for name in registry.served():
        assert callable(registry.model_module(name).build)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_fill_every_family(family: str) -> None:
    spec = ModelSpec.from_config(tiny_models.config_of(tiny_models.oracle(**FAMILIES[family])))
    model = build_model(spec, torch.bfloat16, CPU, dummy_tensors(spec, torch.bfloat16, seed=1))
    logits = Paged(model, sequences(9)).all_logits(9)[0]
    assert torch.isfinite(logits).all() and logits.std() > 0
    first, again, other = (dict(dummy_tensors(spec, torch.float32, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_chain_model_walks_its_chain() -> None:
    oracle = tiny_models.chain_model({1: 5, 5: 2, 2: 1}, vocab_size=9)
    assert tiny_models.greedy(oracle, [7, 1], 5) == [5, 2, 1, 5, 2]
