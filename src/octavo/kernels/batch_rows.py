"""What every row of a mixed step feeds, from the step's chunks: the device's own tokens at the chunks' positions."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.decode_plan import DecodeRows


@triton.jit(do_not_specialize=["num_seqs", "num_rows"])
def batch_rows_kernel(
    query_starts,
    context_lens,
    slots,
    tokens,
    block_table,
    token_ids,
    positions,
    cache_slots,
    num_seqs,
    num_rows,
    token_stride,
    table_stride,
    block_size: tl.constexpr,
    block: tl.constexpr,
):
    """One program a sequence, and one more for the rows behind the last."""
    seq = tl.program_id(0)
    begin = tl.load(query_starts + seq)
    padding = seq == num_seqs
    end = num_rows
    slot = tl.full([], -1, tl.int32)
    first_position = tl.full([], 0, tl.int32)
    if seq < num_seqs:
        end = tl.load(query_starts + seq + 1)
        slot = tl.load(slots + seq)
        first_position = tl.load(context_lens + seq) - (end - begin)
    live = (slot >= 0) & (padding == 0)
    slot_row = slot.to(tl.int64)
    for first in range(begin, end, block):
        row = first + tl.arange(0, block)
        inside = row < end
        position = first_position + row - begin
        known = inside & live
        token = tl.load(tokens + slot_row * token_stride + position, mask=known, other=0)
        page = tl.load(block_table + slot_row * table_stride + position // block_size, mask=known, other=0)
        tl.store(token_ids + row, token, mask=inside)
        tl.store(positions + row, tl.where(live, position, -1), mask=inside)
        tl.store(cache_slots + row, tl.where(live, page * block_size + position % block_size, 0), mask=inside)


def batch_rows(
    query_starts: Tensor,
    context_lens: Tensor,
    slots: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    rows: DecodeRows,
    *,
    block_size: int,
) -> None:
    """Fill `rows` [T] for S sequences; sequence i owns rows query_starts[i] to query_starts[i + 1].

    `query_starts` [S + 1], `context_lens` [S] (positions up to the end of the chunk) and `slots` [S] are int32;
    `tokens` [slots, max_len] and `block_table` [slots, blocks] too. A slot of -1, and rows behind the last
    sequence, are padding: position -1.
    """
    num_seqs = len(context_lens)
    batch_rows_kernel[(num_seqs + 1,)](
        query_starts,
        context_lens,
        slots,
        tokens,
        block_table,
        rows.token_ids,
        rows.positions,
        rows.cache_slots,
        num_seqs,
        len(rows.token_ids),
        tokens.stride(0),
        block_table.stride(0),
        block_size=block_size,
        block=1024,
        num_warps=4,
    )
