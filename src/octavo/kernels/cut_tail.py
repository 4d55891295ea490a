"""Where top-k, top-p and min-p cut a row's tokens, found without sorting the vocabulary."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dependent_launch import await_predecessor, launch_options
from octavo.kernels.logit_rows import CHUNK, USES_CUT, SamplingRows, load_logits, ordered, unordered
from octavo.kernels.sample import Cut

GROUP = 64  # tokens that are represented by their largest logit
MAX_CANDIDATES = 4096
TARGET = tl.constexpr(1024)  # groups of which the candidates are the top
LARGEST_ID = tl.constexpr(2147483647)
BOTTOM = tl.constexpr(-2139095041)  # the key of -inf
# Probabilities relative to the most likely token are counted in units of 2^-40, as integers: their sums are exact, so
# they depend neither on order nor on how the row was split over programs. 2^18 tokens of weight 1 do not overflow.
UNIT = tl.constexpr(1099511627776.0)


class CutWorkspace:
    """What finding the cuts of at most R rows needs between its kernels, and the result."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.peaks = torch.empty(num_rows, -(-vocab_size // GROUP), device=device)
        self.peak = torch.empty(num_rows, device=device)
        self.lowest = torch.empty(num_rows, device=device)  # what min-p leaves is at or above it
        self.threshold = torch.empty(num_rows, dtype=torch.int32, device=device)  # key at or above which are candidates
        self.totals = torch.empty(num_rows, dtype=torch.int64, device=device)  # weight of what min-p leaves
        self.tallies = torch.empty(num_rows, 2, dtype=torch.int32, device=device)  # tokens it leaves; candidates
        self.candidate_values = torch.empty(num_rows, MAX_CANDIDATES, device=device)
        self.candidate_ids = torch.empty(num_rows, MAX_CANDIDATES, dtype=torch.int32, device=device)
        self.cut = Cut(torch.empty(num_rows, device=device), torch.empty(num_rows, dtype=torch.int32, device=device))


@triton.jit
def weights(x, peak, temperature):
    """exp((x - peak) / temperature) in units of 2^-40, int64; 0 for -inf."""
    return (tl.exp((x - peak) / temperature) * UNIT).to(tl.int64)


