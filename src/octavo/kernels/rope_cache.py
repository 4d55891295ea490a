"""Between the QKV matmul and attention: bias, query and key norm, rotation, and the new K and V into the cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dependent_launch import await_predecessor, launch_options

FP8_MAX = tl.constexpr(448.0)  # of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What a layer does to the heads of a QKV row before attention.

    `cos` and `sin` are [positions, rotary_dim / 2] float32; the first rotary_dim values of a head turn, as two halves.
    The norms' weights are [head_dim]; both or none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    bias: Tensor | None = None  # [(num_heads + 2 num_kv_heads) * head_dim]
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class PagedCache:
    """K and V of one layer, each [num_blocks, kv_heads, block_size, head_dim], contiguous; block 0 is a dump.

    A block's tokens of one head are one contiguous run. In a float8_e4m3fn cache a stored value times its scale is
    the real one.
    """

    key: Tensor
    value: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def block_size(self) -> int:
        return self.key.shape[2]


@triton.jit
def to_cache(x, scale, dtype: tl.constexpr):
    """float32 in the cache's type: divided by the scale, and clamped where the type has no infinity."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX)
    return x.to(dtype)


@triton.jit
def transformed(
    base,
    bias,
    norm_weight,
    cos,
    sin,
    rows,
    live,
    position,
    eps,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    has_bias: tl.constexpr,
    qk_norm: tl.constexpr,
):
    """Heads base[rows, :head_dim] after bias, norm and rotation, float32 [rows, padded_dim].

    The partner of lane d in the rotation is loaded again (from L1) instead of being shuffled.
    """
    half: tl.constexpr = rotary_dim // 2
    d = tl.arange(0, padded_dim)
    partner = tl.where(d < rotary_dim, (d + half) % rotary_dim, d)
    inside = d < head_dim
    mask = live[:, None] & inside[None, :]
    x = tl.load(base + rows[:, None] * head_dim + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base + rows[:, None] * head_dim + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_bias:
        x += tl.load(bias + rows[:, None] * head_dim + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y += tl.load(bias + rows[:, None] * head_dim + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if qk_norm:
        r = tl.rsqrt(tl.sum(x * x, 1) / head_dim + eps)[:, None]
        x = x * r * tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = y * r * tl.load(norm_weight + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
    angle = position.to(tl.int64) * half + d % half
    c = tl.load(cos + angle, mask=d < rotary_dim, other=1.0)
    s = tl.load(sin + angle, mask=d < rotary_dim, other=0.0)
    return x * c[None, :] + y * tl.where(d < half, -s, s)[None, :]


@triton.jit
def store_key_value(
    qkv_row,
    bias,
    k_norm,
    cos,
    sin,
    key_cache,
    value_cache,
    block,
    offset,
    position,
    kv_head,
    key_scale,
    value_scale,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    block_size: tl.constexpr,
    has_bias: tl.constexpr,
    qk_norm: tl.constexpr,
):
    """Write the new token's K and V to their place and return both as they were rounded, [1, padded_dim]."""
    one = tl.arange(0, 1)
    d = tl.arange(0, padded_dim)[None, :]
    inside = d < head_dim
    key_at = (num_heads + kv_head) * head_dim
    value_at = (num_heads + num_kv_heads + kv_head) * head_dim
    dtype: tl.constexpr = key_cache.dtype.element_ty
    k = transformed(
        qkv_row + key_at, bias + key_at, k_norm, cos, sin, one, one == 0, position, eps, head_dim, padded_dim,
        rotary_dim, has_bias, qk_norm,
    )  # fmt: skip
    v = tl.load(qkv_row + value_at + one[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        v += tl.load(bias + value_at + one[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    k = to_cache(k, key_scale, dtype)
    v = to_cache(v, value_scale, dtype)
    place = ((block.to(tl.int64) * num_kv_heads + kv_head) * block_size + offset) * head_dim
    tl.store(key_cache + place + one[:, None] + d, k, mask=inside)
    tl.store(value_cache + place + one[:, None] + d, v, mask=inside)
    return k, v


@triton.jit
def rope_cache_kernel(
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    key_cache,
    value_cache,
    positions,
    cache_slots,
    key_scale,
    value_scale,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    padded_group: tl.constexpr,
    block_size: tl.constexpr,
    has_bias: tl.constexpr,
    qk_norm: tl.constexpr,
    in_place: tl.constexpr,
    dependent: tl.constexpr,
):
    await_predecessor(dependent)
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    cache_slot = tl.load(cache_slots + row)
    group: tl.constexpr = num_heads // num_kv_heads
    qkv_row = qkv + row * (num_heads + 2 * num_kv_heads) * head_dim
    g = tl.arange(0, padded_group)
    live = g < group
    first = kv_head * group * head_dim
    q = transformed(
        qkv_row + first, bias + first, q_norm, cos, sin, g, live, position, eps, head_dim, padded_dim, rotary_dim,
        has_bias, qk_norm,
    )  # fmt: skip
    k, v = store_key_value(
        qkv_row, bias, k_norm, cos, sin, key_cache, value_cache, cache_slot // block_size, cache_slot % block_size,
        position, kv_head, key_scale, value_scale, eps, num_heads, num_kv_heads, head_dim, padded_dim, rotary_dim,
        block_size, has_bias, qk_norm,
    )  # fmt: skip
    tl.debug_barrier()  # every thread's partner loads, before the stores
    d = tl.arange(0, padded_dim)
    to = qkv_row + first + g[:, None] * head_dim + d[None, :]
    tl.store(to, q.to(qkv.dtype.element_ty), mask=live[:, None] & (d < head_dim)[None, :])
    if in_place:
        key_at = qkv_row + (num_heads + kv_head) * head_dim
        tl.store(key_at + d[None, :], k.to(qkv.dtype.element_ty), mask=(d < head_dim)[None, :])
        if has_bias:
            tl.store(
                key_at + num_kv_heads * head_dim + d[None, :], v.to(qkv.dtype.element_ty), mask=(d < head_dim)[None, :]
            )


def transform_arguments(
    qkv: Tensor, heads: HeadTransform, cache: PagedCache
) -> tuple[list[Tensor], dict[str, int | bool]]:
    """The leading pointers and the compile-time sizes that kernels which transform heads share.

    An absent bias or norm is replaced by some pointer that is not read.
    """
    absent = qkv
    pointers = [
        qkv,
        absent if heads.bias is None else heads.bias,
        absent if heads.q_norm is None else heads.q_norm,
        absent if heads.k_norm is None else heads.k_norm,
        heads.cos,
        heads.sin,
        cache.key,
        cache.value,
    ]
    sizes: dict[str, int | bool] = {
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "padded_dim": triton.next_power_of_2(heads.head_dim),
        "rotary_dim": 2 * heads.cos.shape[1],
        "block_size": cache.block_size,
        "has_bias": heads.bias is not None,
        "qk_norm": heads.q_norm is not None,
    }
    return pointers, sizes


def rope_cache(
    qkv: Tensor,
    heads: HeadTransform,
    cache: PagedCache,
    positions: Tensor,
    cache_slots: Tensor,
    *,
    in_place: bool = False,
    dependent: bool = False,
) -> None:
    """Transform the query heads of `qkv` in place and write the rows' K and V to the cache.

    `qkv` [T, (heads + 2 kv_heads) * head_dim], contiguous; `positions` [T] int32 or int64, -1 for a padding row,
    which writes nothing; `cache_slots` [T]: block * block_size + offset. No two rows share a cache slot, but for those
    in block 0. The K and V parts of `qkv` are left as they were, or hold what went to the cache: `in_place`, for a
    cache of the type of `qkv`.
    """
    pointers, sizes = transform_arguments(qkv, heads, cache)
    rope_cache_kernel[(len(qkv), heads.num_kv_heads)](
        *pointers,
        positions,
        cache_slots,
        cache.key_scale,
        cache.value_scale,
        heads.eps,
        **sizes,
        padded_group=triton.next_power_of_2(heads.group),
        in_place=in_place,
        num_warps=2 if heads.group * heads.head_dim <= 512 else 4,
        **launch_options(dependent),
    )


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float8_e4m3fn
