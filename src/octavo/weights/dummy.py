"""Random weights, for measuring speed without a checkpoint."""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.layers.layer import Layer
from octavo.layers.norm import RMSNorm
from octavo.model_spec import ModelSpec
from octavo.registry import model_module

DEVIATION = 0.02


def dummy_tensors(
    spec: ModelSpec, dtype: torch.dtype, seed: int = 0, device: str | torch.device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """A whole checkpoint for the model: the same numbers for the same seed and device, small, hardly ever zero."""
    model = model_module(spec.architecture).build(spec)
    generator = torch.Generator(device).manual_seed(seed)
    for prefix, layer in model.named_modules():
        if isinstance(layer, Layer) and not (layer is model.lm_head and spec.tie_word_embeddings):
            layer.build(dtype, torch.device("meta"))
            mean = 1.0 - layer.offset if isinstance(layer, RMSNorm) else 0.0
            for kind, parameter in layer.named_parameters(recurse=False):
                tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
                yield f"{prefix}.{kind}", tensor.normal_(mean, DEVIATION, generator=generator)
