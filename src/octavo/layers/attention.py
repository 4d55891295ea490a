"""Self-attention: projections, norms and rotation around a backend that reads the paged cache."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.attention.base import Backend, Cache
from octavo.batch import Batch
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotation, rotate
from octavo.model_spec import ModelSpec


class PagedAttention(nn.Module):
    """The part with a cache. The worker sets `backend` and `cache` once the model is built."""

    backend: Backend
    cache: Cache

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        self.window = spec.layer_windows[layer]
        self.scale, self.softcap = spec.attention_scale, spec.attention_softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        plan = batch.plans[self.window]
        return self.backend.forward(query, key, value, self.cache, plan, self.scale, self.softcap)


class Attention(nn.Module):
    """`head_norm` makes the norms that each head of query and key goes through before it is rotated."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: Callable[[int], RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rope = spec.layer_ropes[layer]
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.qkv_proj = Linear(spec.hidden_size, parts, bias=qkv_bias, split="out")
        self.q_norm = head_norm(head_dim) if head_norm else None
        self.k_norm = head_norm(head_dim) if head_norm else None
        self.attend = PagedAttention(spec, layer)
        self.o_proj = Linear(heads * head_dim, spec.hidden_size, bias=out_bias, split="in")

    def forward(self, x: Tensor, rotations: list[Rotation], batch: Batch) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv: Tensor = self.qkv_proj(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        value = qkv[:, heads + kv_heads :]
        query_key = qkv[:, : heads + kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            query_key = torch.cat([self.q_norm(query_key[:, :heads]), self.k_norm(query_key[:, heads:])], 1)
        query, key = rotate(query_key, rotations[self.rope]).split_with_sizes([heads, kv_heads], 1)
        out: Tensor = self.o_proj(self.attend(query, key, value, batch).flatten(1))
        return out
