"""Phi-3 and Phi-4: Llama's shape with stacked projections in the checkpoint, partial and long rotation."""

from octavo.models.llama import build

__all__ = ["ARCHITECTURES", "build"]

ARCHITECTURES = ("Phi3ForCausalLM",)
