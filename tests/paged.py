"""Drives a model over a paged cache without an engine: ragged, chunked, in scattered blocks."""

import random

import torch
from torch import Tensor

from octavo.attention.base import Backend
from octavo.attention.torch_ref import TorchAttention
from octavo.batch import Batch
from octavo.layers.decoder import CausalLM


class Paged:
    """`blocks` gives each sequence its own shuffled blocks, so that neighbours and order would show."""

    def __init__(
        self, model: CausalLM, sequences: list[list[int]], block_size: int = 4, backend: Backend | None = None
    ):
        self.model, self.sequences, self.size = model, sequences, block_size
        self.done = [0] * len(sequences)
        parts = model.model
        table = torch.empty(0, dtype=parts.embed_tokens.dtype, device=parts.norm.weight.device)
        longest = max(map(len, sequences), default=1)
        self.columns = -(-longest // block_size) + 1
        blocks = list(range(1, 1 + self.columns * len(sequences)))
        random.Random(0).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(self.columns)] for _ in sequences]
        self.backend = backend or TorchAttention(model.spec, block_size)
        for layer in model.attention_layers():
            shape = (1 + self.columns * len(sequences), block_size, layer.num_kv_heads, layer.head_dim)
            layer.cache = (torch.full(shape, 7.0, dtype=table.dtype), torch.full(shape, 7.0, dtype=table.dtype))
            layer.backend = self.backend

    @torch.inference_mode()
    def step(self, chunks: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next `chunks[i]` positions of sequence i; logits of those rows by sequence."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for i, length in chunks.items():
            for position in range(self.done[i], self.done[i] + length):
                token_ids.append(self.sequences[i][position])
                positions.append(position)
                slots.append(self.tables[i][position // self.size] * self.size + position % self.size)
            self.done[i] += length
            starts.append(len(token_ids))
        lens = [self.done[i] for i in chunks]
        used = max(-(-length // self.size) for length in lens)
        batch = Batch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            cache_slots=torch.tensor(slots),
            block_table=torch.tensor([self.tables[i][:used] for i in chunks]),
            query_starts=starts,
            context_lens=lens,
        )
        for window in self.model.spec.windows:
            batch.plans[window] = self.backend.plan(batch, window)
        logits = self.model.logits(self.model(batch))
        return {i: logits[starts[n] : starts[n + 1]] for n, i in enumerate(chunks)}

    def all_logits(self, max_chunk: int, seed: int = 1) -> list[Tensor]:
        """Teacher-force every sequence in random chunks of at most `max_chunk` rows, several a step."""
        rng = random.Random(seed)
        found: list[list[Tensor]] = [[] for _ in self.sequences]
        while any(done < len(s) for done, s in zip(self.done, self.sequences, strict=True)):
            chunks = {}
            for i, sequence in enumerate(self.sequences):
                length = min(rng.randint(0, max_chunk), len(sequence) - self.done[i])
                if length:
                    chunks[i] = length
            for i, logits in self.step(chunks).items() if chunks else ():
                found[i].append(logits)
        return [torch.cat(parts) for parts in found]
