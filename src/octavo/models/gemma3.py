"""Gemma 3 (text): Gemma 2's shape with normalized heads; local layers have a rotation of their own."""

from functools import partial

from octavo.layers.attention import Attention
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration")

# The text part of a checkpoint that also sees images, under its older and its newer names.
RENAMES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}


def build(spec: ModelSpec) -> CausalLM:
    norm = partial(RMSNorm, eps=spec.norm_eps, offset=1.0)
    bias = spec.attention_bias
    blocks = [
        Block(
            spec,
            Attention(spec, layer, qkv_bias=bias, out_bias=bias, head_norm=norm),
            MLP(spec.hidden_size, spec.intermediate_size, spec.activation),
            norm,
            sandwich=True,
        )
        for layer in range(spec.num_layers)
    ]
    return CausalLM(spec, blocks, norm, embedding_scale=spec.hidden_size**0.5, renames=RENAMES)
