"""The shape that almost every language model shares: embedding, blocks, norm, head."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from octavo.batch import Batch
from octavo.layers.attention import Attention, PagedAttention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary, Rotation
from octavo.model_spec import ModelSpec
from octavo.quant.native import Native

Norm = Callable[[int], RMSNorm]


class Block(nn.Module):
    """Attention and feed-forward part, each after a norm; with `sandwich`, also each before another one.

    The residual stream is carried beside x and added inside the next norm.
    """

    def __init__(self, spec: ModelSpec, attention: Attention, mlp: nn.Module, norm: Norm, sandwich: bool = False):
        super().__init__()
        self.sandwich = sandwich
        self.input_layernorm = norm(spec.hidden_size)
        self.self_attn = attention
        self.post_attention_layernorm = norm(spec.hidden_size)
        if sandwich:
            self.pre_feedforward_layernorm = norm(spec.hidden_size)
            self.post_feedforward_layernorm = norm(spec.hidden_size)
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, rotations: list[Rotation], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotations, batch)
        if self.sandwich:
            x, residual = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(x), residual)
            return self.post_feedforward_layernorm(self.mlp(x)), residual
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids of a batch -> final hidden states [T, hidden_size]."""

    def __init__(self, spec: ModelSpec, blocks: Sequence[Block], norm: Norm, embedding_scale: float) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, embedding_scale)
        self.rotaries = nn.ModuleList(Rotary(rope, spec.max_model_len) for rope in spec.ropes)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm(spec.hidden_size)

    def forward(self, batch: Batch) -> Tensor:
        x, residual = self.embed_tokens(batch.token_ids), None
        rotations = [rotary(batch.positions) for rotary in self.rotaries]
        for layer in self.layers:
            x, residual = layer(x, residual, rotations, batch)
        return self.norm.add(x, residual)[0]


class CausalLM(nn.Module):
    """A decoder and the head that scores the next token.

    `renames` are replacements, made in order, that turn a checkpoint's names into this model's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: Sequence[Block],
        norm: Norm,
        *,
        embedding_scale: float = 1.0,
        renames: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.renames = spec, dict(renames or {})
        self.model = Decoder(spec, blocks, norm, embedding_scale)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, batch: Batch) -> Tensor:
        """Final hidden states [T, hidden_size] of every row of the batch."""
        hidden: Tensor = self.model(batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden_size] -> scores [R, vocab_size], float32."""
        logits = self.lm_head.scores(hidden)
        cap = self.spec.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def tie_head(self) -> None:
        """Let the loaded embedding table be the head's weight; if that is kept in another order, once."""
        head, table = self.lm_head, self.model.embed_tokens
        if table.of_head is not None:  # since before it was loaded
            return
        head.share(table.weight)
        if isinstance(head.method, Native):
            table.read_from(head, head.method)

    def attention_layers(self) -> list[PagedAttention]:
        """In order of depth: where the worker puts the backend and each layer's cache."""
        return [module for module in self.modules() if isinstance(module, PagedAttention)]
