"""Mixture of experts: a router sends each row to a few of many feed-forward parts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.layers.layer import Layer
from octavo.layers.mlp import MLP, activation
from octavo.model_spec import ModelSpec, MoeSpec
from octavo.quant.parameter import empty, fill


class Experts(Layer):
    """The experts' weights, stacked: gate_up [experts, 2 * inner, hidden] and down [experts, hidden, inner].

    Checkpoints hold them one by one (experts.3.gate_proj.weight) or stacked in the same shapes
    (experts.gate_up_proj).
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, act: str) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.inner = num_experts, hidden_size, intermediate_size
        self.activation = activation(act)

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.gate_up_proj = empty(self.num_experts, 2 * self.inner, self.hidden_size, dtype=dtype, device=device)
        self.down_proj = empty(self.num_experts, self.hidden_size, self.inner, dtype=dtype, device=device)
        self.waiting = {(part, "weight") for part in self._pieces()}

    def _pieces(self) -> dict[str, str]:
        names = ("gate_proj", "up_proj", "down_proj")
        return {f"{expert}.{name}": name for expert in range(self.num_experts) for name in names}

    def sources(self, prefix: str) -> dict[str, str]:
        return {prefix: ""} | {f"{prefix}.{piece}": piece for piece in self._pieces()}

    def load(self, part: str, kind: str, tensor: Tensor) -> bool:
        if part == "":
            return self._load_stack(kind, tensor)
        if (part, kind) not in self.waiting:
            return False
        expert, _, name = part.partition(".")
        target = self.down_proj if name == "down_proj" else self.gate_up_proj
        begin = self.inner if name == "up_proj" else 0
        rows = slice(None) if name == "down_proj" else slice(begin, begin + self.inner)
        fill(target[int(expert)][rows], tensor)
        self.waiting.remove((part, kind))
        return True

    def _load_stack(self, kind: str, tensor: Tensor) -> bool:
        filled = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        parts = {(piece, "weight") for piece, name in self._pieces().items() if name in filled}
        if not parts or not parts <= self.waiting:
            return False
        fill(getattr(self, kind), tensor)
        self.waiting -= parts
        return True

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [T, hidden]; chosen and shares [T, k]: expert numbers and their weights in the sum."""
        out = torch.zeros_like(x)
        # Rows sorted by expert, so that each expert's are together.
        order = chosen.flatten().argsort(stable=True)
        rows, parts = order // chosen.shape[1], shares.flatten()[order, None]
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                own = slice(begin, begin + count)
                gate, up = functional.linear(x[rows[own]], self.gate_up_proj[expert]).chunk(2, -1)
                found = functional.linear(self.activation(gate).mul_(up), self.down_proj[expert])
                out.index_add_(0, rows[own], found * parts[own])
                begin += count
        return out


class MixtureOfExperts(nn.Module):
    """Softmax over all experts in float32, the best k, rescaled to sum 1 where the model says so."""

    def __init__(self, hidden_size: int, moe: MoeSpec, act: str) -> None:
        super().__init__()
        self.k, self.normalize = moe.experts_per_token, moe.normalize
        self.gate = Layer(moe.num_experts, hidden_size)
        self.experts = Experts(moe.num_experts, hidden_size, moe.intermediate_size, act)

    def forward(self, x: Tensor) -> Tensor:
        scores = functional.linear(x, self.gate.weight).softmax(-1, dtype=torch.float32)
        shares, chosen = scores.topk(self.k, -1)
        if self.normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        out: Tensor = self.experts(x, chosen, shares.to(x.dtype))
        return out


def feed_forward(spec: ModelSpec, layer: int) -> nn.Module:
    """The mixture where the configuration has one in this layer, else a plain MLP."""
    if spec.moe is not None and layer in spec.moe.layers:
        return MixtureOfExperts(spec.hidden_size, spec.moe, spec.activation)
    return MLP(spec.hidden_size, spec.intermediate_size, spec.activation)
