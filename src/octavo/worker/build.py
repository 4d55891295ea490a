"""The passes that turn a ModelSpec and a stream of tensors into a model ready to run."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.layers.decoder import CausalLM
from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.layers.rotary import Rotary
from octavo.model_spec import ModelSpec
from octavo.quant.base import LinearMethod
from octavo.quant.dense import Dense
from octavo.quant.packed import Packed
from octavo.registry import model_module
from octavo.weights.loader import load


@torch.no_grad()
def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    position_margin: int = 0,
) -> CausalLM:
    """Build without weights, choose how they are kept, allocate, load; `dtype` becomes the spec's.

    `position_margin` positions past `spec.max_model_len` may be computed (drafts, repeated steps) though
    their tokens are never kept.

    Raises:
        InvalidConfig: no model serves the architecture.
        InvalidWeights: the tensors are not this model's, or damaged.
    """
    spec = dataclasses.replace(spec, dtype=str(dtype).removeprefix("torch."))
    model: CausalLM = model_module(spec.architecture).build(spec)
    method: LinearMethod = Packed() if Packed.serves(dtype, device) else Dense()
    for module in model.modules():
        if isinstance(module, Linear):
            module.method = method
        if isinstance(module, Rotary):
            module.build(dtype, device, position_margin)
        elif isinstance(module, Layer) and not (module is model.lm_head and spec.tie_word_embeddings):
            module.build(dtype, device)
    load(model, tensors)
    return model.eval()
