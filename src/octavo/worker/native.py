"""What of a CPU engine runs in our C++ kernels: attention, or all blocks of a model at once where they can."""

import ctypes
import logging
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import Backend
from octavo.attention.cpu import NativeAttention, rows
from octavo.attention.torch_ref import TorchAttention
from octavo.batch import Batch
from octavo.kernels.cpu.library import Heads, Layer, Matrix, Network, address, library
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary
from octavo.model_spec import ModelSpec
from octavo.quant.native import LANES, Native

logger = logging.getLogger("octavo")

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2}


def cpu_attention(spec: ModelSpec, block_size: int) -> Backend:
    """The backend of a built model, whose spec has the dtype that it computes in."""
    if (loaded := library()) is not None:
        native = NativeAttention(spec, block_size, loaded)
        if (why := native.refuses(spec)) is None:
            return native
        logger.info("Attention runs in PyTorch's operators: %s.", why)
    return TorchAttention(spec, block_size)


def refuses(model: CausalLM) -> str | None:
    """Why a model's blocks cannot run as one call, in words, or None. Its layers must have their caches."""
    spec = model.spec
    for block in model.model.layers:
        if not isinstance(block, Block) or not isinstance(block.mlp, MLP):
            return "not all of its blocks are attention and a plain MLP"
        if not all(isinstance(linear.method, Native) for linear in _linears(block)):
            return "its weights are not in the kernels' order"
        if not isinstance(block.self_attn.attend.backend, NativeAttention):
            return "its attention runs elsewhere"
    widths = (spec.hidden_size, spec.intermediate_size, spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads))
    if any(width % LANES for width in widths):
        return f"its widths {widths} are not multiples of {LANES}"
    return None if spec.activation in ACTIVATIONS else f"the activation {spec.activation} is not among the kernels'"


class NativeNetwork:
    """Embedding to final norm of a model with its own weights and caches: all blocks in one parallel region.

    The residual stream and what lies between a product and the next one's operand is float32.
    """

    def __init__(self, model: CausalLM, block_size: int) -> None:
        spec = model.spec
        self.model = model
        self.backend: NativeAttention = model.attention_layers()[0].backend  # type: ignore[assignment]
        blocks: list[Block] = list(model.model.layers)  # type: ignore[arg-type]
        rotaries: list[Rotary] = list(model.model.rotaries)  # type: ignore[arg-type]
        self.layers = (Layer * len(blocks))(*(_layer(block, rotaries[block.self_attn.rope]) for block in blocks))
        first = model.attention_layers()[0]
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, 0, first.scale, first.softcap or 0.0)
        self.network = Network(
            ctypes.addressof(self.layers),
            len(blocks),
            spec.hidden_size,
            spec.intermediate_size,
            ACTIVATIONS[spec.activation],
            address(model.model.norm.weight),
            spec.norm_eps,
            Heads(*shape),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Final hidden states [T, hidden_size]."""
        out: Tensor = self.model.model.embed_tokens(batch.token_ids)
        residual = out.to(torch.float32, copy=True)
        step, _kept = rows(batch)
        self.backend.library.octavo_decode(
            out.dtype == torch.bfloat16,
            ctypes.byref(self.network),
            ctypes.byref(step),
            ctypes.c_void_p(residual.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out


def _linears(block: Block) -> list[Linear]:
    assert isinstance(block.mlp, MLP)
    return [block.self_attn.qkv_proj, block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj]


def _layer(block: Block, rotary: Rotary) -> Layer:
    attention, sandwich = block.self_attn, block.sandwich
    key, value = attention.attend.cache
    return Layer(
        address(block.input_layernorm.weight),
        address(block.post_attention_layernorm.weight),
        address(block.pre_feedforward_layernorm.weight) if sandwich else None,
        address(block.post_feedforward_layernorm.weight) if sandwich else None,
        _weight(attention.q_norm),
        _weight(attention.k_norm),
        *(_matrix(linear) for linear in _linears(block)),
        address(rotary.cos),
        address(rotary.sin),
        rotary.cos.shape[1],
        address(key),
        address(value),
        attention.attend.window or 0,
    )


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else address(norm.weight)


def _matrix(linear: Linear) -> Matrix:
    method: Any = linear.method
    matrix: Matrix = method.matrix(linear)
    return matrix
