"""GGUF files: header, blocks, configuration, tensors and logits against transformers and the gguf package."""

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import gguf_files
import tiny_models
from octavo.errors import InvalidWeights, ModelNotFound, OctavoError
from octavo.formats.gguf import GGUFFile
from octavo.formats.gguf_blocks import BLOCK_SIZES, dequantize
from octavo.model_spec import ModelSpec
from octavo.weights.gguf import gguf_tensors
from octavo.worker.build import build_model
from paged import Paged
from real_models import SMOLLM2, real_gguf

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 16, "num_hidden_layers": 7, "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 128},
}  # fmt: skip
NOT_IN_GGUF = {"architectures", "dtype", "pad_token_id"}
PROMPT = random.Random(5).sample(range(3, 600), 100)


def octavo_logits(path: Path) -> Tensor:
    """[100, vocabulary] float32 of PROMPT, computed by Octavo in float32 from a GGUF file."""
    file = GGUFFile(path)
    spec = ModelSpec.from_config(file.hf_config())
    model = build_model(spec, torch.float32, torch.device("cpu"), gguf_tensors(file, torch.float32))
    return Paged(model, [PROMPT]).all_logits(max_chunk=40)[0]


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, held: dict[str, Tensor] | None = None) -> Tensor:
    """The same by transformers, with the weights that the file holds."""
    if held is not None:
        model.load_state_dict(held)
    logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def assert_close(found: Tensor, expected: Tensor, within: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=within, rtol=0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.mark.case("GGUF-04")
@pytest.mark.parametrize("shape", [(256, 64), (512, 256), (1, 512)])
@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_blocks_decode_to_what_the_gguf_package_says(kind: str, shape: tuple[int, int]) -> None:
    if shape[-1] % BLOCK_SIZES[kind][0]:
        shape = (shape[0] // 4, shape[1] * 4)
    raw = gguf_files.random_blocks(kind, shape, np.random.default_rng(3), scale=1.0)
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    found = dequantize(kind, raw.tobytes(), shape)
    assert found.dtype == np.float32
    assert found.shape == shape
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) > 8


def test_block_sizes_are_those_of_ggml() -> None:
    for kind, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == sizes


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(InvalidWeights, match="34 bytes of Q8_0"):
        dequantize("Q8_0", bytes(34), (2, 32))


@pytest.mark.case("GGUF-04")
def test_a_type_that_is_not_read_is_refused_by_tensor_and_type(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("blk.3.ffn_up.weight", np.zeros((2, 18), np.uint8), raw_dtype=GGMLQuantizationType.IQ4_NL)
    gguf_files.write(writer)
    with pytest.raises(InvalidWeights, match=r"tiny.gguf: tensor 'blk.3.ffn_up.weight' has type IQ4_NL"):
        GGUFFile(file)


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(file: Path) -> None:
    odd = {
        "a.bool": True, "a.float": 0.1, "a.text": "naïve 歪 \n", "a.texts": ["", "é"], "a.floats": [1.5, -2.0],
        "a.ints": [-1, 3],
    }  # fmt: skip
    gguf_files.export(tiny_models.oracle(), file, "Q8_0", metadata=odd)
    found, expected = GGUFFile(file), gguf.GGUFReader(file)
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            assert found.metadata[key] == field.contents(), key
    assert found.metadata["a.texts"] == ["", "é"]
    assert set(found.tensors) == {tensor.name for tensor in expected.tensors}
    for tensor in expected.tensors:
        info = found.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist()[::-1])
        assert info.type_name == tensor.tensor_type.name
        assert bytes(found.raw(tensor.name)) == tensor.data.tobytes()


def test_a_split_checkpoint_is_found_from_its_first_file(tmp_path: Path) -> None:
    held = gguf_files.export(tiny_models.oracle(), tmp_path / "tiny.gguf", "F16", split_max_tensors=8)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    file = GGUFFile(tmp_path / names[0])
    found = dict(gguf_tensors(file, torch.float32))
    assert len({tensor.file for tensor in file.tensors.values()}) == 3
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], held[name]) for name in held)

    with pytest.raises(InvalidWeights, match=names[0]):
        GGUFFile(tmp_path / names[1])
    (tmp_path / names[2]).rename(tmp_path / "other.gguf")
    with pytest.raises(InvalidWeights, match=f"{names[2]} is absent"):
        GGUFFile(tmp_path / names[0])
    (tmp_path / names[0]).rename(tmp_path / "first.gguf")
    with pytest.raises(InvalidWeights, match="one of 3 files"):
        GGUFFile(tmp_path / "first.gguf")


