"""A parameter: allocated without contents, then filled from checkpoint tensors of exactly its shape."""

import torch
from torch import Tensor, nn

from octavo.errors import InvalidWeights


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def fill(target: Tensor, tensor: Tensor) -> None:
    """Copy, converting the dtype; nothing is broadcast.

    Raises:
        InvalidWeights: the shapes differ.
    """
    if target.shape != tensor.shape:
        raise InvalidWeights(
            f"has shape {list(tensor.shape)} but the model's configuration asks for {list(target.shape)}."
        )
    target.copy_(tensor)
