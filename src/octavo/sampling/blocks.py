"""The largest logits of each row, found by blocks of the vocabulary, so that it is read once and never sorted."""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
_LOW_BITS = 2**31 - 1


def blocked(x: Tensor, fill: float) -> Tensor:
    """[R, V] as [R, ceil(V / BLOCK), BLOCK]; a last partial block is completed with `fill`."""
    missing = -x.shape[1] % BLOCK
    return (pad(x, (0, missing), value=fill) if missing else x).view(len(x), (x.shape[1] + missing) // BLOCK, BLOCK)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and its id, the lowest one at equal logits: ([R] float32, [R] int64).

    A NaN counts as the largest.
    """
    blocks = blocked(logits, float("-inf"))
    best = blocks.amax(-1).argmax(-1)
    rows = torch.arange(len(logits), device=logits.device)
    values, inside = blocks[rows, best].max(-1)
    return values, best * BLOCK + inside


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their ids, best first: ([R, k] float32, [R, k] int64).

    Equal logits are ordered by id, so the answer for a row, and each shorter answer inside it, depend
    on nothing else. The k best tokens lie within the k blocks with the best maxima.
    """
    num_rows, vocab_size = logits.shape
    k = min(k, vocab_size)
    if 2 * k * BLOCK < vocab_size:
        blocks = blocked(logits, float("-inf"))
        maxima = blocks.amax(-1)
        chosen = _ids(_keys(maxima, torch.arange(maxima.shape[1], device=logits.device)).topk(k).values)
        entries = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).reshape(num_rows, k * BLOCK)
        ids = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).reshape(num_rows, k * BLOCK)
    else:
        entries, ids = logits, torch.arange(vocab_size, device=logits.device)
    best = _ids(_keys(entries, ids).topk(k).values)
    return logits.gather(1, best), best


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Integers in the order of (value, -id): the bits of a float32, made ordered, above those of the id."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: both zeros are equal
    bits.bitwise_xor_((bits >> 31).bitwise_and_(_LOW_BITS))
    return bits.to(torch.int64).mul_(2**32).add_(_LOW_BITS - ids)


def _ids(keys: Tensor) -> Tensor:
    return _LOW_BITS - (keys & _LOW_BITS)
