"""A mixture of experts for all rows at once: routing, rows sorted by expert, grouped matrix products, their sum."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import activated, activation_kind


@dataclass(frozen=True, slots=True)
class ExpertMatmulConfig:
    """`rows` of one expert and `columns` of its output a program, `depth` of K a turn of the loop."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def expert_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile, by the mean number of rows of an expert: a tile has rows of one expert only."""
    mean = num_rows / num_experts
    return 16 if mean <= 16 else 64 if mean <= 96 else 128


def expert_matmul_config(rows: int, element_bytes: int, *, gated: bool) -> ExpertMatmulConfig:
    """What fits the shared memory of every GPU from 8.0 on: at most 96 KiB are taken."""
    if element_bytes == 4:  # for checking, not for speed
        return ExpertMatmulConfig(rows, 32, 32, 4, 1)
    if rows == 128:
        return ExpertMatmulConfig(rows, 64 if gated else 128, 64, 8, 3)
    return ExpertMatmulConfig(rows, 64, 64, 4, 4 if rows == 16 else 3)


@triton.jit
def route_kernel(
    scores,
    chosen,
    shares,
    num_experts: tl.constexpr,
    padded_experts: tl.constexpr,
    k: tl.constexpr,
    padded_k: tl.constexpr,
    normalize: tl.constexpr,
):
    """One row a program: the k largest scores one after the other, equal ones by rising number."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, padded_experts)
    lane = tl.arange(0, padded_k)
    x = tl.load(scores + row * num_experts + e, mask=e < num_experts, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - top), 0)
    experts = tl.zeros([padded_k], tl.int32)
    picked = tl.zeros([padded_k], tl.float32)
    for i in range(k):
        best = tl.max(x, 0)
        # No score equals a best one that is not a number: the row is lost, but must not lead outside.
        expert = tl.minimum(tl.min(tl.where(x == best, e, padded_experts), 0), num_experts - 1)
        experts = tl.where(lane == i, expert, experts)
        picked = tl.where(lane == i, tl.exp(best - top) / total, picked)
        x = tl.where(e == expert, float("-inf"), x)
    if normalize:
        picked /= tl.sum(picked, 0)
    tl.store(chosen + row * k + lane, experts, mask=lane < k)
    tl.store(shares + row * k + lane, picked, mask=lane < k)


def route(scores: Tensor, chosen: Tensor, shares: Tensor, *, normalize: bool) -> None:
    """Softmax over all experts in float32 and the best k of each row, rescaled to sum 1 if `normalize`.

    `scores` [T, experts] of any float type -> `chosen` [T, k] int32, `shares` [T, k] float32.
    """
    num_rows, num_experts = scores.shape
    k = chosen.shape[1]
    route_kernel[(num_rows,)](
        scores,
        chosen,
        shares,
        num_experts=num_experts,
        padded_experts=triton.next_power_of_2(num_experts),
        k=k,
        padded_k=triton.next_power_of_2(k),
        normalize=normalize,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_pairs"])
def sort_by_expert_kernel(chosen, order, starts, num_pairs, num_experts: tl.constexpr, block: tl.constexpr):
    """One expert a program: counts what belongs before it, then writes its own pairs in rising order."""
    expert = tl.program_id(0)
    i = tl.arange(0, block)
    before = tl.zeros([block], tl.int32)
    for first in range(0, num_pairs, block):
        other = tl.load(chosen + first + i, mask=first + i < num_pairs, other=num_experts)
        before += (other < expert).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(starts + expert, at)
    for first in range(0, num_pairs, block):
        mine = (tl.load(chosen + first + i, mask=first + i < num_pairs, other=num_experts) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, first + i, mask=mine != 0)
        at += tl.sum(mine, 0)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, at)


def sort_by_expert(chosen: Tensor, order: Tensor, starts: Tensor) -> None:
    """`chosen` [T, k] int32 -> `order` [T * k] int32: pair numbers (row * k + place), those of an expert together.

    Expert e's are order[starts[e]:starts[e + 1]]; `starts` is [experts + 1] int32. The order is always the same.
    """
    num_pairs = chosen.numel()
    sort_by_expert_kernel[(len(starts) - 1,)](
        chosen, order, starts, num_pairs, num_experts=len(starts) - 1, block=1024 if num_pairs <= 1024 else 4096,
        num_warps=4 if num_pairs <= 1024 else 8,
    )  # fmt: skip


@triton.jit
def expert_matmul_kernel(
    x,
    weight,
    order,
    starts,
    shares,
    out,
    num_experts: tl.constexpr,
    padded_experts: tl.constexpr,
    num_columns: tl.constexpr,
    size: tl.constexpr,
    k: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    activation: tl.constexpr,
):
    """One program a (tile of rows of one expert, tile of columns); tiles are numbered expert by expert."""
    gated: tl.constexpr = activation != ""
    tile = tl.program_id(0)
    e = tl.arange(0, padded_experts)
    first = tl.load(starts + e, mask=e < num_experts, other=0)
    count = tl.load(starts + e + 1, mask=e < num_experts, other=0) - first
    tiles = (count + rows - 1) // rows
    ends = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = e == expert
    local = tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)
    begin = tl.sum(tl.where(mine, first, 0), 0)
    end = begin + tl.sum(tl.where(mine, count, 0), 0)
    place = begin + local * rows + tl.arange(0, rows)
    live = place < end
    pair = tl.load(order + place, mask=live, other=0)
    source = (pair // k if gated else place).to(tl.int64)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    d = tl.arange(0, depth)
    whole: tl.constexpr = size % depth == 0
    whole_columns: tl.constexpr = num_columns % columns == 0
    weight_rows: tl.constexpr = 2 * num_columns if gated else num_columns
    strip = weight + expert.to(tl.int64) * weight_rows * size
    acc = tl.zeros([rows, columns], tl.float32)
    acc_up = tl.zeros([rows, columns], tl.float32)
    for k0 in tl.range(0, size, depth, num_stages=stages):
        a_mask = live[:, None]
        b_mask = (n < num_columns)[:, None]
        if not whole:
            a_mask = a_mask & (k0 + d < size)[None, :]
            b_mask = b_mask & (k0 + d < size)[None, :]
        a = tl.load(x + source[:, None] * size + k0 + d[None, :], mask=a_mask, other=0.0)
        at = n[:, None] * size + k0 + d[None, :]
        b = tl.load(strip + at) if whole and whole_columns else tl.load(strip + at, mask=b_mask, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if gated:
            if whole and whole_columns:
                b_up = tl.load(strip + num_columns * size + at)
            else:
                b_up = tl.load(strip + num_columns * size + at, mask=b_mask, other=0.0)
            acc_up = tl.dot(a, tl.trans(b_up), acc_up, input_precision="ieee")
    if gated:
        result = activated(acc, activation) * acc_up
        target = place.to(tl.int64)
    else:
        result = acc * tl.load(shares + pair, mask=live, other=0.0)[:, None]
        target = pair.to(tl.int64)
    keep = live[:, None] & (n < num_columns)[None, :]
    tl.store(out + target[:, None] * num_columns + n[None, :], result.to(out.dtype.element_ty), mask=keep)


def expert_matmul(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    starts: Tensor,
    shares: Tensor,
    out: Tensor,
    config: ExpertMatmulConfig,
    *,
    activation: str | None = None,
) -> None:
    """Each (row, expert) pair through its expert's matrix; `order` and `starts` as `sort_by_expert` left them.

    With an `activation`: x [T, K] are the rows themselves, weight is [experts, 2 N, K], and out [T * k, N] =
    activation(gate) * up stands in the order of `order`. Without: x [T * k, K] stands in that order, weight is
    [experts, N, K], and out [T * k, N] stands by pair number, times the pair's share.
    """
    num_pairs, num_columns = out.shape
    num_experts = len(starts) - 1
    # Most tiles: whole ones, and of each expert that has pairs a last one that is not full.
    num_tiles = min(num_pairs, num_pairs // config.rows + num_experts)
    expert_matmul_kernel[(num_tiles, triton.cdiv(num_columns, config.columns))](
        x,
        weight,
        order,
        starts,
        shares,
        out,
        num_experts=num_experts,
        padded_experts=triton.next_power_of_2(num_experts),
        num_columns=num_columns,
        size=x.shape[1],
        k=shares.shape[1],
        rows=config.rows,
        columns=config.columns,
        depth=config.depth,
        stages=config.stages,
        activation="" if activation is None else activation_kind(activation),
        num_warps=config.warps,
    )


@triton.jit
def sum_experts_kernel(parts, out, size: tl.constexpr, k: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for j in range(k):
        total += tl.load(parts + (row * k + j) * size + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + d, total.to(out.dtype.element_ty), mask=d < size)


def sum_experts(parts: Tensor, out: Tensor) -> None:
    """out [T, H] = the sums of k successive rows of parts [T * k, H], always in the same order."""
    num_rows, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    sum_experts_kernel[(num_rows, triton.cdiv(size, block))](
        parts, out, size=size, k=len(parts) // num_rows, block=block
    )
