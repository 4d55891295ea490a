"""Llama, and the many models published in its shape."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps)
    blocks = [
        Block(
            spec,
            Attention(spec, layer, qkv_bias=spec.attention_bias, out_bias=spec.attention_bias),
            MLP(spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias),
            norm,
        )
        for layer in range(spec.num_layers)
    ]
    return CausalLM(spec, blocks, norm)
