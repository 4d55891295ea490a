"""The KV cache's tensors, handed to each attention layer."""

import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octavo.attention.base import Backend, Cache
from octavo.core.memory import CacheSize
from octavo.layers.decoder import CausalLM


def allocate(model: CausalLM, backend: Backend, size: CacheSize, dtype: torch.dtype) -> list[Cache]:
    """Give every attention layer its backend and its K and V, [num_blocks, block_size, kv_heads, head_dim], all zero.

    Zeros matter: attention reads whole blocks and masks what a sequence has not written, and a NaN there
    would survive the mask. The pages come from the kernel on first touch, so an unused cache costs nothing.
    """
    caches = []
    for layer in model.attention_layers():
        shape = (size.num_blocks, size.block_size, layer.num_kv_heads, layer.head_dim)
        layer.backend, layer.cache = backend, (_zeros(shape, dtype), _zeros(shape, dtype))
        caches.append(layer.cache)
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Fresh pages, zero until they are written, and back with the system as soon as the tensor is gone.

    `torch.zeros` would touch every page, and the C allocator keeps freed memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def copy(parts: Iterable[Tensor], pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
    """Write what the first block of each pair holds into the second; all are read before any is written.

    `parts` [num_blocks, ...] of any type, as bytes: PyTorch cannot index every 8-bit float.
    """
    sources, targets = torch.tensor(pairs).to(device, non_blocking=True).unbind(1)
    for part in parts:
        plain = part.view(torch.uint8)
        plain[targets] = plain[sources]


def clear(caches: list[Cache], blocks: Tensor) -> None:
    """Take what is no number out of these blocks, after a fault; the rest may be a neighbour's too, and stays."""
    for key, value in caches:
        for part in (key, value):
            part[blocks] = part[blocks].nan_to_num(0.0, 0.0, 0.0)
