"""Weights as whole numbers of 4 or 8 bits, 32 along a row sharing a scale and a minimum; our C++ kernels multiply them.

A checkpoint's blocks arrive as uint8 [rows, in_features / 32, 36]: scale and minimum in half precision, then
32 signed bytes; a weight is scale * number + minimum. GGUF's types of 32 fit without loss (formats/gguf_blocks.py).
"""

from typing import Any

import torch
from torch import Tensor

from octavo.errors import InvalidWeights
from octavo.quant.base import LinearLayer
from octavo.quant.native import LANES, Native
from octavo.quant.parameter import empty

BLOCK = 32
HEAD = 4 * LANES  # bytes of sixteen scales and sixteen minima in a group of sixteen columns
STEP_ROWS = 4096  # quantized at once


class Blocks(Native):
    """`packed` is uint8 [columns / 16, in_features / 32, block], a block as src/octavo/kernels/cpu/blocks.h has it."""

    def __init__(self, library: Any, bits: int) -> None:
        super().__init__(library)
        self.bits = bits

    @staticmethod
    def fits(layer: LinearLayer) -> bool:
        """Whether rows are whole blocks, and parts whole groups of columns."""
        parts = layer.parts.values()
        return layer.in_features % BLOCK == 0 and not any(rows % LANES for rows in parts)

    def kinds(self, layer: LinearLayer) -> tuple[str, ...]:
        return ("blocks", "bias") if layer.has_bias else ("blocks",)

    def build(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.packed = self._empty(layer)
        if layer.has_bias:
            layer.bias = empty(layer.out_features, dtype=dtype, device=device)

    def _empty(self, layer: LinearLayer) -> Tensor:
        size = HEAD + BLOCK * LANES * self.bits // 8
        return torch.empty(layer.out_features // LANES, layer.in_features // BLOCK, size, dtype=torch.uint8)

    def load(self, layer: LinearLayer, rows: slice, kind: str, tensor: Tensor) -> None:
        if kind != "blocks":
            return super().load(layer, rows, kind, tensor)
        wanted = (rows.stop - rows.start, layer.in_features // BLOCK, 4 + BLOCK)
        if tensor.shape != wanted:
            found = [tensor.shape[0], tensor.shape[1] * BLOCK]
            raise InvalidWeights(
                f"has shape {found} but the model's configuration asks for {[wanted[0], layer.in_features]}."
            )
        if not tensor[..., :4].contiguous().view(torch.float16).isfinite().all():
            raise InvalidWeights("holds NaN or infinity.", "The file is damaged.")
        self._pack(layer.packed[rows.start // LANES : rows.stop // LANES], tensor)
        return None

    def _pack(self, packed: Tensor, blocks: Tensor) -> None:
        groups, count = packed.shape[:2]
        by_group = blocks.view(groups, LANES, count, 4 + BLOCK).transpose(1, 2)  # [groups, blocks, 16, bytes]
        packed[..., : HEAD // 2] = by_group[..., :2].flatten(2)
        packed[..., HEAD // 2 : HEAD] = by_group[..., 2:4].flatten(2)
        numbers = by_group[..., 4:]
        if self.bits == 8:
            packed[..., HEAD:] = torch.unflatten(numbers, -1, (BLOCK // 2, 2)).transpose(2, 3).flatten(2)
            return
        quads = torch.unflatten(numbers, -1, (4, 2, 2, 2))  # words of two bytes of two numbers; then neighbours
        both = quads[..., 0, :] | quads[..., 1, :] << 4  # [groups, blocks, 16, quad, byte, neighbour]
        packed[..., HEAD:] = both.permute(0, 1, 3, 2, 5, 4).flatten(2)

    def finish(self, layer: LinearLayer) -> None:
        self._pad_bias(layer)

    def rows(self, layer: LinearLayer, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        group, lane, packed = numbers // LANES, numbers % LANES, layer.packed
        head = torch.unflatten(packed[..., :HEAD], -1, (2, LANES, 2))[group, :, :, lane]  # [n, blocks, 2, 2]
        scale, minimum = head.contiguous().view(torch.float16).squeeze(-1).float().unbind(-1)
        if self.bits == 8:
            found = (
                torch.unflatten(packed[..., HEAD:], -1, (-1, LANES, 2))[group, :, :, lane].flatten(2).view(torch.int8)
            )
        else:
            words = torch.unflatten(packed[..., HEAD:], -1, (4, LANES, 2, 2))[group, :, :, lane]
            words = words.transpose(-1, -2)  # [n, blocks, quad, byte, neighbour]
            found = torch.stack([words & 15, words >> 4], -2).flatten(2)
        weights = torch.addcmul(minimum[..., None], scale[..., None], found.float())
        return weights.flatten(1).to(dtype)


class Quantized(Blocks):
    """8 bits made of any checkpoint's weights: each block's largest weight becomes 127."""

    def __init__(self, library: Any) -> None:
        super().__init__(library, 8)

    def kinds(self, layer: LinearLayer) -> tuple[str, ...]:
        return super(Blocks, self).kinds(layer)

    def build(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        super(Blocks, self).build(layer, dtype, device)

    def load(self, layer: LinearLayer, rows: slice, kind: str, tensor: Tensor) -> None:
        super(Blocks, self).load(layer, rows, kind, tensor)

    def finish(self, layer: LinearLayer) -> None:
        layer.packed = self._empty(layer)
        for begin in range(0, layer.out_features, STEP_ROWS):
            part = layer.weight[begin : begin + STEP_ROWS]
            end = begin + len(part)
            self._pack(layer.packed[begin // LANES : end // LANES], quantize(part))
        del layer.weight
        super().finish(layer)


def quantize(weight: Tensor) -> Tensor:
    """[rows, in_features] -> uint8 [rows, in_features / 32, 36], minima 0."""
    values = torch.unflatten(weight.float(), -1, (-1, BLOCK))
    heads = torch.zeros(*values.shape[:-1], 2, dtype=torch.float16)
    heads[..., 0] = values.abs().amax(-1) / 127
    scale = heads[..., :1].float()
    numbers = torch.where(scale > 0, values / scale, 0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([heads.view(torch.uint8), numbers.view(torch.uint8)], -1)
