"""The passes that turn a ModelSpec and a stream of tensors into a model ready to run."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.kernels.cpu.library import library
from octavo.layers.decoder import CausalLM
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.layers.rotary import Rotary
from octavo.model_spec import ModelSpec
from octavo.quant.base import LinearMethod
from octavo.quant.dense import Dense
from octavo.quant.native import Native
from octavo.quant.packed import Packed
from octavo.registry import model_module
from octavo.weights.loader import load


@torch.no_grad()
def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
) -> CausalLM:
    """Build without weights, choose how they are kept, allocate, load; `dtype` becomes the spec's.

    Raises:
        InvalidConfig: no model serves the architecture.
        InvalidWeights: the tensors are not this model's, or damaged.
    """
    spec = dataclasses.replace(spec, dtype=str(dtype).removeprefix("torch."))
    model: CausalLM = model_module(spec.architecture).build(spec)
    for module in model.modules():
        if isinstance(module, Linear):
            module.method = _method(module, dtype, device)
        tied = module is model.lm_head and spec.tie_word_embeddings
        if isinstance(module, Rotary | Layer) and not tied:
            module.build(dtype, device)
    load(model, tensors)
    return model.eval()


def _method(layer: Linear, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Our kernels where they are there, else PyTorch's."""
    if Native.serves(layer, dtype, device) and (loaded := library()) is not None:
        return Native(loaded)
    return Packed() if Packed.serves(dtype, device) else Dense()
