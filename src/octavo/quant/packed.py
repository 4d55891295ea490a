"""Dense weights in the order that oneDNN's CPU kernels read them.

`functional.linear` hands oneDNN a plain matrix, which it copies into its blocked order or reads badly in
every call. Ordered once, bfloat16 and float32 products of few rows take about half the time; the
numbers are the same.
"""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.quant.base import LinearLayer
from octavo.quant.dense import Dense

ROWS = 32  # the number of rows of x that the order is chosen for; it serves any


class Packed(Dense):
    @staticmethod
    def serves(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this build of torch and this processor have the kernels."""
        if device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return dtype == torch.float32

    def finish(self, layer: LinearLayer) -> None:
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, ROWS)
        del layer.weight

    def apply(self, layer: LinearLayer, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = rounded(rows)
        if padded > rows:
            x = functional.pad(x, (0, 0, 0, padded - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")
        return out[:rows] if padded > rows else out


def rounded(rows: int) -> int:
    """`rows`, or a little more: above 64 in steps of an eighth.

    oneDNN makes a kernel for every number of rows it meets, which takes milliseconds and memory that stays.
    """
    if rows <= 64:
        return rows
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step
