"""The device's rows of the running sequences, and the one copy a step with which the host changes them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidConfig

ALIGNMENT = 16  # words: a multiple, so that strides compile to one variant of every kernel

Values = int | float | Sequence[int] | Sequence[float] | np.ndarray
_HOST_TYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


@dataclass(frozen=True, slots=True)
class Field:
    """What a slot has in one table: `width` values (0: one, in a table of one dimension) of int32, int64 or float32."""

    dtype: torch.dtype
    width: int = 0


class SlotTables:
    """Named tables with a row for every slot, all zero, in one int32 arena, so that a change is an offset and words.

    A table is [num_slots] or [num_slots, at least width]: wide rows are rounded up to `ALIGNMENT` words.
    """

    def __init__(self, num_slots: int, fields: Mapping[str, Field], device: torch.device | str) -> None:
        self.num_slots = num_slots
        self.fields = dict(fields)
        self.strides: dict[str, int] = {}  # words from a slot's row to the next
        self.offsets: dict[str, int] = {}
        size = 0
        for name, field in self.fields.items():
            if field.dtype not in _HOST_TYPES:
                raise InvalidConfig(f"{name}: a table of {field.dtype} is not int32, int64 or float32.")
            words = max(field.width, 1) * field.dtype.itemsize // 4
            self.strides[name] = words if field.width == 0 else _rounded(words)
            self.offsets[name] = size
            size = _rounded(size + num_slots * self.strides[name])
        self.arena = torch.zeros(size, dtype=torch.int32, device=device)

    def __getitem__(self, name: str) -> Tensor:
        """The table as a view of the arena."""
        field, offset, stride = self.fields[name], self.offsets[name], self.strides[name]
        words = self.arena[offset : offset + self.num_slots * stride]
        table = words.view(field.dtype)
        return table if field.width == 0 else table.view(self.num_slots, -1)


class Changes:
    """What a step changes, gathered on the host and sent by `apply`: one asynchronous copy and one launch."""

    def __init__(self, tables: SlotTables) -> None:
        self.tables = tables
        self.runs: dict[tuple[str, int, int], np.ndarray] = {}
        self.values: dict[torch.dtype, dict[int, int | float]] = {dtype: {} for dtype in _HOST_TYPES}  # by place

    def set(self, name: str, slot: int, value: int | float) -> None:
        """One value of a table of one dimension: `write` in a tenth of the time."""
        tables = self.tables
        self.values[tables.fields[name].dtype][tables.offsets[name] + slot * tables.strides[name]] = value

    def write(self, name: str, slot: int, values: Values, start: int = 0) -> None:
        """Let row `slot` of a table hold `values` from column `start` on.

        In a table of one dimension more values go on to the slots behind. A later write at the same place replaces an
        earlier one; runs that overlap otherwise land in any order.

        Raises:
            InvalidConfig: a place outside the table.
        """
        field = self.tables.fields[name]
        words = np.atleast_1d(np.asarray(values, dtype=_HOST_TYPES[field.dtype]))
        width = field.width or self.tables.num_slots - slot
        if not 0 <= slot < self.tables.num_slots or start < 0 or start + len(words) > width:
            raise InvalidConfig(
                f"{name}[{slot}, {start}:{start + len(words)}] is outside of {self.tables.num_slots} slots of "
                f"{width} values."
            )
        self.runs[name, slot, start] = words.view(np.int32)

    def apply(self) -> None:
        """Send the gathered changes to the current stream and forget them.

        Pinned memory comes from torch's caching allocator, which keeps it until the copy is done.
        """
        device = self.tables.arena.device
        places = [self._offset(*place) for place in self.runs]
        data = list(self.runs.values())
        lengths = [len(words) for words in data]
        for dtype, values in self.values.items():
            if values:
                places += values
                lengths += [dtype.itemsize // 4] * len(values)
                data.append(np.fromiter(values.values(), _HOST_TYPES[dtype], len(values)).view(np.int32))
                values.clear()
        self.runs = {}
        if not data:
            return
        header = np.empty((len(places), 4), dtype=np.int32)
        counts = np.array(lengths, dtype=np.int64)
        header[:, :2] = np.array(places, dtype=np.int64).view(np.int32).reshape(-1, 2)
        header[:, 2] = header.size + np.cumsum(counts) - counts
        header[:, 3] = counts
        host = torch.empty(header.size + int(counts.sum()), dtype=torch.int32, pin_memory=device.type == "cuda")
        np.concatenate([header.ravel(), *data], out=host.numpy())
        changes = host.to(device, non_blocking=True)
        slot_update_kernel[(len(places),)](self.tables.arena, changes, block=1024, num_warps=4)

    def _offset(self, name: str, slot: int, start: int) -> int:
        tables = self.tables
        words = tables.fields[name].dtype.itemsize // 4
        return tables.offsets[name] + slot * tables.strides[name] + start * words


def _rounded(words: int) -> int:
    return math.ceil(words / ALIGNMENT) * ALIGNMENT


@triton.jit
def slot_update_kernel(arena, changes, block: tl.constexpr):
    """One program a run: (destination, two words; source; length) in words, of arena, changes."""
    run = changes + tl.program_id(0) * 4
    low = tl.load(run).to(tl.int64) & 0xFFFFFFFF
    destination = (tl.load(run + 1).to(tl.int64) << 32) | low
    source = changes + tl.load(run + 2)
    length = tl.load(run + 3)
    for first in range(0, length, block):
        i = first + tl.arange(0, block)
        tl.store(arena + destination + i, tl.load(source + i, mask=i < length), mask=i < length)
