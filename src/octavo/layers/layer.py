"""What owns weights: allocates them, knows their checkpoint names and fills them."""

import torch
from torch import Tensor, nn

from octavo.quant.parameter import empty, fill


class Layer(nn.Module):
    """A part of a model with weights of its own; it has none until `build`.

    A checkpoint tensor is called SOURCE.KIND, such as model.norm.weight. A layer may stack several
    sources: each fills one part of it. `waiting` holds the (part, kind) pairs that were allocated and
    not filled yet. This class itself is a layer of one tensor, `weight`; those with more override it.
    """

    weight: nn.Parameter
    dtype: torch.dtype

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.waiting: set[tuple[str, str]] = set()

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate; contents are undefined."""
        self.dtype = dtype
        self.weight = empty(*self.shape, dtype=dtype, device=device)
        self.waiting = {("", "weight")}

    def sources(self, prefix: str) -> dict[str, str]:
        """Map sources to parts, for this layer standing under `prefix` in the model."""
        return {prefix: ""}

    def load(self, part: str, kind: str, tensor: Tensor) -> bool:
        """Fill one part; false when nothing waits for this tensor.

        Raises:
            InvalidWeights: the tensor has another shape than the part.
        """
        if (part, kind) not in self.waiting:
            return False
        fill(self.weight, tensor)
        self.waiting.remove((part, kind))
        return True
