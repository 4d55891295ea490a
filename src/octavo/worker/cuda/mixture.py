"""A mixture of experts in our kernels: launches only, so that it can be captured, and no look at values on the host."""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.fixed_matmul import fixed_matmul
from octavo.kernels.moe import expert_matmul, expert_matmul_config, expert_rows, route, sort_by_expert, sum_experts
from octavo.layers.moe import MixtureOfExperts

FIXED_ROWS = 64  # of a tile, where the number of rows must not matter


def mixture(moe: MixtureOfExperts, x: Tensor, activation: str, *, fixed: bool = False) -> Tensor:
    """The layer's result [T, hidden_size] for rows x; `fixed`: a row's is the same whatever rows stand beside it."""
    rows, k, experts = len(x), moe.k, moe.experts
    if fixed:
        scores = x.new_empty(rows, experts.num_experts)
        fixed_matmul(x, moe.gate.weight, scores)
    else:
        scores = functional.linear(x, moe.gate.weight)
    chosen = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    shares = torch.empty(rows, k, device=x.device)
    route(scores, chosen, shares, normalize=moe.normalize)
    order = torch.empty(rows * k, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts.num_experts + 1, dtype=torch.int32, device=x.device)
    sort_by_expert(chosen, order, starts)
    tile = FIXED_ROWS if fixed else expert_rows(rows * k, experts.num_experts)
    gate_up = expert_matmul_config(tile, x.element_size(), gated=True)
    down = expert_matmul_config(tile, x.element_size(), gated=False)
    gated = x.new_empty(rows * k, experts.inner)
    expert_matmul(x, experts.gate_up_proj, order, starts, shares, gated, gate_up, activation=activation)
    parts = x.new_empty(rows * k, x.shape[1])
    expert_matmul(gated, experts.down_proj, order, starts, shares, parts, down)
    out = torch.empty_like(x)
    sum_experts(parts, out)
    return out
