"""Token embeddings, with the first layer's norm."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.add_norm import norm_warps
from octavo.kernels.dependent_launch import await_predecessor, launch_options


@triton.jit
def embed_kernel(
    token_ids,
    table,
    norm_weight,
    hidden,
    normed,
    squares,
    scale,
    eps,
    hidden_size: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    padded_parts: tl.constexpr,
    squares_stride: tl.constexpr,
    dependent: tl.constexpr,
):
    await_predecessor(dependent)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, block)
    inside = d < hidden_size
    token = tl.load(token_ids + row).to(tl.int64)
    # Rounded as the embedding layer rounds it, so that norm and residual see one value.
    x = tl.load(table + token * hidden_size + d, mask=inside, other=0.0).to(tl.float32) * scale
    x = x.to(hidden.dtype.element_ty)
    tl.store(hidden + row * hidden_size + d, x, mask=inside)
    y = x.to(tl.float32)
    total = tl.sum(y * y, 0)
    if parts:
        part = tl.arange(0, padded_parts)
        tl.store(squares + part * squares_stride + row, tl.where(part == 0, total, 0.0), mask=part < parts)
    else:
        y *= tl.rsqrt(total / hidden_size + eps)
    y *= tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * hidden_size + d, y.to(normed.dtype.element_ty), mask=inside)


def embed(
    token_ids: Tensor,
    table: Tensor,
    norm_weight: Tensor,
    hidden: Tensor,
    normed: Tensor,
    eps: float,
    *,
    scale: float = 1.0,
    squares: Tensor | None = None,
    parts: int = 0,
    dependent: bool = False,
) -> None:
    """hidden = table[token_ids] * scale; normed = RMSNorm(hidden) * norm_weight.

    `token_ids` [T] int32 or int64, `table` [vocabulary, H], `norm_weight` [H], `hidden` and `normed` [T, H].
    With `squares` [parts or more, rows] float32 the norm is deferred (see `skinny_matmul`): normed is not yet divided
    by the root mean square, and the sum of squares goes to squares[0, row], zero to the other parts.
    """
    size = hidden.shape[1]
    block = triton.next_power_of_2(size)
    embed_kernel[(len(token_ids),)](
        token_ids,
        table,
        norm_weight,
        hidden,
        normed,
        hidden if squares is None else squares,
        scale,
        eps,
        hidden_size=size,
        block=block,
        parts=parts if squares is not None else 0,
        padded_parts=triton.next_power_of_2(max(parts, 1)),
        squares_stride=0 if squares is None else squares.stride(0),
        num_warps=norm_warps(block),
        **launch_options(dependent),
    )
