"""How a linear layer's weight is stored and multiplied."""

from typing import Protocol

import torch
from torch import Tensor, nn


class LinearLayer(Protocol):
    """What a method sees of the layer it serves.

    `weight` is the matrix as it stands in the checkpoint; a method that keeps it otherwise removes it
    and puts its own form into `packed`. `parts` are the output rows by checkpoint name.
    """

    in_features: int
    parts: dict[str, int]
    has_bias: bool
    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: Tensor
    packed_bias: Tensor | None

    @property
    def out_features(self) -> int: ...


class LinearMethod(Protocol):
    """Chosen for each linear layer before it is allocated; one object may serve many layers.

    `kinds` are the last components of the checkpoint names that one part of the layer is loaded from,
    such as ("weight", "bias").
    """

    def kinds(self, layer: LinearLayer) -> tuple[str, ...]: ...

    def build(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate for `layer.out_features` rows of `layer.in_features`; contents are undefined."""
        ...

    def load(self, layer: LinearLayer, rows: slice, kind: str, tensor: Tensor) -> None:
        """Fill the rows of one part from a checkpoint tensor.

        Raises:
            InvalidWeights: the tensor has another shape than this part.
        """
        ...

    def finish(self, layer: LinearLayer) -> None:
        """Called once, when all parts are loaded."""
        ...

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of x."""
        ...

    def scores(self, layer: LinearLayer, x: Tensor) -> Tensor:
        """As `apply`, but float32, and not rounded to the dtype of x on the way where the kernel can do that."""
        ...
