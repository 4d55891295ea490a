"""Token embeddings."""

from torch import Tensor
from torch.nn import functional

from octavo.layers.layer import Layer


class Embedding(Layer):
    """Rows of a table, times `scale` (Gemma's sqrt(hidden size), rounded to the table's dtype)."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        super().__init__(vocab_size, hidden_size)
        self.scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        x = functional.embedding(token_ids, self.weight)
        return x if self.scale == 1.0 else x.mul_(self.weight.new_tensor(self.scale))
