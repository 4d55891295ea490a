"""What the sampling kernels share: the parameters of every slot, and which logits of a row count."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.slot_update import Field, SlotTables

# Bits of SamplingRows.features: a row pays for what its slot asks.
PENALTIES = 1
BIAS = 2
BITMASK = 4
MIN_TOKENS = 8
EDITS = PENALTIES | BIAS | BITMASK | MIN_TOKENS
CUT = 16  # top-k, top-p or min-p

USES_PENALTIES = tl.constexpr(PENALTIES)
USES_BIAS = tl.constexpr(BIAS)
USES_BITMASK = tl.constexpr(BITMASK)
USES_MIN_TOKENS = tl.constexpr(MIN_TOKENS)
USES_EDITS = tl.constexpr(EDITS)
USES_CUT = tl.constexpr(CUT)

CHUNK = 4096  # logits of one program


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each slot samples, one row a slot on the device; a slot's rows are rewritten when a sequence enters it.

    Only what `features` names is read, so the rest of a row may be stale. `length` counts the tokens of the sequence:
    the token being sampled will stand at position `length`.
    """

    length: Tensor  # int32
    features: Tensor  # int32, bits as above
    temperature: Tensor  # float32; 0: greedy
    seed: Tensor  # int64
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    repetition_penalty: Tensor  # float32
    presence_penalty: Tensor  # float32
    frequency_penalty: Tensor  # float32
    min_length: Tensor  # int32: prompt length + min_tokens
    num_stop: Tensor  # int32
    stop_ids: Tensor  # [slots, width] int32: ruled out below min_length
    num_bias: Tensor  # int32
    bias_ids: Tensor  # [slots, width] int32, no id twice
    bias_values: Tensor  # [slots, width] float32
    bitmask: Tensor  # [slots, ceil(vocabulary / 32)] int32: bit id % 32 of word id // 32 is set if the id is allowed
    counts: Tensor  # [slots, vocabulary] int32: twice the times a token was generated, plus 1 if it is in the prompt
    num_logprobs: Tensor  # int32; -1: none asked


def sampling_fields(vocab_size: int, *, stop_width: int = 16, bias_width: int = 512) -> dict[str, Field]:
    """The tables of SamplingRows that the host writes, for `SlotTables`: all but `counts`."""
    integer, number = Field(torch.int32), Field(torch.float32)
    return {
        "length": integer,
        "features": integer,
        "temperature": number,
        "seed": Field(torch.int64),
        "top_k": integer,
        "top_p": number,
        "min_p": number,
        "repetition_penalty": number,
        "presence_penalty": number,
        "frequency_penalty": number,
        "min_length": integer,
        "num_stop": integer,
        "stop_ids": Field(torch.int32, stop_width),
        "num_bias": integer,
        "bias_ids": Field(torch.int32, bias_width),
        "bias_values": Field(torch.float32, bias_width),
        "bitmask": Field(torch.int32, -(-vocab_size // 32)),
        "num_logprobs": integer,
    }


def sampling_rows(tables: SlotTables, vocab_size: int) -> SamplingRows:
    """From tables with `sampling_fields`. All slots are greedy, without features and logprobs.

    `counts` is the large one: 4 bytes a slot and vocabulary entry.
    """
    names = sampling_fields(vocab_size)
    rows = {name: tables[name] for name in names}
    rows["num_logprobs"].fill_(-1)
    counts = torch.zeros(tables.num_slots, vocab_size, dtype=torch.int32, device=tables.arena.device)
    return SamplingRows(**rows, counts=counts)


@triton.jit
def load_logits(logits, edited, flags, row, ids, mask, vocab_size, has_edited: tl.constexpr):
    """Logits of a row at `ids` as float32, -inf where masked off: those in `edited` if the slot's flags say so."""
    at = row.to(tl.int64) * vocab_size + ids
    if has_edited:
        if (flags & USES_EDITS) != 0:
            x = tl.load(edited + at, mask=mask, other=float("-inf")).to(tl.float32)
        else:
            x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def ordered(x):
    """The bits of a float32 as an int32 with the same order; both zeros are one. NaN lies beyond the infinities."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    """The inverse of `ordered`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
