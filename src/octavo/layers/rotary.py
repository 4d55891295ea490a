"""Rotary position embeddings (RoFormer) and the ways to stretch them past the trained length."""

import math

import torch
from torch import Tensor, nn

from octavo.model_spec import RopeSpec

Rotation = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """The cos and sin tables of one RopeSpec, for positions [0, max_model_len + margin).

    Dynamic and longrope frequencies depend on the sequence's length. Keys in a cache cannot be turned
    again as a sequence grows, so the length that counts is `max_model_len`: every sequence is served
    with the frequencies of the longest. Served at or below the trained length, they are plain rope
    (dynamic) or the short factors (longrope).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: RopeSpec, max_model_len: int) -> None:
        super().__init__()
        self.spec, self.max_model_len = spec, max_model_len

    def build(self, dtype: torch.dtype, device: torch.device, margin: int = 0) -> None:
        """Fill the tables, [positions, dim / 2] float32; `dtype` is that of the rotations handed out."""
        self.dtype = dtype
        positions = torch.arange(self.max_model_len + margin, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(self.spec, self.max_model_len))
        factor = self.spec.attention_factor
        self.register_buffer("cos", (angles.cos() * factor).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).to(device), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Positions [T] -> cos and signed sin, each [T, 1, dim]; once a step, for all layers.

        The sign of the rotated half is in sin already: x cos + swap(x) sin needs no negation in a layer.
        """
        cos = self.cos.index_select(0, positions).to(self.dtype)[:, None]
        sin = self.sin.index_select(0, positions).to(self.dtype)[:, None]
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first `dim` of each head's dimensions; x [T, heads, head_dim]."""
    cos, sin = rotation
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :dim], rotation), x[..., dim:]], -1)
    return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> Tensor:
    """[dim / 2] float32: the angle by which each pair of dimensions turns from one position to the next."""
    theta = spec.theta
    if spec.kind == "dynamic" and max_model_len > spec.trained_len:
        # NTK-aware: raise the base so that the slowest pair is stretched by the growth of the length.
        growth = spec.factor * max_model_len / spec.trained_len - (spec.factor - 1)
        theta *= growth ** (spec.dim / (spec.dim - 2))
    wavelengths = theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)  # over 2 pi
    if spec.kind == "longrope":
        wavelengths *= torch.tensor(spec.long_factors if max_model_len > spec.trained_len else spec.short_factors)
    if spec.frequency_factors:
        wavelengths *= torch.tensor(spec.frequency_factors)
    plain = 1.0 / wavelengths
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend between (Llama 3.1)."""
    turns = spec.trained_len * plain / (2 * math.pi)  # over the trained length
    blend = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretch pairs that turn fewer than beta_slow times over the trained length, keep those above beta_fast."""

    def pair_turning(times: float) -> float:
        return spec.dim * math.log(spec.trained_len / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)
