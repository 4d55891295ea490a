"""Linear layers whose weight may stack several checkpoint tensors."""

from typing import Literal

import torch
from torch import Tensor, nn

from octavo.errors import InvalidWeights
from octavo.layers.layer import Layer
from octavo.quant.base import LinearMethod
from octavo.quant.dense import Dense


class Linear(Layer):
    """y = x W^T + b for rows x.

    `parts` are the output rows by sibling: a layer called ...self_attn.qkv_proj with parts q_proj, k_proj
    and v_proj is filled from ...self_attn.q_proj and so on, or from one tensor under its own name, which
    holds the parts in this order. `split` says which side tensor parallelism may cut.
    """

    bias: nn.Parameter | None
    packed: Tensor
    packed_bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        parts: int | dict[str, int],
        *,
        bias: bool = False,
        split: Literal["in", "out"] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.has_bias, self.split = in_features, bias, split
        self.parts = {"": parts} if isinstance(parts, int) else parts
        self.method: LinearMethod = Dense()
        self.bias = self.packed_bias = None

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.method.build(self, dtype, device)
        self.waiting = {(part, kind) for part in self.parts for kind in self.method.kinds(self)}

    def share(self, weight: nn.Parameter) -> None:
        """Be loaded with a matrix that another layer owns."""
        self.weight, self.dtype = weight, weight.dtype
        self.waiting.clear()
        self.method.finish(self)

    def sources(self, prefix: str) -> dict[str, str]:
        parent = prefix.rpartition(".")[0]
        return {prefix: ""} | {f"{parent}.{part}": part for part in self.parts if part}

    def load(self, part: str, kind: str, tensor: Tensor) -> bool:
        if part == "" and "" not in self.parts:
            return self._load_stack(kind, tensor)
        if (part, kind) not in self.waiting:
            return False
        begin = 0
        for name, rows in self.parts.items():
            if name == part:
                self.method.load(self, slice(begin, begin + rows), kind, tensor)
            begin += rows
        self.waiting.remove((part, kind))
        if not self.waiting:
            self.method.finish(self)
        return True

    def _load_stack(self, kind: str, tensor: Tensor) -> bool:
        if any((part, kind) not in self.waiting for part in self.parts):
            return False
        if tensor.shape[0] != self.out_features:
            raise InvalidWeights(f"has shape {list(tensor.shape)} but must have {self.out_features} rows.")
        for part, piece in zip(self.parts, torch.split(tensor, list(self.parts.values())), strict=True):
            self.load(part, kind, piece)
        return True

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)

    def scores(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] float32."""
        return self.method.scores(self, x)
