"""Token embeddings."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.layers.layer import Layer
from octavo.layers.linear import Linear
from octavo.quant.native import Native


class Embedding(Layer):
    """Rows of a table, times `scale` (Gemma's sqrt(hidden size), rounded to the table's dtype).

    Where the head has the same weight in an order of its own, there is no table: the head's rows are read.
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        super().__init__(vocab_size, hidden_size)
        self.scale = scale
        self.of_head: Callable[[Tensor], Tensor] | None = None
        self.load_head: Callable[[str, str, Tensor], bool] | None = None

    def read_from(self, head: Linear, method: Native) -> None:
        """Have no table: rows come from the head, which takes the tensors too."""
        dtype = self.dtype = head.dtype
        self.of_head = lambda token_ids: method.rows(head, token_ids, dtype)
        self.load_head = head.load
        self.waiting.clear()
        if hasattr(self, "weight"):
            del self.weight

    def load(self, part: str, kind: str, tensor: Tensor) -> bool:
        return self.load_head(part, kind, tensor) if self.load_head else super().load(part, kind, tensor)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = functional.embedding(token_ids, self.weight) if self.of_head is None else self.of_head(token_ids)
        return x if self.scale == 1.0 else x.mul_(torch.tensor(self.scale, dtype=x.dtype, device=x.device))
