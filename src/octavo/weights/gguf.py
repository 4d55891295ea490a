"""The tensors of a GGUF file under Hugging Face names and conventions, one at a time."""

import re
from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor

from octavo.errors import InvalidWeights
from octavo.formats.gguf import GGUFFile
from octavo.formats.gguf_blocks import WHOLE_NUMBERS, dequantize, whole_numbers

CHUNK_ELEMENTS = 1 << 21  # converted at once: float32 of this many stays near the cache

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
_OF_ARCHITECTURE = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# rotary divisors are configuration, read by hf_config
_CONFIGURATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

_IN_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_EXPERT_OF_OLD = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>ffn_(gate|up|down))\.(?P<expert>\d+)\.weight")


def block_types(file: GGUFFile) -> dict[str, str]:
    """By Hugging Face name without `.weight`: the types of matrices that can stay in blocks of whole numbers."""
    architecture = file.metadata["general.architecture"]
    return {
        _hf_name(name, architecture, {}).removesuffix(".weight"): tensor.type_name
        for name, tensor in file.tensors.items()
        if tensor.type_name in WHOLE_NUMBERS and len(tensor.shape) == 2 and "ffn_gate_inp" not in name
    }


def gguf_tensors(file: GGUFFile, dtype: torch.dtype, kept: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every weight of `file` as `dtype` on the CPU, in the order of the file.

    What differs from Hugging Face's checkpoints is undone: llama's Q and K rows, which GGUF orders for
    rotary pairs that lie side by side, are put back in halves; 1 is taken off Gemma's norm weights;
    stacked experts come out one by one. A tensor of unknown name keeps its name, for the loader to refuse.
    Weights whose names (without `.weight`) are in `kept` come as NAME.blocks, see `whole_numbers`.
    Nothing but the tensor that is yielded is held, nor are pages of the file, which count as memory too.
    """
    config = file.hf_config()
    architecture = file.metadata["general.architecture"]
    experts = _MIXTRAL_EXPERTS if architecture == "llama" else _EXPERTS
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in file.tensors:
        match = _IN_LAYER.fullmatch(name)
        part = match["part"] if match else ""
        if name in _CONFIGURATION:
            continue
        if match and part.endswith("_exps"):
            yield from _stacked_experts(file, name, match, dtype, experts)
            continue
        known = _hf_name(name, architecture, experts)
        if (source := known.removesuffix(".weight")) in kept and known != source:
            known, values = f"{source}.blocks", _blocks(file, name)
        else:
            values = _values(file, name, dtype)
        yield known, _in_halves(values, heads[part], name) if architecture == "llama" and part in heads else values


def _hf_name(name: str, architecture: str, experts: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[stem]}.{kind}"
    if match := _IN_LAYER.fullmatch(name):
        part = match["part"]
        known = experts if part == "ffn_gate_inp" else _LAYER | _OF_ARCHITECTURE.get(architecture, {})
        return f"model.layers.{match['layer']}.{known[part]}.{kind}" if part in known else name
    if match := _EXPERT_OF_OLD.fullmatch(name):  # files of before experts were stacked
        return _expert_name(match["layer"], int(match["expert"]), match["part"], experts)
    return name


def _expert_name(layer: str, expert: int, part: str, experts: dict[str, str]) -> str:
    block = experts["ffn_gate_inp"].removesuffix(".gate")
    return f"model.layers.{layer}.{block}.experts.{expert}.{experts[part]}.weight"


def _stacked_experts(
    file: GGUFFile, name: str, match: re.Match[str], dtype: torch.dtype, experts: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    tensor, raw = file.tensors[name], file.raw(name)
    part = match["part"].removesuffix("_exps")
    if part not in experts or len(tensor.shape) != 3:
        raise InvalidWeights(f"Tensor {name!r} of shape {list(tensor.shape)} is not a stack of experts that is known.")
    size = tensor.nbytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        one = raw[expert * size : (expert + 1) * size]
        yield (
            _expert_name(match["layer"], expert, part, experts),
            _convert(tensor.type_name, one, tensor.shape[1:], dtype),
        )
        file.forget(name)


def _values(file: GGUFFile, name: str, dtype: torch.dtype) -> Tensor:
    tensor = file.tensors[name]
    # Gemma multiplies by 1 + weight, and GGUF stores the sum
    less = 1.0 if file.metadata["general.architecture"] == "gemma3" and name.endswith("norm.weight") else 0.0
    values = _convert(tensor.type_name, file.raw(name), tensor.shape, dtype, less)
    file.forget(name)
    return values


def _blocks(file: GGUFFile, name: str) -> Tensor:
    tensor = file.tensors[name]
    values = torch.from_numpy(whole_numbers(tensor.type_name, file.raw(name), tensor.shape))
    file.forget(name)
    return values


def _convert(type_name: str, raw: memoryview, shape: tuple[int, ...], dtype: torch.dtype, less: float = 0.0) -> Tensor:
    """Dequantized to float32, `less` taken off, and rounded to `dtype`, some rows at a time."""
    values = torch.empty(shape, dtype=dtype)
    rows = values.view(-1, shape[-1])
    row_bytes = len(raw) // len(rows)
    step = max(1, CHUNK_ELEMENTS // shape[-1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        piece = dequantize(type_name, raw[start * row_bytes : (start + len(part)) * row_bytes], tuple(part.shape))
        part.copy_(torch.from_numpy(piece - np.float32(less) if less else piece))
    return values


def _in_halves(values: Tensor, num_heads: int, name: str) -> Tensor:
    """Rows, or a bias, of [heads * head_dim, ...]: from pairs (0, 1), (2, 3) to pairs (0, d/2), (1, d/2 + 1)."""
    if len(values) % (2 * num_heads):
        raise InvalidWeights(f"Tensor {name!r} has {len(values)} rows, which are not {num_heads} heads of even size.")
    return values.view(num_heads, -1, 2, values[0].numel()).transpose(1, 2).reshape(values.shape)