@triton.jit
def group_peaks_kernel(
    logits, edited, slots, features, peaks, vocab_size, num_groups, chunk_size: tl.constexpr, group: tl.constexpr,
    has_edited: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    await_predecessor(dependent)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    flags = tl.load(features + slot)
    if (flags & USES_CUT) == 0:
        return
    ids = chunk * chunk_size + tl.arange(0, chunk_size)
    x = load_logits(logits, edited, flags, row, ids, ids < vocab_size, vocab_size, has_edited)
    best = tl.max(tl.reshape(x, [chunk_size // group, group]), 1)
    g = chunk * (chunk_size // group) + tl.arange(0, chunk_size // group)
    tl.store(peaks + row * num_groups + g, best, mask=g < num_groups)


@triton.jit
def threshold_kernel(
    slots, features, temperature, top_k, min_p, peaks, peak, lowest, threshold, totals, tallies, num_groups, vocab_size,
    padded_groups: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """The key at or above which tokens are candidates: about that of the TARGET-th largest group, or of fewer for a
    small k, so that the candidates are the best tokens of the row, enough of them and not too many.
    """
    await_predecessor(dependent)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if (tl.load(features + slot) & USES_CUT) == 0:
        return
    g = tl.arange(0, padded_groups)
    x = tl.load(peaks + row * num_groups + g, mask=g < num_groups, other=float("-inf"))
    best = tl.max(x, 0)
    keys = ordered(x)
    k = tl.load(top_k + slot)
    target = tl.where(k > 0, tl.minimum(tl.maximum(2 * k, 64), TARGET), TARGET)
    low = tl.full([], BOTTOM, tl.int64)
    high = ordered(best).to(tl.int64) + 1
    if num_groups <= target:
        high = low
    while high - low > 1:  # at or above `high` at most, at or above `low` more than `target` groups
        middle = (low + high) >> 1
        if tl.sum((keys >= middle).to(tl.int32), 0) > target:
            low = middle
        else:
            high = middle
    least = tl.load(min_p + slot)
    floor = tl.where(least > 0, best + tl.load(temperature + slot) * tl.log(least), float("-inf"))
    tl.store(threshold + row, high.to(tl.int32))
    tl.store(peak + row, best)
    tl.store(lowest + row, floor)
    tl.store(totals + row, tl.zeros([], tl.int64))
    tl.store(tallies + row * 2, 0)
    tl.store(tallies + row * 2 + 1, 0)


@triton.jit
def candidates_kernel(
    logits, edited, slots, features, temperature, peak, lowest, threshold, totals, tallies, candidate_values,
    candidate_ids, vocab_size, chunk_size: tl.constexpr, max_candidates: tl.constexpr, has_edited: tl.constexpr,
    dependent: tl.constexpr,
):  # fmt: skip
    """Collect the candidates, in any order, and what the whole row weighs."""
    await_predecessor(dependent)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    flags = tl.load(features + slot)
    if (flags & USES_CUT) == 0:
        return
    ids = chunk * chunk_size + tl.arange(0, chunk_size)
    x = load_logits(logits, edited, flags, row, ids, ids < vocab_size, vocab_size, has_edited)
    valid = (x > float("-inf")) & (x >= tl.load(lowest + row))
    weight = tl.where(valid, weights(x, tl.load(peak + row), tl.load(temperature + slot)), 0)
    tl.atomic_add(totals + row, tl.sum(weight, 0), sem="relaxed")
    tl.atomic_add(tallies + row * 2, tl.sum(valid.to(tl.int32), 0), sem="relaxed")
    chosen = valid & (ordered(x) >= tl.load(threshold + row))
    count = tl.sum(chosen.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(tallies + row * 2 + 1, count, sem="relaxed")
        place += tl.cumsum(chosen.to(tl.int32), 0) - 1
        fits = chosen & (place < max_candidates)
        tl.store(candidate_values + row * max_candidates + place, x, mask=fits)
        tl.store(candidate_ids + row * max_candidates + place, ids, mask=fits)


@triton.jit
def load_block(
    logits, edited, candidate_values, candidate_ids, flags, row, first, size, few, vocab_size, block: tl.constexpr,
    max_candidates: tl.constexpr, has_edited: tl.constexpr,
):  # fmt: skip
    """`block` tokens from place `first` on, of the candidates (`few`) or of the whole row: logits and ids."""
    i = first + tl.arange(0, block)
    if few:
        x = tl.load(candidate_values + row * max_candidates + i, mask=i < size, other=float("-inf"))
        ids = tl.load(candidate_ids + row * max_candidates + i, mask=i < size, other=LARGEST_ID)
    else:
        x = load_logits(logits, edited, flags, row, i, i < size, vocab_size, has_edited)
        ids = i
    return x, ids


@triton.jit
def tally(
    key, logits, edited, candidate_values, candidate_ids, flags, row, size, few, vocab_size, peak, lowest, temperature,
    block: tl.constexpr, max_candidates: tl.constexpr, has_edited: tl.constexpr,
):  # fmt: skip
    """How many tokens have a key at or above `key`, and their weight; int64 both."""
    count = tl.zeros([], tl.int64)
    weight = tl.zeros([], tl.int64)
    for first in range(0, size, block):
        x, _ = load_block(
            logits, edited, candidate_values, candidate_ids, flags, row, first, size, few, vocab_size, block,
            max_candidates, has_edited,
        )  # fmt: skip
        chosen = (x > float("-inf")) & (x >= lowest) & (ordered(x) >= key)
        count += tl.sum(chosen.to(tl.int64), 0)
        weight += tl.sum(tl.where(chosen, weights(x, peak, temperature), 0), 0)
    return count, weight


@triton.jit
def search(
    by_weight: tl.constexpr, needed, low, high, logits, edited, candidate_values, candidate_ids, flags, row, size, few,
    vocab_size, peak, lowest, temperature, block: tl.constexpr, max_candidates: tl.constexpr, has_edited: tl.constexpr,
):  # fmt: skip
    """The largest key at or above which the tokens number (or weigh) at least `needed`, in [low, high)."""
    while high - low > 1:
        middle = (low + high) >> 1
        count, weight = tally(
            middle, logits, edited, candidate_values, candidate_ids, flags, row, size, few, vocab_size, peak, lowest,
            temperature, block, max_candidates, has_edited,
        )  # fmt: skip
        reached = weight >= needed if by_weight else count >= needed
        if reached:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def cut_kernel(
    logits, edited, slots, features, temperature, top_k, top_p, peak, lowest, threshold, totals, tallies,
    candidate_values, candidate_ids, cut_values, cut_ids, vocab_size, block: tl.constexpr, max_candidates: tl.constexpr,
    has_edited: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    """Bisection over the bits of the logits, first for top-k, then for top-p in what that leaves.

    It goes over the candidates, or over the row where the cut lies below them.
    """
    await_predecessor(dependent)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    flags = tl.load(features + slot)
    if (flags & USES_CUT) == 0:
        return
    t = tl.load(temperature + slot)
    best = tl.load(peak + row)
    floor = tl.load(lowest + row)
    num_valid = tl.load(tallies + row * 2).to(tl.int64)
    num_candidates = tl.load(tallies + row * 2 + 1)
    complete = num_candidates <= max_candidates
    total = tl.load(totals + row)
    k = tl.load(top_k + slot).to(tl.int64)
    p = tl.load(top_p + slot)
    first_key = tl.load(threshold + row).to(tl.int64)
    bottom = tl.full([], BOTTOM, tl.int64)
    end = ordered(best).to(tl.int64) + 1
    found = bottom
    keep = num_valid  # how many of the tokens at key `found` stay
    limited = (k > 0) & (k < num_valid)
    few = complete & (k <= num_candidates)
    size = tl.where(few, num_candidates, vocab_size)
    if limited:
        low = tl.where(few, first_key, bottom)
        high = tl.where(few | (complete == 0), end, first_key)
        found = search(
            False, k, low, high, logits, edited, candidate_values, candidate_ids, flags, row, size, few,
            vocab_size, best, floor, t, block, max_candidates, has_edited,
        )  # fmt: skip
        above, weight_above = tally(
            found + 1, logits, edited, candidate_values, candidate_ids, flags, row, size, few, vocab_size, best, floor,
            t, block, max_candidates, has_edited,
        )  # fmt: skip
        keep = k - above
        one = weights(unordered(found.to(tl.int32)), best, t)
        total = weight_above + keep * one
    if p < 1.0:
        needed = tl.maximum(tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)
        candidates_weight = tl.zeros([], tl.int64)
        if complete:
            _, candidates_weight = tally(
                bottom, logits, edited, candidate_values, candidate_ids, flags, row, num_candidates, complete,
                vocab_size, best, floor, t, block, max_candidates, has_edited,
            )  # fmt: skip
        few = complete & (candidates_weight >= needed)
        size = tl.where(few, num_candidates, vocab_size)
        low = tl.where(limited, found, tl.where(few, first_key, bottom))
        high = tl.where(few | (complete == 0), end, first_key)
        found_p = search(
            True, needed, low, high, logits, edited, candidate_values, candidate_ids, flags, row, size,
            few, vocab_size, best, floor, t, block, max_candidates, has_edited,
        )  # fmt: skip
        _, weight_above = tally(
            found_p + 1, logits, edited, candidate_values, candidate_ids, flags, row, size, few, vocab_size, best,
            floor, t, block, max_candidates, has_edited,
        )  # fmt: skip
        one = tl.maximum(weights(unordered(found_p.to(tl.int32)), best, t), 1)
        keep_p = (needed - weight_above + one - 1) // one
        keep = tl.where(found_p > found, keep_p, tl.minimum(keep, keep_p))
        found = found_p
    # Of the tokens at the cut, those with the lowest ids stay: the least id with `keep` of them up to it.
    value = unordered(found.to(tl.int32))
    low_id = tl.zeros([], tl.int32) - 1
    high_id = tl.zeros([], tl.int32) + vocab_size - 1
    if (found == bottom) | (value < floor):
        low_id = high_id  # nothing but min-p: all tokens at its bound stay
        value = tl.maximum(floor, value)
    while high_id - low_id > 1:
        middle_id = (low_id + high_id) // 2
        count = tl.zeros([], tl.int64)
        for first in range(0, size, block):
            x, ids = load_block(
                logits, edited, candidate_values, candidate_ids, flags, row, first, size, few, vocab_size, block,
                max_candidates, has_edited,
            )  # fmt: skip
            count += tl.sum(((ordered(x) == found) & (ids <= middle_id)).to(tl.int64), 0)
        if count >= keep:
            high_id = middle_id
        else:
            low_id = middle_id
    tl.store(cut_values + row, value)
    tl.store(cut_ids + row, high_id)


def cut_tail(
    logits: Tensor,
    slots: Tensor,
    rows: SamplingRows,
    workspace: CutWorkspace,
    *,
    edited: Tensor | None = None,
    dependent: bool = False,
) -> Cut:
    """The cut of every row whose slot has the feature CUT; four launches, for `sample` to apply.

    `logits` [R, V] of any float type and `edited` as in `sample`, `slots` [R] int32, -1 for padding. A slot with CUT is
    not greedy. In this order: min-p leaves the tokens of at least min_p times the probability of the most likely one,
    top-k the k most likely of those, top-p the fewest of those whose probabilities, renormalised, reach p: a token
    stays if those before it have less than p together, so one always does. Tokens of equal logits, before the
    temperature, are in the order of their ids: top_k=k leaves exactly k. Probabilities below 1e-12 of the largest
    count as zero.
    """
    num_rows, vocab_size = len(slots), logits.shape[1]
    chunks = triton.cdiv(vocab_size, CHUNK)
    num_groups = triton.cdiv(vocab_size, GROUP)
    source = (logits, logits if edited is None else edited, slots, rows.features)
    group_peaks_kernel[(num_rows, chunks)](
        *source,
        workspace.peaks,
        vocab_size,
        num_groups,
        chunk_size=CHUNK,
        group=GROUP,
        has_edited=edited is not None,
        num_warps=4,
        **launch_options(dependent),
    )
    threshold_kernel[(num_rows,)](
        slots,
        rows.features,
        rows.temperature,
        rows.top_k,
        rows.min_p,
        workspace.peaks,
        workspace.peak,
        workspace.lowest,
        workspace.threshold,
        workspace.totals,
        workspace.tallies,
        num_groups,
        vocab_size,
        padded_groups=triton.next_power_of_2(num_groups),
        num_warps=8,
        **launch_options(dependent),
    )
    candidates_kernel[(num_rows, chunks)](
        *source,
        rows.temperature,
        workspace.peak,
        workspace.lowest,
        workspace.threshold,
        workspace.totals,
        workspace.tallies,
        workspace.candidate_values,
        workspace.candidate_ids,
        vocab_size,
        chunk_size=CHUNK,
        max_candidates=MAX_CANDIDATES,
        has_edited=edited is not None,
        num_warps=8,
        **launch_options(dependent),
    )
    cut_kernel[(num_rows,)](
        *source,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        workspace.peak,
        workspace.lowest,
        workspace.threshold,
        workspace.totals,
        workspace.tallies,
        workspace.candidate_values,
        workspace.candidate_ids,
        workspace.cut.values,
        workspace.cut.ids,
        vocab_size,
        block=4096,
        max_candidates=MAX_CANDIDATES,
        has_edited=edited is not None,
        num_warps=8,
        **launch_options(dependent),
    )
    return workspace.cut
