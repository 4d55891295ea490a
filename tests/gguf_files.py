"""Writes GGUF checkpoints of tiny transformers models, as llama.cpp's converter does, with the gguf package."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

Array = NDArray[Any]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
# bytes of a block that hold float16 numbers, by type: everything else may be random
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
MADE_UP = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}  # the gguf package decodes these and cannot make them
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def export(
    model: PreTrainedModel,
    path: Path,
    types: str | Mapping[str, str] = "F32",
    *,
    tokenizer: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    tensors: Mapping[str, Array] | None = None,
    split_max_tensors: int = 0,
) -> dict[str, Tensor]:
    """Write `model` to `path` and return the weights that the file holds, float32, as transformers names them.

    The returned ones went through the types and back with the gguf package's code, so that
    `model.load_state_dict` of them makes the oracle of the file. `types` is one for all matrices, or maps
    parts of GGUF names to types (`{"attn_q": "Q4_K"}`), the rest being F32; vectors are always F32.
    K-types get random blocks: the package cannot make them. `metadata` replaces or adds keys, `without`
    leaves keys out; both take whole names (`llama.rope.freq_base`). `tensors` are added as F32 under GGUF
    names. `tokenizer` is a folder with a tokenizer.json. With `split_max_tensors` the files are named
    NAME-00001-of-0000N.gguf.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    keys = _config_keys(config, architecture)
    if tokenizer is not None:
        keys |= _tokenizer_keys(tokenizer)
    keys |= metadata or {}
    for key, value in keys.items():
        if key not in without and value is not None:
            _add(writer, key, value)
    held: dict[str, Tensor] = {}
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, values in state.items():
        held[name] = torch.zeros(values.shape)
        for gguf_name, part, where in _parts(name, values, names):
            kind = _type_of(gguf_name, part, types)
            stored, back = _encode(part, kind, architecture, gguf_name)
            held[name][where] = torch.from_numpy(back.reshape(part.shape))
            if architecture == "llama" and (heads := _heads(gguf_name, config)):
                stored = _side_by_side(stored, heads)
            writer.add_tensor(gguf_name, stored, raw_dtype=GGMLQuantizationType[kind])
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values.astype(np.float32))
    if config.tie_word_embeddings:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
    write(writer)
    return held


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0.02) -> Array:
    """Bytes [rows, bytes of a row]: anything goes but the scales, which are finite and about `scale`."""
    elements, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // elements, size), dtype=np.uint8)
    if kind in ("F32", "F16", "BF16"):
        values = rng.normal(0, scale, shape).astype(np.float32)
        return gguf.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = rng.normal(0, scale, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _encode(values: Array, kind: str, architecture: str, name: str) -> tuple[Array, Array]:
    """What is stored, and the float32 values that it means to transformers."""
    offset = np.float32(architecture == "gemma3" and name.endswith("norm.weight"))
    number = GGMLQuantizationType[kind]
    if kind in MADE_UP:
        seed = int.from_bytes(name.encode(), "little") % 2**32
        stored = random_blocks(kind, values.shape, np.random.default_rng(seed))
    else:
        stored = gguf.quantize(values + offset, number)
    return stored, gguf.dequantize(stored, number).astype(np.float32) - offset


def _parts(name: str, values: Array, names: gguf.TensorNameMap) -> list[tuple[str, Array, Any]]:
    """GGUF name, values and place of each part: stacked gate and up projections of experts are two tensors."""
    if name.endswith("experts.gate_up_proj"):
        inner = values.shape[1] // 2
        layer = name.split(".")[2]
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", values[:, :inner], np.s_[:, :inner]),
            (f"blk.{layer}.ffn_up_exps.weight", values[:, inner:], np.s_[:, inner:]),
        ]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values, ...)]
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(name)
    return [(found, values, ...)]


def _type_of(name: str, values: Array, types: str | Mapping[str, str]) -> str:
    if values.ndim == 1:
        return "F32"
    if isinstance(types, str):
        return types
    return next((kind for part, kind in types.items() if part in name.split(".")), "F32")


def _heads(name: str, config: Any) -> int:
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else 0


def _side_by_side(rows: Array, heads: int) -> Array:
    """The converter's permutation of Q and K: row i and row i + d/2 of a head become neighbours."""
    split = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _config_keys(config: Any, architecture: str) -> dict[str, Any]:
    rope = config.rope_parameters
    sliding = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]) if sliding else None,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
        "expert_count": getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return {f"{architecture}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": eos[0],
        "tokenizer.ggml.eot_token_id": eos[1] if len(eos) > 1 else None,
    }


def _tokenizer_keys(folder: Path) -> dict[str, Any]:
    """Byte-level BPE, or SentencePiece with byte fallback, whose merges become scores."""
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = dict(state["model"]["vocab"]) | {token["content"]: token["id"] for token in state["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [NORMAL] * len(tokens)
    for token in state["added_tokens"]:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    keys: dict[str, Any] = {"tokens": tokens, "chat_template": config.get("chat_template")}
    if state["model"]["byte_fallback"]:
        scores = [-1e6] * len(tokens)
        for rank, merge in reversed(list(enumerate(state["model"]["merges"]))):
            scores[ids["".join(merge)]] = float(-rank)
        for token, token_id in ids.items():
            if len(token) == 6 and token.startswith("<0x"):
                kinds[token_id], scores[token_id] = BYTE, 0.0
        kinds[ids[state["model"]["unk_token"]]] = UNKNOWN
        steps = (state["normalizer"] or {}).get("normalizers", [state["normalizer"]])
        prefix = any(step["type"] == "Prepend" for step in steps)
        keys |= {"model": "llama", "scores": scores, "add_space_prefix": prefix}
    else:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
        keys |= {"model": "gpt2", "pre": "gpt-2", "merges": merges}
    keys["token_type"] = kinds
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        keys[f"{name}_token_id"] = ids.get(config.get(f"{role}_token"))
        keys[f"add_{role}_token"] = config.get(f"add_{role}_token")
    template = keys.pop("chat_template")
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return found | {"tokenizer.chat_template": template}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Integers as the converter writes them: 32 bits without sign, token types with one."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    else:
        kinds = {bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
        writer.add_key_value(key, value, kinds[type(value)])
