"""The tensors of one step: what a model's forward pass reads."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Rows of all chunks of a step, one after the other. T rows, S sequences.

    The lists are the same facts on the host, for backends that plan there.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cache_slots: Tensor  # [T] int64: block * block_size + offset where this row's K and V are written
    block_table: Tensor  # [S, max blocks of this step] int64; entries past a sequence's blocks are 0
    query_starts: list[int]  # S + 1: sequence i owns rows query_starts[i]:query_starts[i + 1]
    context_lens: list[int]  # S: positions to attend to, this chunk included
    plans: dict[int | None, Any] = field(default_factory=dict)  # an attention backend's plan, by sliding window

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)
