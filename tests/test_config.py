"""Engine options: read off dataclasses, checked, and explained."""

import dataclasses

import pytest
import torch

from octavo.config import GROUPS, EngineConfig, options, parse_bytes, parse_length
from octavo.core.memory import size_cache
from octavo.errors import InvalidConfig
from octavo.model_spec import ModelSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, bytes


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec.from_config(CONFIG)


def test_every_option_has_a_sentence() -> None:
    assert {option.group for option in options()} == set(GROUPS)
    for option in options():
        assert option.help.endswith("."), option.name
    assert len({option.name for option in options()}) == len(options()) <= 40


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", 0), ("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("depth", -1), ("num_scheduler_steps", 0),
     ("dtype", "int8"), ("scheduling_policy", "lifo"), ("load_format", "pt"), ("enable_prefix_caching", "yes"),
     ("seed", "x"), ("revision", 3), ("model", 5),
     ("max_num_seqs", True), ("num_scheduler_steps", None), ("num_threads", 0), ("max_logprobs", -2)],
)  # fmt: skip
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=name):
        EngineConfig.from_keywords("LLM", **{name: value})


@pytest.mark.case("MEM-02")
@pytest.mark.parametrize("share", [0, 1.5, -1, float("nan"), "all"])
def test_a_share_of_memory_lies_in_its_range(share: object) -> None:
    with pytest.raises(InvalidConfig, match="gpu_memory_utilization"):
        EngineConfig.from_keywords("LLM", gpu_memory_utilization=share)


def test_unknown_and_foreign_keywords() -> None:
    with pytest.raises(TypeError, match="max_num_seq.*max_num_seqs"):
        EngineConfig.from_keywords("LLM", max_num_seq=1)
    assert EngineConfig.from_keywords("LLM", tensor_parallel_size=1, trust_remote_code=True) == EngineConfig()
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        EngineConfig.from_keywords("LLM", tensor_parallel_size=2)


def test_types_and_formats_have_other_names() -> None:
    for given, meant in (("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), ("auto", "auto")):
        assert EngineConfig.from_keywords("LLM", dtype=given).model.dtype == meant
    assert EngineConfig.from_keywords("LLM", load_format="hf").model.load_format == "auto"


def test_configuration_cannot_be_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().scheduler.depth = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [(4096, 4096), ("4096", 4096), ("4k", 4000), ("4K", 4096), ("auto", None), (-1, None), (None, None)],
)
def test_lengths_are_read_as_users_write_them(given: object, tokens: int | None) -> None:
    assert parse_length(given) == tokens  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["long", "-5", 0, "1.0001k", "", True, float("nan")])
def test_lengths_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(InvalidConfig, match="max_model_len"):
        parse_length(given)  # type: ignore[arg-type]


def test_bytes_are_read_as_users_write_them() -> None:
    assert [parse_bytes("x", v) for v in ("4G", "512M", "1g", 7)] == [4 * 2**30, 512 * 2**20, 10**9, 7]
    with pytest.raises(InvalidConfig, match="kv_cache_memory_bytes"):
        parse_bytes("kv_cache_memory_bytes", "much")


def test_the_cache_takes_what_is_available(spec: ModelSpec) -> None:
    size = size_cache(spec, element_bytes=4, block_size=16, wanted_len=None, available_bytes=1024 * 16 * PER_TOKEN)
    assert size.bytes_per_token == PER_TOKEN
    assert size.num_blocks == 1024
    assert size.num_tokens == 1023 * 16
    assert size.max_model_len == 512


@pytest.mark.case("KV-01", "MEM-02")
def test_the_length_is_lowered_to_what_fits_or_refused(spec: ModelSpec) -> None:
    ten_blocks = {"element_bytes": 4, "block_size": 16, "available_bytes": 10 * 16 * PER_TOKEN}
    assert size_cache(spec, wanted_len=None, **ten_blocks).max_model_len == 9 * 16
    assert size_cache(spec, wanted_len=9 * 16, **ten_blocks).max_model_len == 9 * 16
    with pytest.raises(InvalidConfig) as caught:
        size_cache(spec, wanted_len=9 * 16 + 1, **ten_blocks)
    message = str(caught.value)
    for fact in (
        "145 tokens",
        f"{11 * 16 * PER_TOKEN:,} bytes",
        f"{10 * 16 * PER_TOKEN:,} bytes",
        "max_model_len to 144",
    ):
        assert fact in message


@pytest.mark.case("MEM-02")
@pytest.mark.parametrize("given", [{"available_bytes": 1}, {"available_bytes": 0, "num_blocks": 0}])
def test_no_room_at_all_is_refused_with_numbers(spec: ModelSpec, given: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match="needs .* available, enough for 0 tokens"):
        size_cache(spec, element_bytes=4, block_size=16, wanted_len=None, **given)


@pytest.mark.case("MEM-02")
def test_one_block_serves_sequences_of_one_block(spec: ModelSpec) -> None:
    size = size_cache(spec, element_bytes=4, block_size=16, wanted_len=None, available_bytes=0, num_blocks=1)
    assert (size.num_blocks, size.max_model_len) == (2, 16)


def test_longer_than_the_model_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(InvalidConfig, match="513.*512"):
        size_cache(spec, element_bytes=4, block_size=16, wanted_len=513, available_bytes=2**30)
