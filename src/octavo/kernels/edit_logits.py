"""Logits as sampling parameters change them: allowed tokens, minimum length, bias, penalties."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dependent_launch import await_predecessor, launch_options
from octavo.kernels.logit_rows import (
    CHUNK,
    USES_BIAS,
    USES_BITMASK,
    USES_EDITS,
    USES_MIN_TOKENS,
    USES_PENALTIES,
    SamplingRows,
)


@triton.jit
def edited_logits(
    x, ids, mask, bias, features, num_ruled_out, slot, stop_ids, bitmask, counts, repetition, presence, frequency,
    vocab_size, words, stop_width: tl.constexpr,
):  # fmt: skip
    """Logits x of token `ids` after every edit but the temperature."""
    raw = x
    if features & USES_BITMASK:
        word = tl.load(bitmask + slot * words + ids // 32, mask=mask, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    for i in range(0, num_ruled_out):
        x = tl.where(ids == tl.load(stop_ids + slot * stop_width + i), float("-inf"), x)
    x += bias
    if features & USES_PENALTIES:
        count = tl.load(counts + slot * vocab_size + ids, mask=mask, other=0)
        generated = (count >> 1).to(tl.float32)
        penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition) - frequency * generated
        penalized -= tl.where(count > 1, presence, 0.0)
        x = tl.where(count > 0, penalized, x)
    # What is not a number must not be hidden: the sampler reports it.
    return tl.where((raw != raw) | (raw == float("inf")), raw, x)


@triton.jit
def edit_logits_kernel(
    logits,
    edited,
    slots,
    length,
    features,
    min_length,
    num_stop,
    stop_ids,
    num_bias,
    bias_ids,
    bias_values,
    bitmask,
    counts,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    vocab_size,
    words,
    stop_width: tl.constexpr,
    bias_width: tl.constexpr,
    chunk_size: tl.constexpr,
    dependent: tl.constexpr,
):
    await_predecessor(dependent)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    flags = tl.load(features + slot)
    if (flags & USES_EDITS) == 0:
        return
    repetition = tl.load(repetition_penalty + slot)
    presence = tl.load(presence_penalty + slot)
    frequency = tl.load(frequency_penalty + slot)
    early = ((flags & USES_MIN_TOKENS) != 0) & (tl.load(length + slot) < tl.load(min_length + slot))
    num_ruled_out = tl.where(early, tl.load(num_stop + slot), 0)
    slot_row = slot.to(tl.int64)
    source = logits + row.to(tl.int64) * vocab_size
    target = edited + row.to(tl.int64) * vocab_size
    ids = chunk * chunk_size + tl.arange(0, chunk_size)
    mask = ids < vocab_size
    x = tl.load(source + ids, mask=mask, other=0.0).to(tl.float32)
    x = edited_logits(
        x, ids, mask, 0.0, flags, num_ruled_out, slot_row, stop_ids, bitmask, counts, repetition, presence, frequency,
        vocab_size, words, stop_width,
    )  # fmt: skip
    tl.store(target + ids, x, mask=mask)
    if flags & USES_BIAS:
        tl.debug_barrier()  # the few biased logits are edited again, from the start, over what was just written
        total = tl.load(num_bias + slot)
        for first in range(0, total, 32):
            i = first + tl.arange(0, 32)
            biased = tl.load(bias_ids + slot_row * bias_width + i, mask=i < total, other=-1)
            bias = tl.load(bias_values + slot_row * bias_width + i, mask=i < total, other=0.0)
            here = (biased >= 0) & (biased // chunk_size == chunk) & (biased < vocab_size)
            y = tl.load(source + biased, mask=here, other=0.0).to(tl.float32)
            y = edited_logits(
                y, biased, here, bias, flags, num_ruled_out, slot_row, stop_ids, bitmask, counts, repetition, presence,
                frequency, vocab_size, words, stop_width,
            )  # fmt: skip
            tl.store(target + biased, y, mask=here)


def edit_logits(logits: Tensor, edited: Tensor, slots: Tensor, rows: SamplingRows, *, dependent: bool = False) -> None:
    """Write the edited logits of the rows whose slot asks for an edit; other rows of `edited` are not touched.

    `logits` [R, V] of any float type stays as it is (logprobs are of the model's own distribution), `edited` [R, V]
    float32, `slots` [R] int32, -1 for padding. In this order: the bitmask and the stop ids below the minimum length
    rule tokens out, the bias is added, then tokens that occurred are penalised. Repetition (Keskar et al. 2019, as in
    Hugging Face) divides positive logits and multiplies others, for prompt and generated tokens; frequency subtracts
    penalty * count and presence the penalty once, for generated ones (OpenAI's definition). NaN and +inf are kept for
    `sample` to find.
    """
    vocab_size = logits.shape[1]
    edit_logits_kernel[(len(slots), triton.cdiv(vocab_size, CHUNK))](
        logits,
        edited,
        slots,
        rows.length,
        rows.features,
        rows.min_length,
        rows.num_stop,
        rows.stop_ids,
        rows.num_bias,
        rows.bias_ids,
        rows.bias_values,
        rows.bitmask,
        rows.counts,
        rows.repetition_penalty,
        rows.presence_penalty,
        rows.frequency_penalty,
        vocab_size,
        rows.bitmask.shape[1],
        stop_width=rows.stop_ids.shape[1],
        bias_width=rows.bias_ids.shape[1],
        chunk_size=CHUNK,
        num_warps=8,
        **launch_options(dependent),
    )


@triton.jit
def clear_counts_kernel(counts, slots, vocab_size, block: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * block + tl.arange(0, block)
    tl.store(counts + slot * vocab_size + ids, tl.zeros([block], tl.int32), mask=ids < vocab_size)


@triton.jit
def count_tokens_kernel(counts, slots, tokens, length, prompt_lengths, vocab_size, token_stride, block: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    prompt_length = tl.load(prompt_lengths + tl.program_id(0))
    position = tl.program_id(1) * block + tl.arange(0, block)
    known = position < tl.load(length + slot)
    token = tl.load(tokens + slot * token_stride + position, mask=known, other=-1)
    valid = known & (token >= 0) & (token < vocab_size)
    prompt = position < prompt_length
    tl.atomic_or(counts + slot * vocab_size + token, 1, mask=valid & prompt, sem="relaxed")
    tl.atomic_add(counts + slot * vocab_size + token, 2, mask=valid & (position >= prompt_length), sem="relaxed")


def count_tokens(rows: SamplingRows, tokens: Tensor, slots: Tensor, prompt_lengths: Tensor, longest: int) -> None:
    """Start `rows.counts` of sequences that enter with penalties, from their tokens [slots, max_len] int32 so far.

    `slots` and `prompt_lengths` are [N] int32, without padding; no sequence has more than `longest` tokens. From then
    on `advance` counts.
    """
    vocab_size = rows.counts.shape[1]
    clear_counts_kernel[(len(slots), triton.cdiv(vocab_size, 4096))](rows.counts, slots, vocab_size, block=4096)
    count_tokens_kernel[(len(slots), triton.cdiv(longest, 1024))](
        rows.counts, slots, tokens, rows.length, prompt_lengths, vocab_size, tokens.stride(0), block=1024
    )
