"""Weights as whole numbers of 4 or 8 bits, 32 along a row sharing a scale and a minimum; our C++ kernels multiply them.

A checkpoint's blocks arrive as uint8 [rows, in_features / 32, 36]: scale and minimum in half precision, then
32 signed bytes; a weight is scale * number + minimum. GGUF's types of 32 fit without loss (formats/gguf_blocks.py).
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from octavo.errors import InvalidWeights
from octavo.quant.base import LinearLayer
from octavo.quant.native import LANES, Native
from octavo.quant.parameter import empty

BLOCK = 32
HEAD = 4 * LANES  # bytes of sixteen scales and sixteen minima in a group of sixteen columns


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
        blocks, packed = tensor.contiguous(), layer.packed[rows.start // LANES : rows.stop // LANES]
        finite = self.library.octavo_pack(
            ctypes.c_long(self.bits),
            ctypes.c_void_p(blocks.data_ptr()),
            ctypes.c_long(wanted[0]),
            ctypes.c_long(layer.in_features),
            ctypes.c_long(torch.get_num_threads()),
            ctypes.c_void_p(packed.data_ptr()),
        )
        if not finite:
            raise InvalidWeights("holds NaN or infinity.", "The file is damaged.")
        return None

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
        weight = layer.weight
        self.library.octavo_quantize(
            weight.dtype == torch.bfloat16,
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_long(layer.out_features),
            ctypes.c_long(layer.in_features),
            ctypes.c_long(torch.get_num_threads()),
            ctypes.c_void_p(layer.packed.data_ptr()),
        )
        del layer.weight
        super().finish(layer)
