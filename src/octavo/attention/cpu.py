"""Attention on a CPU in our C++ kernel, which reads the paged cache where it lies."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import Cache
from octavo.batch import Batch
from octavo.kernels.cpu.library import DTYPES, Heads, Rows, Sequences, address
from octavo.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Plan:
    step: Rows
    window: int
    kept: tuple[Tensor, ...]  # what `step` points to


class NativeAttention:
    """Inside a block K lies [kv_heads, head_dim / step, block_size, step], with pairs (step 2) of bfloat16 together.

    V lies [kv_heads, block_size, head_dim]. Every position that is read was written: what is in the rest
    of a block does not matter.
    """

    def __init__(self, spec: ModelSpec, block_size: int, library: Any) -> None:
        self.spec, self.block_size, self.library = spec, block_size, library
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    def refuses(self, spec: ModelSpec) -> str | None:
        if getattr(torch, spec.dtype) not in DTYPES:
            return f"the CPU kernels do not compute in {spec.dtype}"
        return "the CPU kernels need heads of even size" if spec.head_dim % 2 else None

    def plan(self, batch: Batch, window: int | None) -> Plan:
        step, kept = rows(batch)
        return Plan(step, window or 0, kept)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Cache,
        plan: Plan,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        _, num_heads, head_dim = query.shape
        query, key, value = (_whole_rows(side) for side in (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype)
        heads = Heads(num_heads, key.shape[1], head_dim, self.block_size, plan.window, scale, softcap or 0.0)
        strided = [x for side in (query, key, value) for x in (side.data_ptr(), side.stride(0))]
        self.library.octavo_attention(
            self.dtype == torch.bfloat16,
            ctypes.byref(plan.step),
            ctypes.byref(heads),
            *map(ctypes.c_void_p, (cache[0].data_ptr(), cache[1].data_ptr(), *strided, out.data_ptr())),
        )
        return out


def rows(batch: Batch) -> tuple[Rows, tuple[Tensor, ...]]:
    """A batch as the kernels read it, and the tensors that this points to."""
    starts, lens = torch.tensor(batch.query_starts), torch.tensor(batch.context_lens)
    slots, positions, table = batch.cache_slots.contiguous(), batch.positions.contiguous(), batch.block_table
    if table.stride(1) != 1:
        table = table.contiguous()
    sequences = Sequences(len(lens), address(starts), address(lens), address(table), table.stride(0))
    found = Rows(len(slots), torch.get_num_threads(), address(positions), address(slots), sequences)
    return found, (starts, lens, slots, positions, table)


def _whole_rows(side: Tensor) -> Tensor:
    """[T, heads, head_dim] with each row's numbers side by side; rows may lie apart."""
    return side if side[0].is_contiguous() else side.contiguous()
