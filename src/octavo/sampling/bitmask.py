"""Allowed tokens as bits, 32 to a word: what rules one step of a sequence, such as a grammar."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling.base import NEVER, editing, in_vocabulary

Words = NDArray[np.int32]  # [ceil(vocabulary / 32)]: bit id % 32 of word id // 32 is set if the id is allowed
Bitmasks = Mapping[int, Words]  # by slot


def bitmask(allowed: Iterable[int], vocab_size: int) -> Words:
    """The words that allow these ids; ids without a logit are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[in_vocabulary(allowed, vocab_size)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def apply_masks(logits: Tensor, slots: Sequence[int], masks: Bitmasks) -> None:
    """Rule out, in place, what each row's mask does not allow; `logits` [R, V], row i of slot slots[i]."""
    rows = [row for row, slot in enumerate(slots) if slot in masks]
    if not rows:
        return
    words = np.ascontiguousarray(np.stack([masks[slots[row]] for row in rows]))
    bits = np.unpackbits(np.bitwise_not(words, out=words).view(np.uint8), axis=1, bitorder="little")
    ruled_out = torch.from_numpy(bits).view(torch.bool)[:, : logits.shape[1]].to(logits.device)
    with editing(logits, rows) as part:
        part.masked_fill_(ruled_out, NEVER)