def header(*parts: bytes | int | str, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    """A file that starts as GGUF does; integers are 64 bits, strings have their length before them."""
    encoded = [
        struct.pack("<Q", part) if isinstance(part, int) else struct.pack("<Q", len(part)) + part.encode()
        if isinstance(part, str) else part
        for part in parts
    ]  # fmt: skip
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(encoded)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


HUGE = 2**63
HOSTILE = {
    "empty": b"",
    "other letters": b"PK\x03\x04" + bytes(64),
    "version 1": header(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "ends in the counts": header()[:15],
    "count of tensors": header(tensors=HUGE),
    "count of keys": header(keys=HUGE),
    "length of a key": header(HUGE, b"abc", keys=1),
    "length of a text": header("a", u32(8), HUGE, keys=1),
    "length of an array": header("a", u32(9), u32(4), 2**40, keys=1),
    "length of an array of texts": header("a", u32(9), u32(8), 2**24, keys=1),
    "array of arrays": header("a", u32(9), u32(9), 1, keys=1),
    "value type": header("a", u32(77), keys=1),
    "key twice": header("a", u32(7), b"\1", "a", u32(7), b"\1", keys=2),
    "text that is not UTF-8": header("a", u32(8), 2, b"\xff\xfe", keys=1),
    "alignment 0": header("general.alignment", u32(4), u32(0), keys=1),
    "alignment is a text": header("general.alignment", u32(8), "x", keys=1),
    "no dimensions": header("t", u32(0), u32(0), 0, tensors=1),
    "many dimensions": header("t", u32(2**31), tensors=1),
    "dimension 0": header("t", u32(1), 0, u32(0), 0, tensors=1) + bytes(64),
    "product of dimensions": header("t", u32(2), HUGE, HUGE, u32(0), 0, tensors=1) + bytes(64),
    "half a block": header("t", u32(1), 48, u32(8), 0, tensors=1) + bytes(64),
    "offset outside": header("t", u32(1), 4, u32(0), 4096, tensors=1) + bytes(64),
    "offset near the end of numbers": header("t", u32(1), 4, u32(0), 2**64 - 32, tensors=1) + bytes(64),
    "tensor type": header("t", u32(1), 4, u32(999), 0, tensors=1) + bytes(64),
    "tensor twice": header("t", u32(1), 4, u32(0), 0, "t", u32(1), 4, u32(0), 32, tensors=2) + bytes(99),
    "overlap": header("t", u32(1), 4, u32(0), 0, "s", u32(1), 4, u32(0), 8, tensors=2) + bytes(99),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused_by_file_name(what: str, file: Path) -> None:
    file.write_bytes(HOSTILE[what])
    with pytest.raises(InvalidWeights, match=r"tiny\.gguf"):
        GGUFFile(file)


def test_a_list_that_the_file_could_hold_has_a_limit_too(file: Path) -> None:
    file.write_bytes(header("a", u32(9), u32(0), 2**24 + 1, keys=1))
    with file.open("r+b") as opened:
        opened.truncate(2**25)  # sparse: no bytes are written
    with pytest.raises(InvalidWeights, match="above the limit of 16777216"):
        GGUFFile(file)


def test_damage_anywhere_is_refused_or_harmless(file: Path) -> None:
    gguf_files.export(tiny_models.oracle(num_hidden_layers=1), file, "Q8_0")
    content = file.read_bytes()
    size_of_header = min(tensor.offset for tensor in GGUFFile(file).tensors.values())
    rng = random.Random(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(size_of_header)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        file.write_bytes(damaged)
        refused += _refused(lambda: dict(gguf_tensors(GGUFFile(file), torch.float32)))
    for length in [*range(0, size_of_header, size_of_header // 60), len(content) - 1]:
        file.write_bytes(content[:length])
        assert _refused(lambda: GGUFFile(file))
    assert refused > 50


def _refused(read: Callable[[], object]) -> bool:
    """Anything but Octavo's own refusals is a failure of the test."""
    try:
        read()
    except OctavoError:
        return True
    return False


def test_an_absent_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="absent.gguf"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_the_one_that_transformers_had(family: str, file: Path) -> None:
    model = tiny_models.oracle(rms_norm_eps=1e-3, max_position_embeddings=128, **FAMILIES[family])
    gguf_files.export(model, file)
    config = GGUFFile(file).hf_config()
    assert config["architectures"] == [type(model).__name__]
    found, expected = AutoConfig.for_model(**config).to_dict(), model.config.to_dict()
    differing = {key for key in found.keys() | expected.keys() if (found.get(key) or 0) != (expected.get(key) or 0)}
    assert differing <= NOT_IN_GGUF, {key: (found.get(key), expected.get(key)) for key in differing}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_come_out_under_their_names_in_their_order(family: str, kind: str, file: Path) -> None:
    model = tiny_models.oracle(**FAMILIES[family])
    held = gguf_files.export(model, file, kind)
    if model.config.tie_word_embeddings:
        del held["lm_head.weight"]
    found = dict(gguf_tensors(GGUFFile(file), torch.float32))
    for name in [name for name in held if ".experts." in name]:
        held |= one_by_one(name, held.pop(name), mixtral=family == "mixtral")
    held = {
        name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if family == "mixtral" else name: tensor
        for name, tensor in held.items()
    }
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert torch.equal(found[name], tensor), name


def one_by_one(name: str, stacked: Tensor, mixtral: bool) -> dict[str, Tensor]:
    """Experts as checkpoints on the Hub have them; transformers holds them stacked."""
    prefix, _, kind = name.rpartition(".")
    if mixtral:
        prefix = prefix.replace("mlp", "block_sparse_moe")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    parts = {down: stacked} if kind == "down_proj" else dict(zip((gate, up), stacked.chunk(2, dim=1), strict=True))
    return {f"{prefix}.{i}.{part}.weight": one for part, many in parts.items() for i, one in enumerate(many)}


def test_tensors_are_rounded_to_the_dtype_that_is_asked_for(file: Path) -> None:
    held = gguf_files.export(tiny_models.oracle(), file, "Q8_0")
    for name, tensor in gguf_tensors(GGUFFile(file), torch.bfloat16):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, held[name].bfloat16()), name


def test_an_unknown_tensor_keeps_its_name(file: Path) -> None:
    gguf_files.export(tiny_models.oracle(), file, tensors={"blk.0.attn_sinks.weight": np.ones(4)})
    assert "blk.0.attn_sinks.weight" in dict(gguf_tensors(GGUFFile(file), torch.float32))


def test_reading_holds_one_tensor_and_few_pages(file: Path) -> None:
    """40 MiB of tensors pass by, one of 4 MiB at a time, and none is left mapped."""
    rows = {f"blk.0.x{number}.weight": np.zeros((1024, 1024), np.float32) for number in range(10)}
    gguf_files.export(tiny_models.oracle(), file, tensors=rows)
    opened = GGUFFile(file)
    before, most = mapped_bytes(), 0
    for _ in gguf_tensors(opened, torch.float32):
        most = max(most, mapped_bytes() - before)
    assert most < 12 << 20
    assert mapped_bytes() - before < 4 << 20
    assert opened.raw("blk.0.x9.weight").nbytes == 4 << 20  # still there to be read


def mapped_bytes() -> int:
    """Resident bytes of file mappings of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


@pytest.mark.case("GGUF-01")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "gemma3"])
def test_logits_equal_the_original(family: str, kind: str, file: Path) -> None:
    model = tiny_models.oracle(**FAMILIES[family])
    held = gguf_files.export(model, file, kind)
    found = octavo_logits(file)
    if kind == "F32":
        assert_close(found, oracle_logits(model))
    assert_close(found, oracle_logits(model, held))


@pytest.mark.case("GGUF-02")
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_without_an_output_tensor_the_embeddings_are_the_head(kind: str, file: Path) -> None:
    model = tiny_models.oracle(tie_word_embeddings=True)
    held = gguf_files.export(model, file, {"token_embd": kind})
    opened = GGUFFile(file)
    assert opened.hf_config()["tie_word_embeddings"] is True
    assert "lm_head.weight" not in dict(gguf_tensors(opened, torch.float32))
    assert_close(octavo_logits(file), oracle_logits(model, held))


@pytest.mark.case("GGUF-04")
def test_types_may_be_mixed_in_one_layer(file: Path) -> None:
    model = tiny_models.oracle(hidden_size=256)
    mixed = {
        "attn_q": "Q4_K",
        "attn_k": "Q6_K",
        "attn_v": "F16",
        "ffn_up": "Q5_K",
        "ffn_gate": "Q3_K",
        "output": "Q2_K",
    }
    held = gguf_files.export(model, file, mixed)
    kinds = {tensor.type_name for tensor in GGUFFile(file).tensors.values()}
    assert kinds == {*mixed.values(), "F32"}
    assert_close(octavo_logits(file), oracle_logits(model, held), within=1e-3)


FACTORS = np.linspace(1.0, 6.0, 8)
ROPE: dict[str, dict[str, Any]] = {
    "freq_base 500000": {"rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    },
    "rope_freqs": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": FACTORS.tolist(),
        "long_factor": FACTORS.tolist(), "attention_factor": 1.0, "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.mark.case("GGUF-06")
@pytest.mark.parametrize("name", ROPE)
def test_metadata_that_changes_the_model_is_obeyed(name: str, file: Path) -> None:
    model = tiny_models.oracle(
        model_type="mistral", sliding_window=16, rms_norm_eps=1e-3, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", **ROPE[name]},
    )  # fmt: skip
    gguf_files.export(model, file, tensors={"rope_freqs.weight": FACTORS} if name == "rope_freqs" else {})
    assert_close(octavo_logits(file), oracle_logits(model))
    config = GGUFFile(file).hf_config()
    assert config["eos_token_id"] == [1, 2]
    assert config["max_position_embeddings"] == 128
    assert config["sliding_window"] == 16


@pytest.mark.case("GGUF-06")
def test_short_and_long_factors_are_obeyed(file: Path) -> None:
    short, long = 1 + np.arange(8) / 8, 1 + np.arange(8) / 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short.tolist(), "long_factor": long.tolist()}
    model = tiny_models.oracle(
        model_type="phi3", pad_token_id=0, max_position_embeddings=128, original_max_position_embeddings=64,
        rope_parameters=rope | {"attention_factor": 1.25},
    )  # fmt: skip
    metadata = {
        "phi3.rope.scaling.type": "longrope",
        "phi3.rope.scaling.original_context_length": 64,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    gguf_files.export(model, file, metadata=metadata, tensors=factors)
    expected = model.config.rope_parameters | {"factor": 2.0}
    assert expected.pop("partial_rotary_factor") == 1.0
    assert GGUFFile(file).hf_config()["rope_parameters"] == expected
    assert_close(octavo_logits(file), oracle_logits(model), within=1e-3)


REQUIRED = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
OPTIONAL = {
    "attention.head_count_kv": ("num_key_value_heads", 4),
    "rope.freq_base": ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    "rope.dimension_count": ("rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}),
    "attention.key_length": ("head_dim", 16),
    "attention.value_length": ("head_dim", 16),
    "attention.sliding_window": ("architectures", ["LlamaForCausalLM"]),
    "vocab_size": ("vocab_size", 600),
}


@pytest.fixture(scope="module")
def mistral() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return tiny_models.oracle(model_type="mistral", sliding_window=16, num_key_value_heads=4, rope_parameters=rope)


@pytest.mark.case("GGUF-06")
@pytest.mark.parametrize("key", ["general.architecture", *(f"llama.{key}" for key in REQUIRED)])
def test_a_required_key_is_missed_by_name(key: str, file: Path, mistral: PreTrainedModel) -> None:
    gguf_files.export(mistral, file, without=[key])
    if key == "general.architecture":  # the writer always writes it
        content = file.read_bytes()
        file.write_bytes(content.replace(key.encode(), key.upper().encode()))
    with pytest.raises(InvalidWeights, match=rf"tiny\.gguf: .*{key}"):
        GGUFFile(file).hf_config()


@pytest.mark.case("GGUF-06")
@pytest.mark.parametrize("key", OPTIONAL)
def test_an_optional_key_has_the_default_of_llama_cpp(key: str, file: Path, mistral: PreTrainedModel) -> None:
    gguf_files.export(mistral, file, without=[f"llama.{key}"])
    name, value = OPTIONAL[key]
    assert GGUFFile(file).hf_config()[name] == value


@pytest.mark.case("GGUF-06")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", [2, 4]),
        ("attention.head_count_kv", 3),
        ("attention.head_count", 0),
        ("attention.head_count", "four"),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("embedding_length", 128),
        ("block_count", 2**31 - 1),
        ("rope.dimension_count", 8),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.type", "longrope"),
        ("attention.value_length", 8),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_key(key: str, value: Any, file: Path, mistral: PreTrainedModel) -> None:
    gguf_files.export(mistral, file, metadata={f"llama.{key}": value})
    with pytest.raises(InvalidWeights, match=rf"llama\.{key}="):
        GGUFFile(file).hf_config()


@pytest.mark.case("GGUF-06")
def test_equal_head_counts_layer_by_layer_are_one(file: Path, mistral: PreTrainedModel) -> None:
    gguf_files.export(mistral, file, metadata={"llama.attention.head_count_kv": [4, 4]})
    assert GGUFFile(file).hf_config()["num_key_value_heads"] == 4


def test_an_architecture_that_is_not_read_is_named(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    gguf_files.write(writer)
    with pytest.raises(InvalidWeights, match=r"general.architecture='mamba'"):
        GGUFFile(file).hf_config()


def test_end_of_turn_is_found_in_the_vocabulary_of_files_that_do_not_name_it(file: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": ["a", "</s>", "<|eot_id|>", "<|im_end|>"]}
    kinds = {"tokenizer.ggml.token_type": [1, 3, 3, 1]}
    gguf_files.export(tiny_models.oracle(eos_token_id=1), file, metadata=tokens | kinds)
    assert GGUFFile(file).hf_config()["eos_token_id"] == [1, 2]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[GGUFFile]:
    yield GGUFFile(real_gguf(SMOLLM2))


@pytest.mark.real_model
def test_a_real_file_has_its_config_and_all_its_tensors(smollm2: GGUFFile) -> None:
    config = smollm2.hf_config()
    assert config["num_hidden_layers"] == 30
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["eos_token_id"], config["bos_token_id"]) == ([2], 1)
    spec = ModelSpec.from_config(config)
    tensors = ((name, tensor) for name, tensor in gguf_tensors(smollm2, torch.bfloat16))
    build_model(spec, torch.bfloat16, torch.device("cpu"), tensors)
