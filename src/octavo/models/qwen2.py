"""Qwen2 and Qwen2.5: Llama with a bias on query, key and value."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps)
    blocks = [
        Block(
            spec,
            Attention(spec, layer, qkv_bias=True),
            MLP(spec.hidden_size, spec.intermediate_size, spec.activation),
            norm,
        )
        for layer in range(spec.num_layers)
    ]
    return CausalLM(spec, blocks, norm)
