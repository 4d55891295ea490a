"""Logprobs of a token and of the most likely ones at its position, and the token's rank."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidConfig
from octavo.kernels.dependent_launch import await_predecessor, launch_options
from octavo.kernels.logit_rows import CHUNK, ordered, unordered

MAX_LOGPROBS = 20
KEPT = 32  # the power of two that holds MAX_LOGPROBS


class LogprobsWorkspace:
    """Partial results of at most R rows, one a chunk of the vocabulary, and the result.

    Of row r: `values` [R, 1 + 20] float32 and `ids` [R, 1 + 20] int32 hold the token itself, then the most likely ones,
    best first, equal ones by id; `ranks` [R] int32 is 1 + the number of larger logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        chunks = -(-vocab_size // CHUNK)
        self.partial_peaks = torch.empty(num_rows, chunks, device=device)
        self.partial_sums = torch.empty(num_rows, chunks, device=device)
        self.partial_ranks = torch.empty(num_rows, chunks, dtype=torch.int32, device=device)
        self.partial_best = torch.empty(num_rows, chunks, KEPT, dtype=torch.int64, device=device)
        self.values = torch.empty(num_rows, 1 + MAX_LOGPROBS, device=device)
        self.ids = torch.empty(num_rows, 1 + MAX_LOGPROBS, dtype=torch.int32, device=device)
        self.ranks = torch.empty(num_rows, dtype=torch.int32, device=device)


@triton.jit
def partial_logprobs_kernel(
    logits, slots, num_logprobs, targets, partial_peaks, partial_sums, partial_ranks, partial_best, vocab_size, chunks,
    chunk_size: tl.constexpr, width: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    await_predecessor(dependent)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    asked = tl.load(num_logprobs + slot)
    if asked < 0:
        return
    source = logits + row.to(tl.int64) * vocab_size
    ids = chunk * chunk_size + tl.arange(0, chunk_size)
    x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    chosen = tl.load(source + tl.load(targets + row)).to(tl.float32)
    best = tl.max(x, 0)
    at = row * chunks + chunk
    tl.store(partial_peaks + at, best)
    tl.store(partial_sums + at, tl.sum(tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), 0))
    tl.store(partial_ranks + at, tl.sum((x > chosen).to(tl.int32), 0))
    if asked > 0:
        keys = (ordered(x).to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64)
        tl.store(partial_best + at * width + tl.arange(0, width), tl.topk(keys, width))


@triton.jit
def merge_logprobs_kernel(
    logits, slots, num_logprobs, targets, partial_peaks, partial_sums, partial_ranks, partial_best, values, ids, ranks,
    vocab_size, chunks, padded_chunks: tl.constexpr, width: tl.constexpr, max_logprobs: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    await_predecessor(dependent)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    asked = tl.load(num_logprobs + slot)
    if asked < 0:
        return
    target = tl.load(targets + row)
    chosen = tl.load(logits + row.to(tl.int64) * vocab_size + target).to(tl.float32)
    c = tl.arange(0, padded_chunks)
    peaks = tl.load(partial_peaks + row * chunks + c, mask=c < chunks, other=float("-inf"))
    sums = tl.load(partial_sums + row * chunks + c, mask=c < chunks, other=0.0)
    larger = tl.load(partial_ranks + row * chunks + c, mask=c < chunks, other=0)
    peak = tl.max(peaks, 0)
    log_total = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
    to = row * (1 + max_logprobs)
    tl.store(values + to, chosen - log_total)
    tl.store(ids + to, target)
    tl.store(ranks + row, tl.sum(larger, 0) + 1)
    if asked > 0:
        i = tl.arange(0, padded_chunks * width)
        none = tl.full([padded_chunks * width], -9223372036854775808, tl.int64)
        keys = tl.load(partial_best + row * chunks * width + i, mask=i < chunks * width, other=none)
        best = tl.topk(keys, width)
        j = tl.arange(0, width)
        mask = (j < asked) & (j < max_logprobs)
        tl.store(values + to + 1 + j, unordered((best >> 32).to(tl.int32)) - log_total, mask=mask)
        tl.store(ids + to + 1 + j, 2147483647 - (best & 0x7FFFFFFF).to(tl.int32), mask=mask)


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    slots: Tensor,
    num_logprobs: Tensor,
    workspace: LogprobsWorkspace,
    *,
    dependent: bool = False,
) -> None:
    """Fill the workspace's result for `targets` [R] int32, given the logits [R, V] (any float type) before them.

    num_logprobs[slots[r]] says how many of the most likely tokens row r asks for, at most 20 and no more than V: -1
    means not even the token's own; -1 in `slots` is padding. For prompt positions let `slots` be 0..R-1. Values are
    logit - logsumexp(row) in float32.

    Raises:
        InvalidConfig: a vocabulary too large for one program to merge.
    """
    num_rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    if chunks > 128:
        raise InvalidConfig(f"Logprobs are for vocabularies up to {128 * CHUNK}, not {vocab_size}.")
    partial_logprobs_kernel[(num_rows, chunks)](
        logits,
        slots,
        num_logprobs,
        targets,
        workspace.partial_peaks,
        workspace.partial_sums,
        workspace.partial_ranks,
        workspace.partial_best,
        vocab_size,
        chunks,
        chunk_size=CHUNK,
        width=KEPT,
        num_warps=8,
        **launch_options(dependent),
    )
    merge_logprobs_kernel[(num_rows,)](
        logits,
        slots,
        num_logprobs,
        targets,
        workspace.partial_peaks,
        workspace.partial_sums,
        workspace.partial_ranks,
        workspace.partial_best,
        workspace.values,
        workspace.ids,
        workspace.ranks,
        vocab_size,
        chunks,
        padded_chunks=triton.next_power_of_2(chunks),
        width=KEPT,
        max_logprobs=MAX_LOGPROBS,
        num_warps=8,
        **launch_options(dependent),
    )
