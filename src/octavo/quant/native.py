"""Dense weights in the order of our C++ kernels, which multiply a few rows at the speed of memory."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cpu.library import DTYPES, Matrix, address
from octavo.quant.base import LinearLayer
from octavo.quant.dense import Dense

LANES = 16


class Native(Dense):
    """`packed` is [columns / 16, inner / step, 16, step], step 2 in bfloat16; columns padded with zeros to a group."""

    bits = 0  # of a weight in blocks (blocks.py); none here

    def __init__(self, library: Any) -> None:
        self.library = library

    @staticmethod
    def serves(layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> bool:
        return device.type == "cpu" and dtype in DTYPES and layer.in_features % 2 == 0

    def finish(self, layer: LinearLayer) -> None:
        weight = layer.weight
        step = 4 // weight.itemsize
        columns, inner = weight.shape
        groups = -(-columns // LANES)
        layer.packed = weight.new_empty(groups, inner // step, LANES, step)
        whole = columns // LANES
        layer.packed[:whole] = weight[: whole * LANES].view(whole, LANES, inner // step, step).transpose(1, 2)
        if whole < groups:
            rest = weight.new_zeros(LANES, inner)
            rest[: columns - whole * LANES] = weight[whole * LANES :]
            layer.packed[whole] = rest.view(LANES, inner // step, step).transpose(0, 1)
        del layer.weight
        self._pad_bias(layer)

    def _pad_bias(self, layer: LinearLayer) -> None:
        if layer.bias is not None:  # added to float32 sums
            columns = layer.out_features
            bias = layer.bias.new_zeros(-(-columns // LANES) * LANES, dtype=torch.float32)
            bias[:columns] = layer.bias
            layer.packed_bias = bias

    def rows(self, layer: LinearLayer, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight by their numbers [n] -> [n, in_features]: what an embedding shares with its head."""
        return layer.packed[numbers // LANES, :, numbers % LANES].flatten(1).to(dtype)

    def matrix(self, layer: LinearLayer) -> Matrix:
        """For the kernels; the layer must outlive it."""
        return Matrix(
            address(layer.packed), address(layer.packed_bias), layer.out_features, layer.in_features, self.bits
        )

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self._apply(layer, x, x.dtype)

    def scores(self, layer: LinearLayer, x: Tensor) -> Tensor:
        return self._apply(layer, x, torch.float32)

    def _apply(self, layer: LinearLayer, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], layer.out_features, dtype=dtype)
        rows = x.numel() // layer.in_features
        matrix = self.matrix(layer)
        self.library.octavo_linear(
            x.dtype == torch.bfloat16,
            dtype == torch.float32,
            ctypes.byref(matrix),
            ctypes.c_long(torch.get_num_threads()),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_long(rows),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out
