"""Attention of one query token a row over its paged cache: split KV, query heads packed, one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import tanh
from octavo.kernels.dependent_launch import await_predecessor, launch_options
from octavo.kernels.rope_cache import (
    HeadTransform,
    PagedCache,
    store_key_value,
    transform_arguments,
    transformed,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class DecodeAttentionConfig:
    """`tile`: cached tokens a turn of the loop; the plan must be made with the same tile and max_splits."""

    tile: int
    warps: int
    stages: int
    max_splits: int = 128


SHORT_CONTEXT = 384  # mean cached tokens of a row, up to which many rows are better served by small tiles


def decode_attention_config(rows: int, head_dim: int, short: bool = False) -> DecodeAttentionConfig:
    """What was fastest on one H200 with heads of 128 values; `short`: contexts of at most about SHORT_CONTEXT tokens.

    Few rows: large tiles, so few partial results to combine. Many rows with little in the cache: small programs, many
    on a multiprocessor, as a program's beginning and end count for more than its loop.
    """
    if head_dim > 128:
        return DecodeAttentionConfig(tile=32, warps=4, stages=3)
    if rows <= 8:
        return DecodeAttentionConfig(tile=64, warps=4, stages=2)
    if rows <= 64:
        return DecodeAttentionConfig(tile=64, warps=4, stages=3)
    return DecodeAttentionConfig(16, 2, 4) if short else DecodeAttentionConfig(64, 4, 2)


class DecodeWorkspace:
    """What the programs of one launch hand to each other; reused by every layer and step of at most `rows` rows."""

    def __init__(self, rows: int, places: int, heads: HeadTransform, device: torch.device) -> None:
        group = padded_group(heads.group)
        size = places * heads.num_kv_heads
        self.partial = torch.empty(size, heads.group, heads.head_dim, device=device)
        self.stats = torch.empty(size, 2, group, device=device)  # of each partial result: largest score, sum
        self.arrivals = torch.zeros(rows, heads.num_kv_heads, device=device, dtype=torch.int32)  # 0 between launches


def padded_group(group: int) -> int:
    """Rows of the query operand: a matrix instruction takes at least 16."""
    return int(max(16, triton.next_power_of_2(group)))


@triton.jit
def prefetch_run(address, num_bytes: tl.constexpr, pieces: tl.constexpr):
    """Ask the copy engine to bring `num_bytes` from `address` (int64) into L2, in `pieces` multiples of 16 bytes."""
    share: tl.constexpr = num_bytes // pieces
    at = address + tl.arange(0, pieces) * share
    size = tl.full([pieces], share, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def scaled_scores(products, scale, softcap, has_softcap: tl.constexpr):
    """Query . key products as scores in units of log 2: exp2 is the instruction that there is."""
    if has_softcap:
        return softcap * tanh(products * (scale / softcap)) * LOG2_E
    return products * (scale * LOG2_E)


@triton.jit
def decode_attention_kernel(
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    key_cache,
    value_cache,
    block_table,
    items,
    partial,
    stats,
    arrivals,
    out,
    scale,
    softcap,
    key_scale,
    value_scale,
    eps,
    table_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    padded_group: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    max_splits: tl.constexpr,
    fused: tl.constexpr,
    has_bias: tl.constexpr,
    qk_norm: tl.constexpr,
    has_softcap: tl.constexpr,
    has_window: tl.constexpr,
    dependent: tl.constexpr,
):
    """One program a (place of the plan, kv head).

    The last program of a (row, kv head) to finish adds the partial results in the order of splits: no second launch,
    and the result does not depend on who was last.
    """
    item, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(items + item * 8)
    slot = tl.load(items + item * 8 + 1)
    split = tl.load(items + item * 8 + 2)
    splits = tl.load(items + item * 8 + 3)
    begin = tl.load(items + item * 8 + 4)
    end = tl.load(items + item * 8 + 5)
    position = tl.load(items + item * 8 + 6)
    lowest = tl.load(items + item * 8 + 7)
    if row < 0:  # an unused place; place 0 waits for all of them
        if item == 0:
            await_predecessor(dependent)
        return
    group: tl.constexpr = num_heads // num_kv_heads
    dtype: tl.constexpr = qkv.dtype.element_ty
    g = tl.arange(0, padded_group)
    d = tl.arange(0, padded_dim)
    t = tl.arange(0, tile)
    live = g < group
    inside = d < head_dim
    qkv_row = qkv + row.to(tl.int64) * (num_heads + 2 * num_kv_heads) * head_dim
    first = kv_head * group
    blocks = block_table + slot.to(tl.int64) * table_stride
    # The block ids of the next tile are loaded one turn ahead: inside the turn that uses them they would cost the
    # software pipeline a stage, and the K and V copies are what should be in flight.
    if block_size >= tile:  # a tile lies in one block: one scalar lookup
        block = tl.load(blocks + begin // block_size, mask=begin < end, other=0)
    else:
        block = tl.load(blocks + (begin + t) // block_size, mask=begin + t < end, other=0)
    if dependent and block_size >= tile:  # the first tile is old: fetch it while the predecessor computes the query
        run = (block.to(tl.int64) * num_kv_heads + kv_head) * (block_size * head_dim) + begin % block_size * head_dim
        run_bytes: tl.constexpr = tile * head_dim * key_cache.dtype.element_ty.primitive_bitwidth // 8
        prefetch_run((key_cache + run).to(tl.int64), run_bytes, tile)
        prefetch_run((value_cache + run).to(tl.int64), run_bytes, tile)
    m = tl.full([padded_group], float("-inf"), tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    acc = tl.zeros([padded_group, padded_dim], tl.float32)
    await_predecessor(dependent)
    if fused:
        q = transformed(
            qkv_row + first * head_dim, bias + first * head_dim, q_norm, cos, sin, g, live, position, eps, head_dim,
            padded_dim, rotary_dim, has_bias, qk_norm,
        ).to(dtype)  # fmt: skip
        if split == splits - 1:
            # Taken from registers: no program reads what another one of this launch writes.
            new_block = tl.load(blocks + position // block_size)
            k_new, v_new = store_key_value(
                qkv_row, bias, k_norm, cos, sin, key_cache, value_cache, new_block, position % block_size, position,
                kv_head, key_scale, value_scale, eps, num_heads, num_kv_heads, head_dim, padded_dim, rotary_dim,
                block_size, has_bias, qk_norm,
            )  # fmt: skip
            product = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1)
            m = scaled_scores(product, scale * key_scale, softcap, has_softcap)
            total = tl.full([padded_group], 1.0, tl.float32)
            acc = tl.zeros([padded_group, padded_dim], tl.float32) + v_new.to(tl.float32)
    else:
        q_mask = live[:, None] & inside[None, :]
        q = tl.load(qkv_row + (first + g[:, None]) * head_dim + d[None, :], mask=q_mask, other=0.0)
    for start in tl.range(begin, end, tile, num_stages=stages):
        seen = start + t < end
        if block_size >= tile:
            place = (block.to(tl.int64) * num_kv_heads + kv_head) * (block_size * head_dim)
            place += (start % block_size + t) * head_dim
            block = tl.load(blocks + (start + tile) // block_size, mask=start + tile < end, other=0)
        else:
            place = (block.to(tl.int64) * num_kv_heads + kv_head) * (block_size * head_dim)
            place += (start + t) % block_size * head_dim
            block = tl.load(blocks + (start + tile + t) // block_size, mask=start + tile + t < end, other=0)
        mask = seen[:, None]
        if padded_dim != head_dim:
            mask = mask & inside[None, :]
        k = tl.load(key_cache + place[:, None] + d[None, :], mask=mask, other=0.0).to(dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = scaled_scores(s, scale * key_scale, softcap, has_softcap)
        if has_window:
            s = tl.where((seen & (start + t >= lowest))[None, :], s, float("-inf"))
        else:
            s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(value_cache + place[:, None] + d[None, :], mask=mask, other=0.0).to(dtype)
        acc = tl.dot(p.to(dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    out_mask = live[:, None] & inside[None, :]
    out_at = out + row.to(tl.int64) * num_heads * head_dim + (first + g[:, None]) * head_dim + d[None, :]
    if splits == 1:
        result = acc * (value_scale / total)[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=out_mask)
    else:
        mine = item * num_kv_heads + kv_head
        part = g[:, None] * head_dim + d[None, :]
        tl.store(partial + mine.to(tl.int64) * group * head_dim + part, acc, mask=out_mask)
        tl.store(stats + mine * 2 * padded_group + g, m)
        tl.store(stats + mine * 2 * padded_group + padded_group + g, total)
        tl.debug_barrier()  # all threads' stores, before the one thread's release
        if tl.atomic_add(arrivals + row * num_kv_heads + kv_head, 1, sem="acq_rel") == splits - 1:
            tl.store(arrivals + row * num_kv_heads + kv_head, 0)
            base = (item - split) * num_kv_heads + kv_head
            i = tl.arange(0, max_splits)[:, None]
            stat = stats + (base + i * num_kv_heads) * 2 * padded_group + g[None, :]
            ms = tl.load(stat, mask=i < splits, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(stat + padded_group, mask=i < splits, other=0.0, cache_modifier=".cg")
            top = tl.max(ms, 0)
            denominator = tl.sum(totals * tl.exp2(ms - top[None, :]), 0)
            result = tl.zeros([padded_group, padded_dim], tl.float32)
            for j in tl.range(0, splits, loop_unroll_factor=8):
                theirs = base + j * num_kv_heads
                m_j = tl.load(stats + theirs * 2 * padded_group + g, cache_modifier=".cg")
                acc_j = tl.load(
                    partial + theirs.to(tl.int64) * group * head_dim + part,
                    mask=out_mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
                result += acc_j * tl.exp2(m_j - top)[:, None]
            result = result * (value_scale / denominator)[:, None]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=out_mask)


def decode_attention(
    qkv: Tensor,
    heads: HeadTransform,
    cache: PagedCache,
    block_table: Tensor,
    items: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor,
    config: DecodeAttentionConfig,
    *,
    scale: float,
    softcap: float | None = None,
    window: bool = False,
    fused: bool = False,
    dependent: bool = False,
) -> None:
    """out [B, heads * head_dim]: attention of the rows in the plan `items` (see `plan_decode`).

    `qkv` [B, (heads + 2 kv_heads) * head_dim] has transformed queries, and the new K and V are in the cache (see
    `rope_cache`), unless `fused`: then qkv is raw, each program transforms its own queries, and the last split of a row
    also writes the new K and V; the plan is then made with new_in_cache=False. Rows not in the plan are not written.
    `window`: the plan was made with one.
    """
    pointers, sizes = transform_arguments(qkv, heads, cache)
    decode_attention_kernel[(len(items), heads.num_kv_heads)](
        *pointers,
        block_table,
        items,
        workspace.partial,
        workspace.stats,
        workspace.arrivals,
        out,
        scale,
        softcap or 0.0,
        cache.key_scale,
        cache.value_scale,
        heads.eps,
        block_table.stride(0),
        **sizes,
        padded_group=padded_group(heads.group),
        tile=config.tile,
        stages=config.stages,
        max_splits=config.max_splits,
        fused=fused,
        has_softcap=softcap is not None,
        has_window=window,
        num_warps=config.warps,
        **launch_options(dependent),
    )
