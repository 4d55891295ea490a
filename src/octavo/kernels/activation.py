"""The gate of a feed-forward part: activation(gate) * up."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidConfig
from octavo.kernels.dependent_launch import await_predecessor, launch_options

# Names as in a checkpoint's configuration.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@triton.jit
def tanh(x):
    """From exp, which saturates to -1 and 1 by itself; absolute error below 2e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def activated(x, kind: tl.constexpr):
    """silu, gelu (with erf) or gelu_tanh of x, float32."""
    if kind == "silu":
        return x * tl.sigmoid(x)
    elif kind == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(kind == "gelu_tanh")
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def activation_kernel(
    gate_up, out, size: tl.constexpr, block: tl.constexpr, kind: tl.constexpr, dependent: tl.constexpr
):
    await_predecessor(dependent)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(gate_up + row * 2 * size + d, mask=d < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + d, (activated(gate, kind) * up).to(out.dtype.element_ty), mask=d < size)


def activation_kind(name: str) -> str:
    """The kernels' word for a configuration's `hidden_act`.

    Raises:
        InvalidConfig: an activation that the kernels do not have.
    """
    if name not in ACTIVATIONS:
        raise InvalidConfig(f"The activation {name!r} is not one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def activate(gate_up: Tensor, out: Tensor, activation: str, *, dependent: bool = False) -> None:
    """out [T, I] = activation(gate) * up for `gate_up` [T, 2 I], the gate first."""
    size = out.shape[1]
    activation_kernel[(len(out), triton.cdiv(size, 1024))](
        gate_up,
        out,
        size=size,
        block=1024,
        kind=activation_kind(activation),
        num_warps=4,
        **launch_options(dependent),
    )
