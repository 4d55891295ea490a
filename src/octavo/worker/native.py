"""What of a CPU engine runs in our C++ kernels, and PyTorch's operators where they cannot."""

import logging

from octavo.attention.base import Backend
from octavo.attention.cpu import NativeAttention
from octavo.attention.torch_ref import TorchAttention
from octavo.kernels.cpu.library import library
from octavo.model_spec import ModelSpec

logger = logging.getLogger("octavo")


def cpu_attention(spec: ModelSpec, block_size: int) -> Backend:
    """The backend of a built model, whose spec has the dtype that it computes in."""
    if (loaded := library()) is not None:
        native = NativeAttention(spec, block_size, loaded)
        if (why := native.refuses(spec)) is None:
            return native
        logger.info("Attention runs in PyTorch's operators: %s.", why)
    return TorchAttention(spec, block_size)
