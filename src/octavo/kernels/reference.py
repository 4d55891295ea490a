"""What the Triton kernels compute, in plain torch in double precision: the oracle of their tests."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, float64."""
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def activate(x: Tensor, activation: str) -> Tensor:
    """silu, gelu or gelu_pytorch_tanh, float64."""
    x = x.double()
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2 * cos.shape[-1] values of each head; x [T, heads, D], cos and sin [T, rotary_dim / 2]."""
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def gather_context(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a sequence: cache [num_blocks, kv_heads, block_size, D] -> [length, kv_heads, D]."""
    num_blocks = -(-length // cache.shape[2])
    return cache[blocks[:num_blocks].long()].transpose(1, 2).flatten(0, 1)[:length].double()


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None = None, window: int | None = None
) -> Tensor:
    """Causal attention of the last T positions, float64.

    query [T, heads, D], key and value [L, kv_heads, D] -> [T, heads, D].
    """
    num_rows, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    key, value = (side.double().repeat_interleave(num_heads // num_kv_heads, 1) for side in (key, value))
    scores = torch.einsum("thd,lhd->htl", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length - num_rows, length, device=query.device)[:, None]
    keys = torch.arange(length, device=query.device)[None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    return torch.einsum("htl,lhd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


def mixture(
    x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, k: int, activation: str, *, normalize: bool
) -> Tensor:
    """A mixture of experts, float64: x [T, H], scores [T, E], gate_up [E, 2 I, H], down [E, H, I] -> [T, H].

    The scores are given, as rounding them decides which of two nearly equal experts is chosen.
    """
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    shares, chosen = scores.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, chosen = shares[:, :k], chosen[:, :k]
    if normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for row, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            out[row] += shares[row, place] * (down[expert] @ (activate(gate, activation) * up))
    return out


@dataclass(frozen=True, slots=True)
class Sampling:
    """One row's parameters; `counts` by token id: (generated how often, in the prompt)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    ruled_out: tuple[int, ...] = ()
    counts: tuple[tuple[int, int, bool], ...] = ()


def edit_logits(logits: Tensor, params: Sampling) -> Tensor:
    """One row [V] after allowed tokens, tokens ruled out, bias and penalties, float32."""
    x = logits.float().clone()
    if params.allowed is not None:
        hidden = torch.ones_like(x, dtype=torch.bool)
        hidden[list(params.allowed)] = False
        x[hidden] = -math.inf
    x[list(params.ruled_out)] = -math.inf
    for token, bias in params.bias:
        x[token] += bias
    for token, generated, in_prompt in params.counts:
        if generated or in_prompt:
            x[token] = x[token] / params.repetition if x[token] > 0 else x[token] * params.repetition
        x[token] -= params.frequency * generated + (params.presence if generated else 0.0)
    return x


def kept_tokens(logits: Tensor, params: Sampling) -> set[int]:
    """Ids that min-p, then top-k, then top-p leave of a row [V]; equal logits in the order of ids."""
    x = logits.double()
    order = sorted(range(len(x)), key=lambda token: (-float(x[token]), token))
    scaled = x / params.temperature
    order = [token for token in order if x[token] > -math.inf]
    if params.min_p > 0:
        lowest = scaled.max() + math.log(params.min_p)
        order = [token for token in order if scaled[token] >= lowest]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        probabilities = scaled[order].softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        order = [token for token, mass in zip(order, before.tolist(), strict=True) if mass < params.top_p]
    return set(order)


def token_logprobs(logits: Tensor, target: int, k: int) -> tuple[list[int], list[float], int]:
    """(ids, logprobs, rank) of a row [V]: the target first, then the k most likely, equal ones by id."""
    x = logits.double()
    order = sorted(range(len(x)), key=lambda token: (-float(x[token]), token))[:k]
    values = x.log_softmax(-1)
    ids = [target, *order]
    return ids, values[ids].tolist(), int((x > x[target]).sum()) + 1
