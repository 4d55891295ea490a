"""Qwen3 with a mixture of experts in most layers."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.moe import feed_forward
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps)
    bias = spec.attention_bias
    blocks = [
        Block(
            spec,
            Attention(spec, layer, qkv_bias=bias, out_bias=bias, head_norm=norm),
            feed_forward(spec, layer),
            norm,
        )
        for layer in range(spec.num_layers)
    ]
    return CausalLM(spec, blocks, norm)
