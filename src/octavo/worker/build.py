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
from octavo.quant.blocks import Blocks
from octavo.quant.choice import Choice
from octavo.registry import model_module
from octavo.weights.loader import load


@torch.no_grad()
def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
    choice: Choice | None = None,
) -> CausalLM:
    """Build without weights, choose how they are kept, allocate, load; `dtype` becomes the spec's.

    Raises:
        InvalidConfig: no model serves the architecture.
        InvalidWeights: the tensors are not this model's, or damaged.
    """
    choice = choice or Choice()
    spec = dataclasses.replace(spec, dtype=str(dtype).removeprefix("torch."))
    model: CausalLM = model_module(spec.architecture).build(spec)
    head, table = model.lm_head, model.model.embed_tokens
    tied = spec.tie_word_embeddings
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            sources = ["model.embed_tokens"] if tied and module is head else _sources(name, module)
            module.method = choice.method(sources, module, dtype, device)
        if isinstance(module, Rotary | Layer) and not (tied and module is head):
            module.build(dtype, device)
    if tied and type(head.method) is Blocks:
        head.build(dtype, device)
        table.read_from(head, head.method)
    load(model, tensors)
    return model.eval()


def _sources(name: str, layer: Linear) -> list[str]:
    return [source for source, part in layer.sources(name).items() if part or layer.parts.keys() == {""}]
