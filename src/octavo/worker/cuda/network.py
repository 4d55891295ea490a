"""A second implementation of a finished model's blocks, in our kernels: few launches, for any batch of rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from octavo.attention.triton import LayerAttention, TritonAttention
from octavo.kernels.activation import activate
from octavo.kernels.add_norm import add_norm
from octavo.kernels.embed import embed
from octavo.kernels.rope_cache import HeadTransform
from octavo.kernels.skinny_matmul import DeferredNorm, Residual, skinny_matmul
from octavo.layers.decoder import Block, CausalLM
from octavo.layers.mlp import MLP
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary
from octavo.quant.dense import Dense
from octavo.worker.cuda.mixture import mixture
from octavo.worker.cuda.tuning import Products

# layer, raw qkv [T, ...], where the result [T, heads * head_dim] may go -> the result
Attend = Callable[[LayerAttention, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    block: Block
    attention: LayerAttention  # the projection has added its bias
    biased: LayerAttention  # attention adds it


class Network:
    """Embedding to final norm of a model, with the layers' own weights.

    `fixed`: mixtures of experts give a row the same whatever rows stand beside it.
    """

    def __init__(
        self, model: CausalLM, attention: TritonAttention, device: torch.device, *, fixed: bool = False
    ) -> None:
        self.model, self.spec, self.fixed = model, model.spec, fixed
        table = model.model.embed_tokens
        self.embedding = table.weight
        # Rounded to the table's type, as the layer rounds it.
        self.embedding_scale = float(torch.tensor(table.scale, dtype=table.weight.dtype))
        self.blocks: list[Block] = list(model.model.layers)  # type: ignore[arg-type]
        self.layers: list[Layer] = []
        self.allocate(attention, 1, device)
        hidden = self.spec.hidden_size
        self.squares = torch.zeros(-(-hidden // 16), 64, device=device)
        final: RMSNorm = model.model.norm
        norms = [block.input_layernorm for block in self.blocks] + [final]
        self.norms = list(pairwise(norms))  # of each layer and of the one behind it

    def allocate(self, attention: TritonAttention, num_blocks: int, device: torch.device) -> None:
        """Give every layer a cache of its own."""
        self.layers = []  # the old caches go first
        rotaries: list[Rotary] = list(self.model.model.rotaries)  # type: ignore[arg-type]
        for block in self.blocks:
            own = block.self_attn
            rotary = rotaries[own.rope]
            heads = HeadTransform(own.num_heads, own.num_kv_heads, own.head_dim, rotary.cos, rotary.sin)
            if own.q_norm is not None and own.k_norm is not None:
                heads = replace(heads, q_norm=own.q_norm.weight, k_norm=own.k_norm.weight, eps=own.q_norm.eps)
            part = own.attend
            plain = LayerAttention(heads, attention.cache(num_blocks, device), part.scale, part.softcap, part.window)
            self.layers.append(Layer(block, plain, replace(plain, heads=replace(heads, bias=own.qkv_proj.bias))))

    def briefly(self, launches: Callable[[], None]) -> None:
        """Launch with one layer of each kind: what compiles or loads something does so, in a fraction of the time."""
        layers, norms = self.layers, self.norms
        kinds = {layer.attention.window: i for i, layer in enumerate(layers)}
        self.layers, self.norms = [layers[i] for i in kinds.values()], [norms[i] for i in kinds.values()]
        try:
            launches()
        finally:
            self.layers, self.norms = layers, norms

    def run(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden_size], with the matrix products of the layers' own methods."""
        rows, spec = len(token_ids), self.spec
        hidden = self.embedding.new_empty(rows, spec.hidden_size)
        normed = torch.empty_like(hidden)
        out = hidden.new_empty(rows, spec.num_heads * spec.head_dim)
        first = self.norms[0][0]
        embed(token_ids, self.embedding, first.weight, hidden, normed, first.eps, scale=self.embedding_scale)
        for layer, (_, following) in zip(self.layers, self.norms, strict=True):
            block = layer.block
            x = block.self_attn.o_proj(attend(layer.attention, block.self_attn.qkv_proj(normed), out))
            after, before = block.post_attention_layernorm, block.post_attention_layernorm
            post_attention = post_feedforward = None
            if block.sandwich:
                before = block.pre_feedforward_layernorm
                post_attention, post_feedforward = after.weight, block.post_feedforward_layernorm.weight
            add_norm(x, hidden, before.weight, normed, before.eps, post_weight=post_attention)
            x = self._feed_forward(block, normed)
            add_norm(x, hidden, following.weight, normed, following.eps, post_weight=post_feedforward)
        return normed

    def _feed_forward(self, block: Block, x: Tensor) -> Tensor:
        mlp = block.mlp
        if isinstance(mlp, MixtureOfExperts):
            return mixture(mlp, x, self.spec.activation, fixed=self.fixed)
        assert isinstance(mlp, MLP)
        gate_up = mlp.gate_up_proj(x)
        gated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
        activate(gate_up, gated, self.spec.activation)
        down: Tensor = mlp.down_proj(gated)
        return down

    @property
    def fusible(self) -> bool:
        """Whether the blocks are of the kind that `run_fused` knows: plain weights, no second norms, a dense MLP."""
        return all(
            not block.sandwich
            and isinstance(block.mlp, MLP)
            and all(
                isinstance(linear.method, Dense) and (linear.bias is None or linear is block.self_attn.qkv_proj)
                for linear in (
                    block.self_attn.qkv_proj, block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj,
                )
            )
            for block in self.blocks
        )  # fmt: skip

    def run_fused(self, token_ids: Tensor, products: Products, attend: Attend, *, dependent: bool) -> Tensor:
        """The same for few rows in five launches a layer: norms and activation are parts of the products.

        Each product that writes the residual stream leaves the next norm's weighted rows and sums of squares; the
        product that reads them divides by the root mean square behind its loop.
        """
        rows, spec = len(token_ids), self.spec
        hidden = self.embedding.new_empty(rows, spec.hidden_size)
        normed = torch.empty_like(hidden)
        qkv = hidden.new_empty(rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        out = hidden.new_empty(rows, spec.num_heads * spec.head_dim)
        gated = hidden.new_empty(rows, spec.intermediate_size)
        first = self.norms[0][0]
        down, o = products.down, products.o
        down_parts, o_parts = products.parts(down, spec.hidden_size), products.parts(o, spec.hidden_size)
        embed(
            token_ids,
            self.embedding,
            first.weight,
            hidden,
            normed,
            first.eps,
            scale=self.embedding_scale,
            squares=self.squares,
            parts=down_parts,
            dependent=dependent,
        )
        for layer, (own, following) in zip(self.layers, self.norms, strict=True):
            attention, mlp, between = layer.block.self_attn, layer.block.mlp, layer.block.post_attention_layernorm
            assert isinstance(mlp, MLP)
            skinny_matmul(
                normed,
                attention.qkv_proj.weight,
                qkv,
                products.qkv,
                norm=DeferredNorm(self.squares, down_parts, own.eps),
                dependent=dependent,
            )
            skinny_matmul(
                attend(layer.biased, qkv, out),
                attention.o_proj.weight,
                hidden,
                o,
                residual=Residual(between.weight, normed, self.squares),
                early=products.early,
                dependent=dependent,
            )
            skinny_matmul(
                normed,
                mlp.gate_up_proj.weight,
                gated,
                products.gate_up,
                norm=DeferredNorm(self.squares, o_parts, between.eps),
                activation=spec.activation,
                early=products.early,
                dependent=dependent,
            )
            skinny_matmul(
                gated,
                mlp.down_proj.weight,
                hidden,
                down,
                residual=Residual(following.weight, normed, self.squares),
                early=products.early,
                dependent=dependent,
            )
        final = self.norms[-1][1]
        add_norm(None, hidden, final.weight, normed, final.eps, dependent=dependent)
        return normed
