"""One token a row: the largest logit, or a draw by Gumbel noise that depends on seed and position alone."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dependent_launch import await_predecessor, launch_options
from octavo.kernels.logit_rows import CHUNK, USES_CUT, USES_PENALTIES, SamplingRows, load_logits

# Why a row has no token (`Samples.faults`).
NOT_A_NUMBER = 1
INFINITE = 2
NOTHING_ALLOWED = 3

PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass the usual test suites (Salmon et al. 2011)
NO_TOKEN = tl.constexpr(2147483647)


class Samples:
    """What sampling R rows leaves behind."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        chunks = -(-vocab_size // CHUNK)
        self.tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.faults = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.best_values = torch.empty(num_rows, chunks, dtype=torch.float32, device=device)
        self.best_ids = torch.empty(num_rows, chunks, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a row's order of tokens, by falling logit and rising id, ends: at this logit and this id, both kept."""

    values: Tensor  # [R] float32
    ids: Tensor  # [R] int32


@triton.jit
def gumbel(bits):
    """-log(-log(1 - v)) for v uniform in (0, 1) from 32 random bits.

    Small v are the large results that let unlikely tokens win, so v is taken from the bits without first losing its low
    ones to 1 - v; below 1e-3 the inner logarithm is its series. Largest result: log(2^33) = 22.9.
    """
    v = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)  # rounding must not reach 1, whose result would be -inf
    e = tl.where(v < 1e-3, v * (1.0 + v * (0.5 + v * 0.3333333)), -tl.log(1.0 - v))
    return -tl.log(e)


@triton.jit
def kept(x, ids, cut_value, cut_id):
    """x where the token is not behind the cut, else -inf; NaN stays."""
    return tl.where((x < cut_value) | ((x == cut_value) & (ids > cut_id)), float("-inf"), x)


@triton.jit
def sample_kernel(
    logits,
    edited,
    cut_values,
    cut_ids,
    slots,
    length,
    features,
    temperature,
    seed,
    best_values,
    best_ids,
    vocab_size,
    chunks,
    quarter: tl.constexpr,
    has_edited: tl.constexpr,
    has_cut: tl.constexpr,
    dependent: tl.constexpr,
):
    """The best of one chunk of 4 * quarter logits: one call of Philox serves four of them."""
    await_predecessor(dependent)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    flags = tl.load(features + slot)
    t = tl.load(temperature + slot)
    i = tl.arange(0, quarter)
    base = chunk * 4 * quarter
    a = load_logits(logits, edited, flags, row, base + i, base + i < vocab_size, vocab_size, has_edited)
    i1 = i + quarter
    b = load_logits(logits, edited, flags, row, base + i1, base + i1 < vocab_size, vocab_size, has_edited)
    i2 = i + 2 * quarter
    c = load_logits(logits, edited, flags, row, base + i2, base + i2 < vocab_size, vocab_size, has_edited)
    i3 = i + 3 * quarter
    e = load_logits(logits, edited, flags, row, base + i3, base + i3 < vocab_size, vocab_size, has_edited)
    bad = tl.max(((a != a) | (b != b) | (c != c) | (e != e)).to(tl.int32), 0)
    peak = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, e)), 0)
    if has_cut:  # noqa: SIM102 - known when compiled, the other when run
        if flags & USES_CUT:
            cut_value, cut_id = tl.load(cut_values + row), tl.load(cut_ids + row)
            a = kept(a, base + i, cut_value, cut_id)
            b = kept(b, base + i1, cut_value, cut_id)
            c = kept(c, base + i2, cut_value, cut_id)
            e = kept(e, base + i3, cut_value, cut_id)
    if t > 0:
        zero = i * 0
        counter = chunk * quarter + i
        r0, r1, r2, r3 = tl.philox(
            tl.load(seed + slot), counter, zero + tl.load(length + slot), zero, zero, n_rounds=PHILOX_ROUNDS
        )
        a = a / t + gumbel(r0)
        b = b / t + gumbel(r1)
        c = c / t + gumbel(r2)
        e = e / t + gumbel(r3)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, e))
    index = tl.where(a == top, i, tl.where(b == top, i1, tl.where(c == top, i2, i3)))
    best = tl.max(top, 0)
    best_id = base + tl.min(tl.where(top == best, index, 4 * quarter), 0)
    value = tl.where(bad != 0, float("nan"), tl.where(peak == float("inf"), float("inf"), best))
    tl.store(best_values + row * chunks + chunk, value)
    tl.store(best_ids + row * chunks + chunk, best_id)


