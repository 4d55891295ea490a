"""Mistral: Llama's shape; its sliding window comes with the configuration."""

from octavo.models.llama import build

__all__ = ["ARCHITECTURES", "build"]

ARCHITECTURES = ("MistralForCausalLM",)
