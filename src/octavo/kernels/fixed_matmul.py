"""A matrix product in which a row's result is the same, bit for bit, whatever rows stand beside it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 32  # of a program: one size for every shape, so that one kind of instruction computes all


@triton.jit(do_not_specialize=["num_rows"])
def fixed_matmul_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    has_bias: tl.constexpr,
):
    """K is added up from its beginning to its end by one program, `depth` at a time."""
    m = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    d = tl.arange(0, depth)
    strip = weight + n.to(tl.int64)[:, None] * size
    acc = tl.zeros([rows, columns], tl.float32)
    for k0 in tl.range(0, size, depth, num_stages=stages):
        inside = (k0 + d < size)[None, :]
        a = tl.load(x + m[:, None] * size + k0 + d[None, :], mask=(m < num_rows)[:, None] & inside, other=0.0)
        b = tl.load(strip + k0 + d[None, :], mask=(n < num_columns)[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if has_bias:
        acc += tl.load(bias + n, mask=n < num_columns, other=0.0).to(tl.float32)[None, :]
    keep = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    tl.store(out + m[:, None] * num_columns + n[None, :], acc.to(out.dtype.element_ty), mask=keep)


def fixed_matmul(x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T + bias [N], all contiguous and of one type."""
    num_rows, size = x.shape
    num_columns = len(weight)
    fixed_matmul_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))](
        x,
        weight,
        out if bias is None else bias,
        out,
        num_rows,
        num_columns=num_columns,
        size=size,
        rows=ROWS,
        columns=COLUMNS,
        depth=32 if x.element_size() == 4 else 128,
        stages=1 if x.element_size() == 4 else 4,
        has_bias=bias is not None,
        num_warps=4,
    )
