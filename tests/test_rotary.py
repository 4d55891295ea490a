"""Rotary tables equal transformers' for every kind of scaling; served lengths decide what depends on length."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny_models
from octavo.errors import InvalidConfig
from octavo.layers.rotary import Rotary, rotate
from octavo.model_spec import ModelSpec, RopeSpec
from octavo.worker.build import build_model
from paged import Paged

CPU = torch.device("cpu")
LENGTH = 256
HALF_HEAD = [1.0 + i / 4 for i in range(8)]


def parameters(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def spec_of(**overrides: Any) -> ModelSpec:
    return ModelSpec.from_config({**tiny_models.F_BPE, "architectures": ["LlamaForCausalLM"], **overrides})


def table(spec: RopeSpec, served: int, margin: int = 0) -> tuple[Tensor, Tensor]:
    rotary = Rotary(spec, served)
    rotary.build(torch.float32, CPU, margin)
    return rotary.cos, rotary.sin


def expected(seq_len: int, **overrides: Any) -> tuple[Tensor, Tensor]:
    """transformers' cos and sin for positions [0, seq_len) of a sequence that long."""
    config = AutoConfig.for_model(**{**tiny_models.F_BPE, **overrides})
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        dim = config.head_dim
        frequencies, factor = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2) / dim)), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=seq_len)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    return angles.cos() * factor, angles.sin() * factor


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": parameters("default"),
    "another base": parameters("default", rope_theta=5e5),
    "linear": parameters("linear", factor=2.0),
    "dynamic": {**parameters("dynamic", factor=2.0), "max_position_embeddings": 128},
    "llama3": parameters(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": parameters("yarn", **YARN),
    "yarn attention_factor": parameters("yarn", **YARN, attention_factor=1.5),
    "yarn mscale": parameters("yarn", **YARN, mscale=1.0, mscale_all_dim=0.8),
    "yarn one mscale": parameters("yarn", **YARN, mscale=0.7),
    "yarn betas": parameters("yarn", **YARN, beta_fast=16, beta_slow=2),
    "yarn untruncated": parameters("yarn", **YARN, truncate=False),
    "yarn without original": {**parameters("yarn", factor=4.0), "max_position_embeddings": 64},
    "longrope": {
        **parameters("longrope", short_factor=[1.0] * 8, long_factor=HALF_HEAD, original_max_position_embeddings=64),
        "max_position_embeddings": 256,
    },
    "longrope factors": parameters(
        "longrope",
        short_factor=HALF_HEAD,
        long_factor=HALF_HEAD[::-1],
        original_max_position_embeddings=64,
        factor=8.0,
        attention_factor=1.2,
    ),
}


@pytest.mark.case("MOD-04", "MOD-05")
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str) -> None:
    spec = spec_of(**SCALINGS[name])
    found, wanted = table(spec.ropes[0], LENGTH), expected(LENGTH, **SCALINGS[name])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_tables_differ_from_each_other() -> None:
    """Each comparison above is of a table of its own, so a value that is not read shows."""
    same_as_yarn = {"yarn without original", "yarn one mscale"}
    names = [name for name in SCALINGS if name not in same_as_yarn]
    tables = [table(spec_of(**SCALINGS[name]).ropes[0], LENGTH)[0] for name in names]
    for i, one in enumerate(tables):
        assert all((one - other).abs().max() > 1e-3 for other in tables[i + 1 :]), names[i]


@pytest.mark.case("MOD-05")
@pytest.mark.parametrize("served", [64, 128])
def test_dynamic_at_or_below_the_trained_length_is_plain(served: int) -> None:
    cos, sin = table(spec_of(**SCALINGS["dynamic"]).ropes[0], served)
    plain = table(spec_of(**SCALINGS["default"]).ropes[0], served)
    assert torch.isfinite(cos).all() and torch.isfinite(sin).all()
    torch.testing.assert_close((cos, sin), plain, atol=1e-6, rtol=0)


def test_longrope_served_short_uses_the_short_factors() -> None:
    spec = spec_of(**SCALINGS["longrope factors"])
    found, wanted = table(spec.ropes[0], 64), expected(64, **SCALINGS["longrope factors"])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert (table(spec.ropes[0], 65)[0][:64] - found[0]).abs().max() > 0.01


def test_frequency_factors_divide_the_frequencies() -> None:
    spec = spec_of(**parameters("default", frequency_factors=HALF_HEAD))
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, 16, 2) / 16)) / torch.tensor(HALF_HEAD)
    angles = torch.outer(torch.arange(40).float(), frequencies)
    torch.testing.assert_close(table(spec.ropes[0], 40), (angles.cos(), angles.sin()), atol=1e-5, rtol=0)


def test_margin_adds_positions_and_changes_none() -> None:
    spec = spec_of(**SCALINGS["dynamic"]).ropes[0]
    cos, _ = table(spec, 200)
    longer, _ = table(spec, 200, margin=8)
    assert longer.shape == (208, 8)
    torch.testing.assert_close(longer[:200], cos, atol=0, rtol=0)


@pytest.mark.parametrize("dim", [8, 16])
def test_rotate_turns_the_first_dimensions_and_passes_the_rest(dim: int) -> None:
    rotary = Rotary(RopeSpec("default", 10000.0, dim, 64), 64)
    rotary.build(torch.float32, CPU)
    torch.manual_seed(0)
    x, positions = torch.randn(5, 3, 16), torch.tensor([0, 1, 7, 30, 63])
    found = rotate(x, rotary(positions))
    angles = positions[:, None, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
    wanted = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), x[..., dim:]], -1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.case("MOD-04", "MOD-05")
@pytest.mark.parametrize(
    ("name", "max_model_len"),
    [("default", 2048), ("linear", 4096), ("dynamic", 256), ("llama3", 2048), ("longrope", 256)]
    + [(name, 256) for name in SCALINGS if name.startswith("yarn")],
)
def test_derived_length_is_stretched_once(name: str, max_model_len: int) -> None:
    """YaRN: factor x original; linear and dynamic: factor x max_position_embeddings; others: as written."""
    assert spec_of(**SCALINGS[name]).max_model_len == max_model_len


@pytest.mark.case("MOD-04", "MOD-05")
@pytest.mark.parametrize(
    ("name", "served", "length"),
    [(name, 256, 200) for name in SCALINGS if name.startswith(("yarn", "linear", "llama3", "longrope"))]
    + [("dynamic", 64, 20), ("dynamic", 128, 128), ("dynamic", 200, 200)],
)
def test_logits_equal_transformers(name: str, served: int, length: int) -> None:
    oracle = tiny_models.oracle(scale=0.2, **SCALINGS[name])
    spec = ModelSpec.from_config(tiny_models.config_of(oracle)).with_max_model_len(served)
    model = build_model(spec, torch.float32, CPU, tiny_models.weights_of(oracle).items())
    ids = torch.randint(0, 600, (length,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = oracle(ids[None]).logits[0]
    found = Paged(model, [ids.tolist()], block_size=16).all_logits(max_chunk=64)[0]
    assert torch.isfinite(found).all()
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (parameters("linear"), "factor"),
        (parameters("llama3", factor=8.0), "low_freq_factor"),
        (parameters("longrope", short_factor=[1.0] * 7, long_factor=[1.0] * 8), "short_factor"),
        (parameters("spiral"), "spiral"),
        (parameters("default", rope_theta=-1.0), "rope_theta"),
        (parameters("default", rope_theta="big"), "rope_theta"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_impossible_rotations_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        spec_of(**values)
