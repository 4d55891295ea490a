"""Qwen3: each head of query and key is normalized before it is rotated."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps)
    bias = spec.attention_bias
    blocks = [
        Block(
            spec,
            Attention(spec, layer, qkv_bias=bias, out_bias=bias, head_norm=norm),
            MLP(spec.hidden_size, spec.intermediate_size, spec.activation),
            norm,
        )
        for layer in range(spec.num_layers)
    ]
    return CausalLM(spec, blocks, norm)
