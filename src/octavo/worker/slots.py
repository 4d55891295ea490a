"""Persistent rows of the running sequences: token ids and block tables, changed by what a step says."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from octavo.batch import Batch
from octavo.core.step import Chunk, Step


def appended(step: Step, num_blocks: list[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """What a step writes into block tables: (slot, first place, blocks). Keeps the blocks of each slot counted."""
    for admit in step.admits:
        num_blocks[admit.slot] = len(admit.blocks)
        yield admit.slot, 0, admit.blocks
    for chunk in step.chunks:
        if chunk.new_blocks:
            begin = num_blocks[chunk.slot]
            num_blocks[chunk.slot] = begin + len(chunk.new_blocks)
            yield chunk.slot, begin, chunk.new_blocks


class Slots:
    """Row s holds the sequence in slot s.

    `token_ids` is [num_slots, max_model_len] int64: prompt and output; a sampled token is written here by the
    device, so the next step can start before the host has seen it. `block_table` is [num_slots, blocks]
    int64; places past a sequence's blocks are 0, the block that belongs to nobody.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.last = max_model_len - 1
        self.token_ids = torch.zeros(num_slots, max_model_len, dtype=torch.int64)
        self.block_table = torch.zeros(num_slots, -(-max_model_len // block_size), dtype=torch.int64)
        self._num_blocks = [0] * num_slots

    def apply(self, step: Step) -> None:
        """Admit sequences and append new blocks."""
        for admit in step.admits:
            self.token_ids[admit.slot, : len(admit.tokens)] = torch.tensor(admit.tokens)
            self.block_table[admit.slot] = 0
        for slot, begin, blocks in appended(step, self._num_blocks):
            self.block_table[slot, begin : begin + len(blocks)] = torch.tensor(blocks, dtype=torch.int64)

    def blocks(self, slot: int) -> Tensor:
        return self.block_table[slot, : self._num_blocks[slot]]

    def put(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write sampled tokens [R] where the next step reads them."""
        self.token_ids[slots, positions.clamp(max=self.last)] = tokens

    def batch(self, chunks: list[Chunk], ahead: int = 0) -> Batch:
        """The tensors of a step; `ahead` moves every chunk that many positions on (repeated steps).

        A repeated step may run past the longest length, for tokens that are dropped later: those rows stay
        at the last position, which no sequence ever reads.
        """
        starts = np.array([min(chunk.start + ahead, self.last) for chunk in chunks])
        lengths = np.array([chunk.length for chunk in chunks])
        slots = np.array([chunk.slot for chunk in chunks])
        ends = np.cumsum(lengths)
        if len(chunks) == ends[-1]:  # one row a sequence
            positions, rows = starts, slots
        else:
            positions = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
            rows = np.repeat(slots, lengths)
        context_lens = starts + lengths
        row, position = torch.from_numpy(rows), torch.from_numpy(positions)
        blocks = self.block_table[row, position // self.block_size]
        widest = int(-(-context_lens.max() // self.block_size))
        return Batch(
            token_ids=self.token_ids[row, position],
            positions=position,
            cache_slots=blocks * self.block_size + position % self.block_size,
            block_table=self.block_table[torch.from_numpy(slots), :widest],
            query_starts=[0, *ends.tolist()],
            context_lens=context_lens.tolist(),
        )
