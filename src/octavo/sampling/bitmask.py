"""Allowed tokens as bits, 32 to a word: what rules one step of a sequence, such as a grammar."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling.base import NEVER, in_vocabulary

Words = NDArray[np.int32]  # [ceil(vocabulary / 32)]: bit id % 32 of word id // 32 is set if the id is allowed
Bitmasks = Mapping[int, Words]  # by slot


def bitmask(allowed: Iterable[int], vocab_size: int) -> Words:
    """The words that allow these ids; ids without a logit are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[in_vocabulary(allowed, vocab_size)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def apply_masks(logits: Tensor, slots: Sequence[int], masks: Bitmasks) -> None:
    """Rule out, in place, what each row's mask does not allow; `logits` [R, V], row i of slot slots[i]."""
    vocab_size = logits.shape[1]
    for row, slot in enumerate(slots):
        if (words := masks.get(slot)) is not None:
            bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:vocab_size]
            logits[row].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), NEVER)