@triton.jit
def advance_kernel(
    best_values,
    best_ids,
    slots,
    length,
    features,
    counts,
    tokens,
    sampled,
    faults,
    token_stride,
    capacity,
    vocab_size,
    chunks,
    padded_chunks: tl.constexpr,
    dependent: tl.constexpr,
):
    await_predecessor(dependent)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    c = tl.arange(0, padded_chunks)
    value = tl.load(best_values + row * chunks + c, mask=c < chunks, other=float("-inf"))
    index = tl.load(best_ids + row * chunks + c, mask=c < chunks, other=NO_TOKEN)
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, index, NO_TOKEN), 0)
    bad = tl.max((value != value).to(tl.int32), 0)
    fault = tl.where(best == float("-inf"), 3, 0)
    fault = tl.where(best == float("inf"), 2, fault)
    fault = tl.where(bad != 0, 1, fault)
    token = tl.where(fault != 0, 0, token)
    tl.store(sampled + row, token)
    tl.store(faults + row, fault)
    n = tl.load(length + slot)
    if n < capacity:
        tl.store(tokens + slot.to(tl.int64) * token_stride + n, token)
        tl.store(length + slot, n + 1)
        if tl.load(features + slot) & USES_PENALTIES:
            count = counts + slot.to(tl.int64) * vocab_size + token
            tl.store(count, tl.load(count) + 2)


def sample(
    logits: Tensor,
    slots: Tensor,
    rows: SamplingRows,
    samples: Samples,
    *,
    edited: Tensor | None = None,
    cut: Cut | None = None,
    dependent: bool = False,
) -> None:
    """The best token of every chunk of every row, for `advance` to choose from.

    `logits` [R, V] of any float type, `slots` [R] int32, -1 for padding. `edited` (see `edit_logits`) and `cut` (see
    `cut_tail`) may be missing when no slot has a feature that needs them. At temperature 0 the largest logit is
    chosen, the lowest id where several are equal; otherwise argmax(logit / temperature + Gumbel noise), whose
    distribution is softmax(logits / temperature). The noise is a function of (seed, length, token id): a row samples
    the same whatever else is in the batch.
    """
    vocab_size = logits.shape[1]
    chunks = triton.cdiv(vocab_size, CHUNK)
    sample_kernel[(len(slots), chunks)](
        logits,
        logits if edited is None else edited,
        logits if cut is None else cut.values,
        logits if cut is None else cut.ids,
        slots,
        rows.length,
        rows.features,
        rows.temperature,
        rows.seed,
        samples.best_values,
        samples.best_ids,
        vocab_size,
        chunks,
        quarter=CHUNK // 4,
        has_edited=edited is not None,
        has_cut=cut is not None,
        num_warps=4,
        **launch_options(dependent),
    )


def advance(
    samples: Samples, slots: Tensor, rows: SamplingRows, tokens: Tensor, capacity: int, *, dependent: bool = False
) -> None:
    """Choose each row's token, write it behind the slot's tokens and count it: what lets the next step start.

    `tokens` [slots, capacity or more] int32; a slot that holds `capacity` tokens is left as it is. samples.tokens [R]
    gets the tokens and samples.faults [R] 0 or why there is none: NOT_A_NUMBER or INFINITE logits, NOTHING_ALLOWED;
    the token is 0 then. Rows of padding are not written.
    """
    chunks = samples.best_values.shape[1]
    advance_kernel[(len(slots),)](
        samples.best_values,
        samples.best_ids,
        slots,
        rows.length,
        rows.features,
        rows.counts,
        tokens,
        samples.tokens,
        samples.faults,
        tokens.stride(0),
        capacity,
        rows.counts.shape[1],
        chunks,
        padded_chunks=triton.next_power_of_2(chunks),
        num_warps=1,
        **launch_options(dependent),
    )
