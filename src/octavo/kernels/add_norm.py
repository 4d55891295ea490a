"""The residual addition and the root-mean-square norm behind it, in one pass over the row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dependent_launch import await_predecessor, launch_options


@triton.jit
def add_norm_kernel(
    x,
    post_weight,
    hidden,
    weight,
    out,
    eps,
    hidden_size: tl.constexpr,
    block: tl.constexpr,
    add: tl.constexpr,
    post_norm: tl.constexpr,
    dependent: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, block)
    inside = d < hidden_size
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)  # not the predecessor's: before the wait
    if post_norm:
        post = tl.load(post_weight + d, mask=inside, other=0.0).to(tl.float32)
    await_predecessor(dependent)
    y = tl.load(hidden + row * hidden_size + d, mask=inside, other=0.0).to(tl.float32)
    if add:
        new = tl.load(x + row * hidden_size + d, mask=inside, other=0.0).to(tl.float32)
        if post_norm:
            new = new * tl.rsqrt(tl.sum(new * new, 0) / hidden_size + eps) * post
        y += new
        tl.store(hidden + row * hidden_size + d, y.to(hidden.dtype.element_ty), mask=inside)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / hidden_size + eps) * w
    tl.store(out + row * hidden_size + d, y.to(out.dtype.element_ty), mask=inside)


def norm_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` values."""
    return 4 if block <= 2048 else 8


def add_norm(
    x: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    post_weight: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """hidden += x; out = RMSNorm(hidden) * weight; all [T, H] but `weight` [H].

    With `post_weight` [H] it is RMSNorm(x) * post_weight that is added (the sandwich of Gemma); x None adds nothing.
    """
    size = hidden.shape[1]
    block = triton.next_power_of_2(size)
    add_norm_kernel[(len(hidden),)](
        hidden if x is None else x,
        weight if post_weight is None else post_weight,
        hidden,
        weight,
        out,
        eps,
        hidden_size=size,
        block=block,
        add=x is not None,
        post_norm=post_weight is not None,
        num_warps=norm_warps(block),
        **launch_options(dependent),
    )
