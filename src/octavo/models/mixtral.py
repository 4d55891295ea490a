"""Mixtral: Mistral with a mixture of experts in every layer."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.moe import feed_forward
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)

RENAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps)
    blocks = [Block(spec, Attention(spec, layer), feed_forward(spec, layer), norm) for layer in range(spec.num_layers)]
    return CausalLM(spec, blocks, norm, renames=RENAMES)
