"""Weights as they are: one matrix in the model's dtype."""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.quant.base import LinearLayer
from octavo.quant.parameter import empty, fill


class Dense:
    def kinds(self, layer: LinearLayer) -> tuple[str, ...]:
        return ("weight", "bias") if layer.has_bias else ("weight",)

    def build(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = empty(layer.out_features, layer.in_features, dtype=dtype, device=device)
        if layer.has_bias:
            layer.bias = empty(layer.out_features, dtype=dtype, device=device)

    def load(self, layer: LinearLayer, rows: slice, kind: str, tensor: Tensor) -> None:
        fill(getattr(layer, kind)[rows], tensor)

    def finish(self, layer: LinearLayer) -> None:
        pass

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return functional.linear(x, layer.weight, layer.bias)

    def scores(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self.apply(layer, x).float()
