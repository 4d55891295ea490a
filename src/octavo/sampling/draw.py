"""A token drawn from each row by inverse CDF, with a uniform number that depends on seed and position alone."""

import torch
from torch import Tensor

from octavo.sampling.blocks import blocked

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def mix(x: Tensor) -> Tensor:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64 bits; int64 products wrap as unsigned do."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniforms(mixed_seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] float64 in [0, 1) with 53 random bits, from `mix(seed)` and the position of the token, both [R] int64."""
    bits = mix(mixed_seeds + (positions + 1) * _GOLDEN)
    return _shift(bits, 11).double() / 2**53


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical shift to the right, where >> would drag the sign along."""
    return (x >> n).bitwise_and(2 ** (64 - n) - 1)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Ids [R] int64 with the probabilities softmax(logits [R, V]), never one of probability zero.

    The running sum is one over blocks, then one inside the block that is hit, both in float64: the tail
    of a large vocabulary does not drown in rounding.
    """
    blocks = blocked(logits.softmax(-1), 0.0)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = (uniform * ends[:, -1])[:, None]
    block = _first_above(ends, target)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    share = (target - before) / (ends.gather(1, block) - before)
    rows = torch.arange(len(logits), device=logits.device)
    inside = blocks[rows, block[:, 0]].cumsum(-1, dtype=torch.float64)
    return (block * blocks.shape[2] + _first_above(inside, share * inside[:, -1:]))[:, 0]


def _first_above(running_sums: Tensor, target: Tensor) -> Tensor:
    """Where running sums [R, N] first exceed the target [R, 1], or reach their end if rounding keeps them below it.

    Either is a place where the sum grew.
    """
    last = (running_sums < running_sums[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum((running_sums <= target).sum(-1, keepdim=True), last)
