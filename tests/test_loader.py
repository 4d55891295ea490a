"""Loading proves itself: nothing missing, misshapen or damaged gets by, and the head is never random."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from octavo.errors import InvalidWeights
from octavo.layers.decoder import CausalLM
from octavo.layers.linear import Linear
from octavo.model_spec import ModelSpec
from octavo.quant.dense import Dense
from octavo.quant.packed import Packed
from octavo.worker.build import build_model
from paged import Paged

CPU = torch.device("cpu")
IDS = torch.randint(0, 600, (20,), generator=torch.Generator().manual_seed(0)).tolist()


def load(
    oracle: PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32, **changes: Any
) -> CausalLM:
    spec = ModelSpec.from_config({**tiny_models.config_of(oracle), **changes})
    return build_model(spec, dtype, CPU, weights.items())


def logits(model: CausalLM) -> Tensor:
    return Paged(model, [IDS]).all_logits(20)[0]


def wanted(oracle: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([IDS])).logits[0]


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-4)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture(scope="module")
def untied() -> PreTrainedModel:
    return tiny_models.oracle()


@pytest.fixture(scope="module")
def tied() -> PreTrainedModel:
    return tiny_models.oracle(tie_word_embeddings=True)


@pytest.mark.case("LOAD-04")
def test_a_clean_checkpoint_gives_no_warning(
    untied: PreTrainedModel, tied: PreTrainedModel, warnings: pytest.LogCaptureFixture
) -> None:
    for oracle in (untied, tied):
        assert near(logits(load(oracle, tiny_models.weights_of(oracle))), wanted(oracle))
    assert not warnings.records


def test_the_order_of_tensors_does_not_matter(untied: PreTrainedModel) -> None:
    weights = tiny_models.weights_of(untied)
    backwards = dict(reversed(weights.items()))
    assert torch.equal(logits(load(untied, backwards)), logits(load(untied, weights)))


@pytest.mark.case("LOAD-03")
def test_tied_and_no_head_in_the_file(tied: PreTrainedModel, warnings: pytest.LogCaptureFixture) -> None:
    weights = tiny_models.weights_of(tied)
    assert "lm_head.weight" not in weights
    assert near(logits(load(tied, weights)), wanted(tied))
    assert not warnings.records


@pytest.mark.case("LOAD-03")
@pytest.mark.parametrize("head_first", [True, False])
def test_tied_and_an_equal_head(tied: PreTrainedModel, head_first: bool, warnings: pytest.LogCaptureFixture) -> None:
    weights = tiny_models.weights_of(tied)
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    assert near(logits(load(tied, head | weights if head_first else weights | head)), wanted(tied))
    assert not warnings.records


@pytest.mark.case("LOAD-03")
def test_tied_and_a_different_head_uses_the_file(untied: PreTrainedModel, warnings: pytest.LogCaptureFixture) -> None:
    model = load(untied, tiny_models.weights_of(untied), tie_word_embeddings=True)
    assert near(logits(model), wanted(untied))
    assert "lm_head.weight differs" in warnings.text


@pytest.mark.case("LOAD-03")
def test_untied_and_no_head_ties_with_a_warning(tied: PreTrainedModel, warnings: pytest.LogCaptureFixture) -> None:
    model = load(tied, tiny_models.weights_of(tied), tie_word_embeddings=False)
    assert near(logits(model), wanted(tied))
    assert "no lm_head.weight" in warnings.text


@pytest.mark.case("LOAD-03")
@pytest.mark.parametrize(("family", "tie"), [("llama", False), ("qwen2", False), ("gemma3_text", True)])
def test_the_flag_left_out_means_the_family_default(family: str, tie: bool) -> None:
    config = tiny_models.config_of(tiny_models.oracle(model_type=family))
    del config["tie_word_embeddings"]
    assert ModelSpec.from_config(config).tie_word_embeddings is tie


@pytest.mark.case("LOAD-04", "LOAD-01")
def test_missing_tensors_are_named(untied: PreTrainedModel) -> None:
    weights = tiny_models.weights_of(untied)
    for name in list(weights):
        rest = {other: tensor for other, tensor in weights.items() if other != name}
        if name != "lm_head.weight":
            with pytest.raises(InvalidWeights, match=rf"lacks 1 .*tensors: {name}\."):
                load(untied, rest)
    with pytest.raises(InvalidWeights, match=r"lacks 20 .* and 10 more"):
        load(untied, {"lm_head.weight": weights["lm_head.weight"]})


@pytest.mark.case("LOAD-04")
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm"])
def test_misshapen_tensors_are_named_with_both_shapes(untied: PreTrainedModel, name: str) -> None:
    weights = tiny_models.weights_of(untied)
    full = f"model.layers.1.{name}.weight"
    right = list(weights[full].shape)
    wrong = weights[full][..., :-1]
    with pytest.raises(InvalidWeights) as caught:
        load(untied, {**weights, full: wrong})
    for part in (full, str(list(wrong.shape)), str(right)):
        assert part in str(caught.value)


@pytest.mark.case("LOAD-04")
def test_a_transposed_tensor_and_one_that_would_broadcast(untied: PreTrainedModel) -> None:
    weights = tiny_models.weights_of(untied)
    down = "model.layers.0.mlp.down_proj.weight"
    for wrong in (weights[down].T, weights[down][:1], weights[down][0], torch.tensor(1.0)):
        with pytest.raises(InvalidWeights, match=down):
            load(untied, {**weights, down: wrong})


@pytest.mark.case("LOAD-04")
def test_unexpected_tensors_are_listed_once_and_ignored(
    untied: PreTrainedModel, warnings: pytest.LogCaptureFixture
) -> None:
    extra = {"foo.weight": torch.ones(2), "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    assert near(logits(load(untied, tiny_models.weights_of(untied) | extra)), wanted(untied))
    assert len(warnings.records) == 1
    assert all(name in warnings.text for name in extra)


@pytest.mark.case("LOAD-04")
def test_buffers_of_old_checkpoints_are_ignored_in_silence(
    untied: PreTrainedModel, warnings: pytest.LogCaptureFixture
) -> None:
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "rope_freqs.weight": torch.ones(8),
    }
    assert near(logits(load(untied, tiny_models.weights_of(untied) | old)), wanted(untied))
    assert not warnings.records


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight", "lm_head.weight"]
)
def test_damaged_values_are_named(untied: PreTrainedModel, name: str, value: float) -> None:
    weights = tiny_models.weights_of(untied)
    weights[name][3, 5] = value
    with pytest.raises(InvalidWeights, match=name):
        load(untied, weights)


def test_values_that_the_dtype_cannot_hold_are_named(untied: PreTrainedModel) -> None:
    weights = tiny_models.weights_of(untied)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][0, 0] = -1e5
    load(untied, weights, torch.bfloat16)
    with pytest.raises(InvalidWeights, match=rf"{name}.*100000.*65504"):
        load(untied, weights, torch.float16)


def test_stacked_projections_fill_the_same_parts(untied: PreTrainedModel) -> None:
    weights = tiny_models.weights_of(untied)
    stacks = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for layer in range(2):
        for stack, parts in stacks.items():
            parent = f"model.layers.{layer}.{stack.partition('.')[0]}"
            pieces = [weights.pop(f"{parent}.{part}.weight") for part in parts]
            weights[f"model.layers.{layer}.{stack}.weight"] = torch.cat(pieces)
    assert near(logits(load(untied, weights)), wanted(untied))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(InvalidWeights, match=rf"{name} has shape \[127, 64\].*128"):
        load(untied, weights | {name: weights[name][:-1]})


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_one_by_one_or_stacked(model_type: str) -> None:
    oracle = tiny_models.oracle(
        model_type=model_type,
        **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    )
    stacked = tiny_models.weights_of(oracle)
    single: dict[str, Tensor] = {}
    for name, tensor in stacked.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}"
                single[f"{prefix}.gate_proj.weight"], single[f"{prefix}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                single[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            single[name] = tensor
    assert len(single) > len(stacked)
    assert torch.equal(logits(load(oracle, single)), logits(load(oracle, stacked)))
    assert near(logits(load(oracle, single)), wanted(oracle))
    lost = next(name for name in single if name.endswith("2.down_proj.weight"))
    del single[lost]
    with pytest.raises(InvalidWeights, match=lost):
        load(oracle, single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 32, 100])
def test_packed_weights_multiply_as_dense_ones(rows: int, dtype: torch.dtype) -> None:
    if not Packed.serves(dtype, CPU):
        pytest.skip("this processor has no packed kernels")
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(rows, 64).to(dtype)
    results = []
    for method in (Dense(), Packed()):
        layer = Linear(64, {"a": 32, "b": 64}, bias=True)
        layer.method = method
        layer.build(dtype, CPU)
        for part, own in (("b", slice(32, 96)), ("a", slice(0, 32))):
            assert layer.load(part, "weight", weight[own]) and layer.load(part, "bias", bias[own])
        assert not layer.load("a", "weight", weight[:32]), "a part is filled once"
        results.append(layer(x))
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(results[1].float(), x.float() @ weight.T + bias, atol=tolerance, rtol=0.02)
