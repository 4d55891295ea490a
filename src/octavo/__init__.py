"""Octavo: LLM inference and serving. `from octavo import LLM, SamplingParams`."""

from typing import Any

from octavo.errors import OctavoError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.types import CompletionOutput, Logprob, RequestOutput, RequestOutputKind, SamplingParams
from octavo.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "OctavoError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """`LLM` and `AsyncLLM` load torch, which costs seconds: only when asked for."""
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from octavo.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
