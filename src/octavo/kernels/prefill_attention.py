"""Attention of ragged query rows over paged caches: prompts, chunks of prompts and mixed steps."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.errors import InvalidConfig
from octavo.kernels.activation import tanh
from octavo.kernels.decode_attention import LOG2_E
from octavo.kernels.dependent_launch import await_predecessor, launch_options
from octavo.kernels.rope_cache import PagedCache, is_fp8


@dataclass(frozen=True, slots=True)
class PrefillAttentionConfig:
    """`query_rows`: rows of a program, a row being one query head of one token; `tile`: keys a turn of the loop.

    `bulk_copies`: K and V come through tensor descriptors (TMA on Hopper), which needs tile <= block_size and a
    head_dim that is a power of two. `registers` of a thread are at most so many (0: as many as there are), so that two
    programs share a multiprocessor: one multiplies while the other takes exponentials.

    `uniform`: every tile of keys goes through the same code, so that a row's result does not depend, in any bit, on the
    rows that share its program.
    """

    query_rows: int
    tile: int
    warps: int
    stages: int
    bulk_copies: bool = False
    registers: int = 0
    uniform: bool = False


def prefill_attention_config(
    head_dim: int, block_size: int, capability: tuple[int, int], cache_bytes: int = 2, long: bool = False
) -> PrefillAttentionConfig:
    """What fits the shared memory of a multiprocessor: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6 and 8.9.

    `long`: steps of many thousand rows, where on an H200 bulk copies and two programs a multiprocessor were fastest.
    """
    hopper = capability >= (9, 0)
    if not hopper:
        return PrefillAttentionConfig(64, 32, 8, 1) if head_dim > 128 else PrefillAttentionConfig(128, 32, 8, 2)
    if head_dim > 128:
        return PrefillAttentionConfig(128, 64, 8, 2, block_size >= 64 and head_dim == 256 and cache_bytes == 2)
    if long and block_size >= 64 and head_dim in (64, 128) and cache_bytes == 2:
        return PrefillAttentionConfig(128, 64, 8, 2, bulk_copies=True, registers=128)
    return PrefillAttentionConfig(128, 64, 8, 3)


@triton.jit
def attend(
    q,
    m,
    total,
    acc,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    blocks,
    kv_head,
    position,
    begin,
    end,
    context,
    scale,
    softcap,
    window,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    masked: tl.constexpr,
    bulk_copies: tl.constexpr,
    has_softcap: tl.constexpr,
    has_window: tl.constexpr,
):
    """Keys [begin, end) for all rows; `masked` where some row must not see some key, or the last tile is not full."""
    dtype: tl.constexpr = q.dtype
    d = tl.arange(0, padded_dim)
    t = tl.arange(0, tile)
    inside = d < head_dim
    factor = LOG2_E if has_softcap else scale * LOG2_E
    limit = tl.minimum(end, context)  # a last tile may reach beyond, where there are no blocks
    # As in decode attention, block ids are loaded one turn ahead.
    if block_size >= tile:
        block = tl.load(blocks + begin // block_size, mask=begin < limit, other=0)
    else:
        block = tl.load(blocks + (begin + t) // block_size, mask=begin + t < limit, other=0)
    for start in tl.range(begin, end, tile, num_stages=stages):
        if block_size >= tile:
            run = (block.to(tl.int64) * num_kv_heads + kv_head) * block_size + start % block_size
            place = (run + t) * head_dim
            next_block = tl.load(blocks + (start + tile) // block_size, mask=start + tile < limit, other=0)
        else:
            place = (block.to(tl.int64) * num_kv_heads + kv_head) * (block_size * head_dim)
            place += (start + t) % block_size * head_dim
            next_block = tl.load(blocks + (start + tile + t) // block_size, mask=start + tile + t < limit, other=0)
        seen = start + t < limit
        if bulk_copies and not masked:
            k = key_tiles.load([run.to(tl.int32), 0])
        elif masked:
            k = tl.load(key_cache + place[:, None] + d[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        elif padded_dim != head_dim:
            k = tl.load(key_cache + place[:, None] + d[None, :], mask=inside[None, :], other=0.0)
        else:
            k = tl.load(key_cache + place[:, None] + d[None, :])
        s = tl.dot(q, tl.trans(k.to(dtype)), input_precision="ieee")
        if has_softcap:
            s = softcap * tanh(s * (scale / softcap))
        if masked:
            visible = (start + t)[None, :] <= position[:, None]
            if has_window:
                visible = visible & ((start + t)[None, :] > position[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        # In units of log 2, and so that scaling and shifting a score is one instruction.
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        shift = m_new
        if masked and has_window:  # a row may not see any key of its program's first tiles
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * factor - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        if bulk_copies and not masked:
            v = value_tiles.load([run.to(tl.int32), 0])
        elif masked:
            v = tl.load(value_cache + place[:, None] + d[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        elif padded_dim != head_dim:
            v = tl.load(value_cache + place[:, None] + d[None, :], mask=inside[None, :], other=0.0)
        else:
            v = tl.load(value_cache + place[:, None] + d[None, :])
        acc = tl.dot(p.to(dtype), v.to(dtype), acc * alpha[:, None], input_precision="ieee")
        m = m_new
        block = next_block
    return m, total, acc


@triton.jit(do_not_specialize=["num_seqs", "window"])
def prefill_attention_kernel(
    query,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    query_starts,
    context_lens,
    slots,
    block_table,
    out,
    scale,
    softcap,
    value_scale,
    window,
    num_seqs,
    query_stride,
    table_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    query_rows: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    bulk_copies: tl.constexpr,
    uniform: tl.constexpr,
    has_softcap: tl.constexpr,
    has_window: tl.constexpr,
    dependent: tl.constexpr,
):
    """One program a (tile of query rows, kv head); row = token * group + query head of the group.

    Sequence s owns tile ids from query_starts[s] // tokens_a_tile + s on: enough for its rows, and found without a list
    that someone must plan. A tile id past a sequence's rows has nothing to do.
    """
    await_predecessor(dependent)
    tile_id, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = num_heads // num_kv_heads
    tokens_a_tile: tl.constexpr = query_rows // group
    lanes = tl.arange(0, 128)
    before = 0
    for s0 in range(0, num_seqs, 128):
        start = tl.load(query_starts + s0 + lanes, mask=s0 + lanes < num_seqs, other=0)
        first_tile = start // tokens_a_tile + s0 + lanes
        before += tl.sum(((s0 + lanes < num_seqs) & (first_tile <= tile_id)).to(tl.int32), 0)
    seq = before - 1
    slot = tl.load(slots + seq)
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    local = tile_id - query_start // tokens_a_tile - seq
    num_tiles = (query_len + tokens_a_tile - 1) // tokens_a_tile
    if (slot < 0) | (local >= num_tiles):
        return
    first_token = (num_tiles - 1 - local) * tokens_a_tile  # those with the most keys start first
    context = tl.load(context_lens + seq)
    first_position = context - query_len + first_token
    last_position = tl.minimum(first_position + tokens_a_tile, context) - 1
    r = tl.arange(0, query_rows)
    d = tl.arange(0, padded_dim)
    token = first_token + r // group
    head = kv_head * group + r % group
    live = (r < tokens_a_tile * group) & (token < query_len)
    mask = live[:, None] & (d < head_dim)[None, :]
    row = (query_start + token).to(tl.int64)
    q = tl.load(query + row[:, None] * query_stride + (head * head_dim)[:, None] + d[None, :], mask=mask, other=0.0)
    # Rows that are not live see what the last one sees: no special case in the loop.
    position = tl.minimum(first_position + r // group, last_position)
    blocks = block_table + slot.to(tl.int64) * table_stride
    m = tl.full([query_rows], float("-inf"), tl.float32)
    total = tl.zeros([query_rows], tl.float32)
    acc = tl.zeros([query_rows, padded_dim], tl.float32)
    # Keys [all_from, all_to) are seen by every row; before and after, some rows must be masked.
    end = last_position + 1
    all_to = (first_position + 1) // tile * tile
    begin, all_from = 0, 0
    if has_window:
        begin = tl.maximum(first_position - window + 1, 0) // tile * tile
        all_from = (tl.maximum(last_position - window + 1, 0) + tile - 1) // tile * tile
        all_from = tl.minimum(all_from, (end + tile - 1) // tile * tile)
        all_to = tl.maximum(all_to, all_from)
    if uniform:
        all_from, all_to = begin, begin
    elif has_window:
        m, total, acc = attend(
            q, m, total, acc, key_cache, value_cache, key_tiles, value_tiles, blocks, kv_head, position, begin,
            all_from, context, scale, softcap, window, num_kv_heads, head_dim, padded_dim, block_size, tile, stages,
            True, bulk_copies, has_softcap, has_window,
        )  # fmt: skip
    if not uniform:
        m, total, acc = attend(
            q, m, total, acc, key_cache, value_cache, key_tiles, value_tiles, blocks, kv_head, position, all_from,
            all_to, context, scale, softcap, window, num_kv_heads, head_dim, padded_dim, block_size, tile, stages,
            False, bulk_copies, has_softcap, has_window,
        )  # fmt: skip
    m, total, acc = attend(
        q, m, total, acc, key_cache, value_cache, key_tiles, value_tiles, blocks, kv_head, position, all_to, end,
        context, scale, softcap, window, num_kv_heads, head_dim, padded_dim, block_size, tile, stages, True,
        bulk_copies, has_softcap, has_window,
    )  # fmt: skip
    result = acc * (value_scale / total)[:, None]
    at = out + row[:, None] * num_heads * head_dim + (head * head_dim)[:, None] + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    query: Tensor,
    cache: PagedCache,
    query_starts: Tensor,
    context_lens: Tensor,
    slots: Tensor,
    block_table: Tensor,
    out: Tensor,
    config: PrefillAttentionConfig,
    *,
    num_heads: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    dependent: bool = False,
) -> None:
    """out [T, heads * head_dim]: causal attention of S sequences' rows over their cached positions, their own included.

    `query` [T, at least heads * head_dim], rows apart by its stride (the query part of a QKV tensor, say); the rows' K
    and V are in the cache. `query_starts` [S + 1], `context_lens` [S] (positions to attend to, this chunk included) and
    `slots` [S] (row of `block_table` [slots, blocks]; -1: skip) are int32. Sequence i owns rows query_starts[i] to
    query_starts[i + 1], at the end of its context; none, one (a decode row) or many. With a window w a row at position
    p sees (p - w, p].

    Raises:
        InvalidConfig: a configuration that does not fit the heads or the cache.
    """
    num_blocks, num_kv_heads, block_size, head_dim = cache.key.shape
    group = num_heads // num_kv_heads
    if group > config.query_rows:
        raise InvalidConfig(f"{group} query heads a K/V head do not fit {config.query_rows} query rows.")
    padded_dim = triton.next_power_of_2(head_dim)
    key_tiles, value_tiles = cache.key, cache.value
    if config.bulk_copies:
        if config.tile > block_size or padded_dim != head_dim or is_fp8(cache.key):
            raise InvalidConfig(
                f"Bulk copies need tile={config.tile} <= block_size={block_size}, a head_dim={head_dim} that is a "
                "power of two, and a cache of the query's type."
            )
        runs = [num_blocks * num_kv_heads * block_size, head_dim]
        key_tiles, value_tiles = (
            TensorDescriptor(side, runs, [head_dim, 1], [config.tile, head_dim]) for side in (cache.key, cache.value)
        )
    num_seqs = len(context_lens)
    num_tiles = len(query) // (config.query_rows // group) + num_seqs
    prefill_attention_kernel[(num_tiles, num_kv_heads)](
        query,
        cache.key,
        cache.value,
        key_tiles,
        value_tiles,
        query_starts,
        context_lens,
        slots,
        block_table,
        out,
        scale * cache.key_scale,
        softcap or 0.0,
        cache.value_scale,
        window or 0,
        num_seqs,
        query.stride(0),
        block_table.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_size=block_size,
        query_rows=config.query_rows,
        tile=config.tile,
        stages=config.stages,
        bulk_copies=config.bulk_copies,
        uniform=config.uniform,
        has_softcap=softcap is not None,
        has_window=window is not None,
        num_warps=config.warps,
        **({"maxnreg": config.registers} if config.registers else {}),
        **launch_options(dependent),
    )
