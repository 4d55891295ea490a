"""Root-mean-square normalization, with the residual addition that comes before it."""

from torch import Tensor
from torch.nn import functional

from octavo.layers.layer import Layer


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dimension.

    `offset` is 1 in Gemma, whose checkpoints hold the difference from 1.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(size)
        self.eps, self.offset = eps, offset

    def load(self, part: str, kind: str, tensor: Tensor) -> bool:
        return super().load(part, kind, tensor + self.offset if self.offset else tensor)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.shape, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual. Overwrites `residual`."""
        residual = x if residual is None else residual.add_(x)
        return self(residual), residual
