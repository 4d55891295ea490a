"""Which form each linear layer's weight is kept in."""

from collections.abc import Mapping, Sequence

import torch

from octavo.kernels.cpu.library import library
from octavo.quant.base import LinearLayer, LinearMethod
from octavo.quant.blocks import Blocks, Quantized
from octavo.quant.dense import Dense
from octavo.quant.native import Native
from octavo.quant.packed import Packed


class Choice:
    """Our kernels where they are there, else PyTorch's.

    Args:
        int8: weights become 8 bits while they are loaded.
        bits: by checkpoint name without `.weight`, those that the file has in blocks of whole numbers, and of how
            many bits. `kept` then tells which of them are to come as they are.
    """

    def __init__(self, *, int8: bool = False, bits: Mapping[str, int] | None = None) -> None:
        self.int8, self.bits = int8, bits or {}
        self.kept: set[str] = set()

    def method(
        self, sources: Sequence[str], layer: LinearLayer, dtype: torch.dtype, device: torch.device
    ) -> LinearMethod:
        """For a layer that stacks the tensors called `sources`."""
        if Native.serves(layer, dtype, device) and (loaded := library()) is not None:
            if all(source in self.bits for source in sources) and Blocks.fits(layer):
                self.kept.update(sources)
                return Blocks(loaded, max(self.bits[source] for source in sources))
            if self.int8 and Blocks.fits(layer):
                return Quantized(loaded)
            return Native(loaded)
        return Packed() if Packed.serves(dtype, device) else Dense()
