"""Matrix product for few rows, with what surrounds it: the norm before, activation or residual behind."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.errors import InvalidConfig
from octavo.kernels.activation import activated, activation_kind
from octavo.kernels.dependent_launch import await_predecessor, launch_options

MAX_ROWS = 64
PREFETCHING_PROGRAMS = tl.constexpr(264)  # two on each of 132 multiprocessors: later ones have nothing to hide behind


@dataclass(frozen=True, slots=True)
class SkinnyMatmulConfig:
    """Measured choices: `columns` of the output a program, `depth` of K a warp and turn, `warps` that share K.

    `prefetch` bytes of every weight row are pulled into L2 ahead of the wait for the predecessor (dependent launch
    only; -1: whole rows). `bulk_copies`: weights come through a tensor descriptor.
    """

    columns: int = 16
    depth: int = 128
    warps: int = 4
    stages: int = 4
    bulk_copies: bool = False
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """A norm of which only weight and sum of squares have been applied to x so far.

    `squares` [parts or more, MAX_ROWS] float32: partial sums of squares of each row, one a program that wrote x.
    """

    squares: Tensor
    parts: int
    eps: float


@dataclass(frozen=True, slots=True)
class Residual:
    """The stream a product is added to (`out` itself), and the norm that follows, deferred.

    scaled [M, N] = out * norm_weight [N]; the sums of squares go to `squares`, one part a program.
    """

    norm_weight: Tensor
    scaled: Tensor
    squares: Tensor


@triton.jit
def prefetch_rows(rows, stride: tl.constexpr, num_bytes: tl.constexpr, num_rows: tl.constexpr, threads: tl.constexpr):
    """Ask the copy engine to bring the first bytes of each row into L2; a thread's share is a multiple of 16 bytes."""
    i = tl.arange(0, threads)
    share: tl.constexpr = num_bytes * num_rows // threads
    a_row: tl.constexpr = threads // num_rows
    address = rows.to(tl.int64) + (i // a_row).to(tl.int64) * stride + i % a_row * share
    size = tl.full([threads], share, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [address, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def skinny_matmul_kernel(
    x,
    weight,
    weight_tiles,
    out,
    squares_in,
    squares_out,
    norm_weight,
    scaled,
    num_rows,
    num_columns,
    eps,
    size: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    groups: tl.constexpr,
    padded_rows: tl.constexpr,
    stages: tl.constexpr,
    norm: tl.constexpr,
    parts: tl.constexpr,
    padded_parts: tl.constexpr,
    squares_stride: tl.constexpr,
    activation: tl.constexpr,
    residual: tl.constexpr,
    bulk_copies: tl.constexpr,
    prefetch: tl.constexpr,
    threads: tl.constexpr,
    early: tl.constexpr,
    dependent: tl.constexpr,
):
    """A strip of `columns` outputs over the whole of K a program.

    The weights are the left operand, and K is cut into `groups`, one a warp, as a batch dimension of the dot: 16
    outputs keep all warps busy without partial sums leaving the program, so what follows can be fused. The norm costs
    nothing in the loop: the result is divided by the root mean square of x behind it.
    """
    gated: tl.constexpr = activation != ""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    n0 = tl.program_id(0) * columns
    strip = weight + n0.to(tl.int64) * size
    up_strip = strip + num_columns.to(tl.int64) * size
    if prefetch and tl.program_id(0) < PREFETCHING_PROGRAMS:
        row_bytes: tl.constexpr = size * weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(strip, row_bytes, prefetch, columns, threads)
        if gated:
            prefetch_rows(up_strip, row_bytes, prefetch, columns, threads)
    g = tl.arange(0, groups)[:, None, None]
    k_row = g * depth + tl.arange(0, depth)[None, None, :]
    k_column = g * depth + tl.arange(0, depth)[None, :, None]
    n = tl.arange(0, columns)[None, :, None]
    m3 = tl.arange(0, padded_rows)[None, None, :]
    m = tl.arange(0, padded_rows)[None, :]
    whole: tl.constexpr = size % (groups * depth) == 0
    await_predecessor(dependent)
    if norm:  # loaded here, needed behind the loop
        part = tl.arange(0, padded_parts)[:, None]
        sums = tl.load(squares_in + part * squares_stride + m, mask=(part < parts) & (m < num_rows), other=0.0)
    acc = tl.zeros([groups, columns, padded_rows], tl.float32)
    acc_up = tl.zeros([groups, columns, padded_rows], tl.float32)
    for k0 in tl.range(0, size, groups * depth, num_stages=stages):
        if bulk_copies:
            a = weight_tiles.load([k0 // depth, n0, 0])
        elif whole:
            a = tl.load(strip + n * size + k0 + k_row)
        else:
            a = tl.load(strip + n * size + k0 + k_row, mask=k0 + k_row < size, other=0.0)
        if whole:
            b = tl.load(x + m3 * size + k0 + k_column, mask=m3 < num_rows, other=0.0)
        else:
            b = tl.load(x + m3 * size + k0 + k_column, mask=(m3 < num_rows) & (k0 + k_column < size), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if gated:
            if bulk_copies:
                a_up = weight_tiles.load([k0 // depth, num_columns + n0, 0])
            elif whole:
                a_up = tl.load(up_strip + n * size + k0 + k_row)
            else:
                a_up = tl.load(up_strip + n * size + k0 + k_row, mask=k0 + k_row < size, other=0.0)
            acc_up = tl.dot(a_up, b, acc_up, input_precision="ieee")
    result = tl.sum(acc, 0)
    if norm:
        rms = tl.rsqrt(tl.sum(sums, 0) / size + eps)[None, :]
        result *= rms
    if gated:
        up = tl.sum(acc_up, 0)
        if norm:
            up *= rms
        result = activated(result, activation) * up
    column = n0 + tl.arange(0, columns)[:, None]
    at = m * num_columns + column
    keep = m < num_rows
    if residual:
        result += tl.load(out + at, mask=keep, other=0.0).to(tl.float32)
        result = result.to(out.dtype.element_ty).to(tl.float32)
        lane = tl.arange(0, padded_rows)
        mine = squares_out + tl.program_id(0) * squares_stride + lane
        tl.store(mine, tl.sum(result * result, 0), mask=lane < num_rows)
        w = tl.load(norm_weight + column).to(tl.float32)
        tl.store(scaled + at, (result * w).to(out.dtype.element_ty), mask=keep)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=keep)


def num_parts(num_columns: int, config: SkinnyMatmulConfig) -> int:
    """Partial sums of squares a row that a product with a `Residual` leaves: one a program."""
    return -(-num_columns // config.columns)


def skinny_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: SkinnyMatmulConfig,
    *,
    norm: DeferredNorm | None = None,
    activation: str | None = None,
    residual: Residual | None = None,
    early: bool = False,
    dependent: bool = False,
) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T for M <= 64, all contiguous and of one type.

    `norm`: x is weighted but not normalised yet; the result is divided by the root mean square. `activation` (a name of
    `activation.ACTIVATIONS`): weight is [2 N, K] and out = activation(gate) * up. `residual`: the product is added to
    `out` instead, and the norm that follows is prepared. N must be a multiple of config.columns.

    `early` lets the successor start ahead of this kernel's own wait: allowed only where what the successor reads ahead
    of its wait are weights, so not for the QKV product, whose successor reads the plan and the cache.

    Raises:
        InvalidConfig: more rows than the kernel takes, or sizes that the configuration does not divide.
    """
    num_rows, size = x.shape
    num_columns = out.shape[1]
    if num_rows > MAX_ROWS:
        raise InvalidConfig(f"A skinny matmul takes at most {MAX_ROWS} rows, not {num_rows}.")
    if num_columns % config.columns:
        raise InvalidConfig(f"{num_columns} output columns are not a multiple of {config.columns}.")
    tiles = weight
    if config.bulk_copies:
        if size % (config.depth * config.warps):
            raise InvalidConfig(f"K={size} is not a multiple of {config.depth * config.warps}, as bulk copies need.")
        shape = [size // config.depth, weight.shape[0], config.depth]
        tiles = TensorDescriptor(
            weight, shape, [config.depth, size, 1], [config.warps, config.columns, config.depth]
        )  # fmt: skip
    row_bytes = size * weight.element_size()
    prefetch = row_bytes if config.prefetch < 0 else min(config.prefetch, row_bytes)
    if not dependent or prefetch * config.columns % (512 * config.warps):
        prefetch = 0  # a thread's share must be a multiple of 16 bytes
    skinny_matmul_kernel[(triton.cdiv(num_columns, config.columns),)](
        x,
        weight,
        tiles,
        out,
        out if norm is None else norm.squares,
        out if residual is None else residual.squares,
        out if residual is None else residual.norm_weight,
        out if residual is None else residual.scaled,
        num_rows,
        num_columns,
        0.0 if norm is None else norm.eps,
        size=size,
        columns=config.columns,
        depth=config.depth,
        groups=config.warps,
        padded_rows=max(8, triton.next_power_of_2(num_rows)),
        stages=config.stages,
        norm=norm is not None,
        parts=0 if norm is None else norm.parts,
        padded_parts=1 if norm is None else triton.next_power_of_2(norm.parts),
        squares_stride=MAX_ROWS,
        activation="" if activation is None else activation_kind(activation),
        residual=residual is not None,
        bulk_copies=config.bulk_copies,
        prefetch=prefetch,
        threads=32 * config.warps,
        early=early and dependent,
        num_warps=config.warps,
        **launch_options(dependent),
    )
