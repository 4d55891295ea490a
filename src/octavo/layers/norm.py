"""Root-mean-square normalization, with the residual addition that comes before it."""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.layers.layer import Layer


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed in float32.

    `offset` is 1 in Gemma, whose checkpoints hold the difference from 1; `weight` includes it.
    """

    epsilon: Tensor

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(size)
        self.eps, self.offset = eps, offset

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        """The weight is float32 whatever the model's dtype is: it is small, and every row is float32 here."""
        super().build(torch.float32, device)
        self.register_buffer("epsilon", torch.tensor(self.eps, device=device), persistent=False)

    def load(self, part: str, kind: str, tensor: Tensor) -> bool:
        return super().load(part, kind, tensor.float() + self.offset if self.offset else tensor)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return functional.rms_norm(x, self.shape, self.weight, self.eps)
        # The same with fewer kernels, which is what counts for few rows on the CPU.
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return wide.mul_(scale).mul_(self.weight).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual. Overwrites `residual`."""
        residual = x if residual is None else residual.add_(x)
        return self(residual), residual
