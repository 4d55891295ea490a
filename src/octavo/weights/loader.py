"""Streams named tensors to the layers that claim them, and proves that nothing was left out."""

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.errors import InvalidWeights
from octavo.layers.decoder import CausalLM
from octavo.layers.layer import Layer

logger = logging.getLogger("octavo")

# Tensors that old checkpoints hold although they follow from the configuration.
DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight", "masked_bias", "attn.bias")
MAX_LISTED = 10
READ = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # others stand for numbers by a scale of theirs

Target = tuple[Layer, str]


def load(model: CausalLM, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill an allocated model; tensors may come in any order, and only one is held at a time.

    Unexpected tensors are ignored with one warning that lists them. Tied embeddings: the head is the
    embedding table when the checkpoint has no head (with a warning unless the configuration says so); a
    head that differs from the table is used even if the configuration ties them, with a warning.

    Raises:
        InvalidWeights: a tensor is missing, has the wrong shape, or holds NaN, infinity or a value that
            the model's dtype cannot hold; the message names it.
    """
    targets = {
        source: (layer, part)
        for prefix, layer in model.named_modules()
        if isinstance(layer, Layer)
        for source, part in layer.sources(prefix).items()
    }
    unexpected: list[str] = []
    own_head: tuple[str, Tensor] | None = None
    for name, tensor in tensors:
        target, kind = _claim(model, targets, name)
        if target and target[0] is model.lm_head and kind == "weight" and model.spec.tie_word_embeddings:
            own_head = (name, tensor)
        elif (target is None or not _fill(target, kind, name, tensor)) and not name.endswith(DERIVED):
            unexpected.append(name)
    _settle_head(model, own_head)
    if unexpected:
        logger.warning("The checkpoint has tensors that the model does not use: %s", _listed(unexpected))
    missing = [
        f"{source}.{kind}"
        for source, (layer, part) in targets.items()
        for waiting, kind in sorted(layer.waiting)
        if waiting == part
    ]
    if missing:
        raise InvalidWeights(
            f"The checkpoint lacks {len(missing)} of the model's tensors: {_listed(missing)}.",
            "Is a file missing, or is the configuration another model's?",
        )


def _claim(model: CausalLM, targets: dict[str, Target], name: str) -> tuple[Target | None, str]:
    """Find who takes the tensor, and as what kind. A bare decoder's checkpoint has no "model." in front."""
    for old, new in model.renames.items():
        name = name.replace(old, new)
    source, _, kind = name.rpartition(".")
    return targets.get(source) or targets.get(f"model.{source}"), kind


def _fill(target: Target, kind: str, name: str, tensor: Tensor) -> bool:
    layer, part = target
    if (part, kind) in layer.waiting and tensor.dtype not in READ and kind != "blocks":
        raise InvalidWeights(
            f"The tensor {name} is of type {str(tensor.dtype).removeprefix('torch.')}: it is quantized, or damaged.",
            "Use the unquantized checkpoint or a GGUF file of the model.",
        )
    try:
        filled = layer.load(part, kind, tensor)
    except InvalidWeights as error:
        raise InvalidWeights(f"The tensor {name} {error.message}", error.hint) from None
    if filled and tensor.numel() and tensor.is_floating_point():  # blocks of whole numbers check their scales
        _check_values(name, tensor, layer.dtype)
    return filled


def _check_values(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    low, high = (float(x) for x in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InvalidWeights(f"The tensor {name} holds NaN or infinity.", "The file is damaged, or training failed.")
    limit = torch.finfo(dtype).max
    if max(-low, high) > limit:
        raise InvalidWeights(f"The tensor {name} holds values up to {max(-low, high):g}, above {dtype}'s {limit:g}.")


def _settle_head(model: CausalLM, own: tuple[str, Tensor] | None) -> None:
    """`own` is the head in a checkpoint whose configuration ties the head to the embeddings."""
    head, table = model.lm_head, model.model.embed_tokens
    if not model.spec.tie_word_embeddings:
        if ("", "weight") in head.waiting:
            logger.warning("The checkpoint has no lm_head.weight; the embedding table serves as the head.")
            model.tie_head()
    elif own is None or _same(own[1], table.weight):
        model.tie_head()
    else:
        name, tensor = own
        logger.warning("The configuration ties the head to the embeddings, but %s differs: it is used.", name)
        head.build(table.dtype, table.weight.device)
        _fill((head, ""), "weight", name, tensor)


def _same(tensor: Tensor, table: Tensor) -> bool:
    return tensor.shape == table.shape and torch.equal(tensor.to(table), table)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
