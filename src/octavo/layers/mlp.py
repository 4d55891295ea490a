"""The gated feed-forward part of a block."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.errors import InvalidConfig
from octavo.layers.linear import Linear


def _silu(gate: Tensor) -> Tensor:
    return functional.silu(gate)


def _gelu(gate: Tensor) -> Tensor:
    return functional.gelu(gate)


def _gelu_tanh(gate: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise InvalidConfig(f"The activation {name!r} is not one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: str, *, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias=bias, split="out")
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, split="in")
        self.activation = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.chunk(self.gate_up_proj(x), 2, dim=-1)
        hidden: Tensor = self.down_proj(self.activation(gate).mul_(up))
        return hidden
