"""Gemma 2: norms on both sides of each part, scaled embeddings, soft-capped scores."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("Gemma2ForCausalLM",)


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps, offset=1.0)
    bias = spec.attention_bias
    blocks = [
        Block(
            spec,
            Attention(spec, layer, qkv_bias=bias, out_bias=bias),
            MLP(spec.hidden_size, spec.intermediate_size, spec.activation),
            norm,
            sandwich=True,
        )
        for layer in range(spec.num_layers)
    ]
    return CausalLM(spec, blocks, norm, embedding_scale=spec.hidden_size**0.5)
