"""Attention with torch's own kernels: the CPU's backend, and the fallback elsewhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.attention.base import Cache
from octavo.batch import Batch
from octavo.model_spec import ModelSpec

GATHERED_BYTES = 4 << 20  # of K, and of V, that a group of sequences may fill: about what a core's caches keep


@dataclass(slots=True)
class Context:
    """What some rows attend to: n cache blocks for each of a batch of (sequence, K/V head), and the scores' mask."""

    blocks: Tensor  # [batch * n] int64: rows of the cache seen as [num_blocks * kv_heads, ...]
    mask: Tensor  # [batch or 1, rows, n * block_size]: 0 or -inf, added to the scores

    def mask_as(self, dtype: torch.dtype) -> Tensor:
        """The mask in the dtype of the scores, which a plan learns from the first layer."""
        if self.mask.dtype != dtype:
            self.mask = self.mask.to(dtype)
        return self.mask


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one row each in this step and contexts of similar length."""

    rows: Tensor | None  # [S] int64 into the step's rows; None when these are all rows, in order
    context: Context


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence with several rows; without a context it attends to these rows alone."""

    rows: slice
    context: Context | None


@dataclass(frozen=True, slots=True)
class Plan:
    written: Tensor  # [T * kv_heads] int64: rows of the cache seen as [position of a head, head_dim]
    decodes: list[Decodes]
    prefills: list[Prefill]


class TorchAttention:
    """Gathers each sequence's blocks once a layer and attends with matrix products.

    Inside a block the cache is ordered [kv_heads, block_size, head_dim], so that gathered blocks are the
    operands of the products as they lie. Contexts of a group are padded to its longest, so a group
    takes contexts down to half of that.
    """

    def __init__(self, spec: ModelSpec, block_size: int) -> None:
        self.num_kv_heads, self.block_size = spec.num_kv_heads, block_size
        self.position_elements = spec.num_kv_heads * spec.head_dim
        self.workspace: dict[str, Tensor] = {}

    def refuses(self, spec: ModelSpec) -> str | None:
        return None

    def plan(self, batch: Batch, window: int | None) -> Plan:
        starts = batch.query_starts
        decodes: list[int] = []
        prefills: list[Prefill] = []
        for i in range(batch.num_seqs):
            if starts[i + 1] - starts[i] == 1:
                decodes.append(i)
            elif starts[i + 1] > starts[i]:
                prefills.append(self._prefill(batch, i, window))
        groups = [self._decodes(batch, group, window) for group in self._similar(decodes, batch.context_lens)]
        blocks, offsets = batch.cache_slots // self.block_size, batch.cache_slots % self.block_size
        written = self._by_head(blocks[:, None]) * self.block_size + offsets[:, None]
        return Plan(written.flatten(), groups, prefills)

    def _similar(self, sequences: list[int], lengths: list[int]) -> Iterator[list[int]]:
        """Split by length, and so that no group gathers too much at once; each group in order of rows."""
        fits = GATHERED_BYTES // (2 * self.position_elements)
        rest = sorted(sequences, key=lambda i: -lengths[i])
        while rest:
            longest = lengths[rest[0]]
            count = sum(2 * lengths[i] >= longest for i in rest[: max(1, fits // longest)])
            yield sorted(rest[:count])
            rest = rest[count:]

    def _by_head(self, blocks: Tensor) -> Tensor:
        """[sequences, n] blocks -> [sequences, kv_heads * n] rows of the cache seen by block and head."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device)
        return (blocks[:, None] * self.num_kv_heads + heads[:, None]).flatten(1)

    def _prefill(self, batch: Batch, i: int, window: int | None) -> Prefill:
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        length, num_rows = batch.context_lens[i], rows.stop - rows.start
        if length == num_rows and (window is None or window >= length):
            return Prefill(rows, None)
        size = self.block_size
        first = 0 if window is None else max(0, length - num_rows - window + 1) // size
        blocks = batch.block_table[i : i + 1, first : -(-length // size)]
        keys = torch.arange(first * size, -(-length // size) * size, device=blocks.device)
        queries = torch.arange(length - num_rows, length, device=blocks.device)[None, :, None]
        return Prefill(rows, Context(self._by_head(blocks).flatten(), _mask(queries, keys, window)))

    def _decodes(self, batch: Batch, group: list[int], window: int | None) -> Decodes:
        size, device = self.block_size, batch.block_table.device
        lengths = [batch.context_lens[i] for i in group]
        firsts = [0 if window is None else max(0, length - window) // size for length in lengths]
        n = max(-(-length // size) - first for length, first in zip(lengths, firsts, strict=True))
        host = torch.tensor([group, firsts, lengths]).to(device)
        sequences, first, length = host[0, :, None], host[1, :, None], host[2, :, None]
        # Past a sequence's last block any block will do: the mask hides it.
        columns = (first + torch.arange(n, device=device)).clamp(max=batch.block_table.shape[1] - 1)
        blocks = self._by_head(batch.block_table[sequences, columns])
        keys = first * size + torch.arange(n * size, device=device)
        mask = _mask(length - 1, keys, window).repeat_interleave(self.num_kv_heads, 0)[:, None]
        rows = [batch.query_starts[i] for i in group]
        every_row = rows == list(range(batch.query_starts[-1]))
        return Decodes(None if every_row else torch.tensor(rows, device=device), Context(blocks.flatten(), mask))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Cache,
        plan: Plan,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        head_dim = query.shape[-1]
        for side, new in zip(cache, (key, value), strict=True):
            side.view(-1, head_dim).index_copy_(0, plan.written, new.reshape(-1, head_dim))
        if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            return self._attend_grouped(query, cache, plan.decodes[0].context, scale, softcap)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for decodes in plan.decodes:
            rows = decodes.rows
            if rows is not None:
                found = self._attend_grouped(query[rows], cache, decodes.context, scale, softcap)
                out.index_copy_(0, rows, found)
        for prefill in plan.prefills:
            own = (key[prefill.rows].transpose(0, 1)[None], value[prefill.rows].transpose(0, 1)[None])
            out[prefill.rows] = self._attend_rows(query[prefill.rows], own, cache, prefill.context, scale, softcap)
        return out

    def _attend_grouped(
        self, query: Tensor, cache: Cache, context: Context, scale: float, softcap: float | None
    ) -> Tensor:
        """One row of each of S sequences: query [S, heads, head_dim] -> the same shape.

        The heads that share a K/V head are the rows of one product, so K and V are read once for all.
        """
        batch = query.shape[0] * self.num_kv_heads
        rows = query.reshape(batch, -1, query.shape[-1])
        keys, values = (self._gather(name, side, context, batch) for name, side in zip("kv", cache, strict=True))
        scores = _scores(rows, keys, context.mask_as(query.dtype), scale, softcap)
        return torch.bmm(torch.softmax(scores, -1), values).view(query.shape)

    def _attend_rows(
        self,
        query: Tensor,
        own: Cache,
        cache: Cache,
        context: Context | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Several rows of one sequence: query [rows, heads, head_dim] -> the same shape.

        Without a context they attend to their `own` K and V, each [1, kv_heads, rows, head_dim].
        """
        rows, heads, head_dim = query.shape
        keys, values = own
        mask = None
        if context is not None:
            keys, values = (
                self._gather(name, side, context, self.num_kv_heads)[None]
                for name, side in zip("kv", cache, strict=True)
            )
            mask = context.mask_as(query.dtype)
        if softcap is None:
            found = scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=heads != self.num_kv_heads,
            )
            return found[0].transpose(0, 1)
        if mask is None:
            positions = torch.arange(rows, device=query.device)
            mask = _mask(positions[None, :, None], positions, None).to(query.dtype)
        share = heads // self.num_kv_heads
        stacked = query.transpose(0, 1).reshape(self.num_kv_heads, share * rows, head_dim)
        scores = _scores(stacked, keys[0], mask.repeat(1, share, 1), scale, softcap)
        found = torch.bmm(torch.softmax(scores, -1), values[0])
        return found.view(heads, rows, head_dim).transpose(0, 1)

    def _gather(self, name: str, side: Tensor, context: Context, batch: int) -> Tensor:
        """Blocks of K or V -> [batch, positions, head_dim], in memory that the next call reuses."""
        blocks = side.view(-1, self.block_size * side.shape[-1])
        needed = len(context.blocks) * blocks.shape[1]
        space = self.workspace.get(name)
        if space is None or space.numel() < needed or space.dtype != side.dtype:
            space = self.workspace[name] = side.new_empty(needed)
        found = space[:needed].view(-1, blocks.shape[1])
        torch.index_select(blocks, 0, context.blocks, out=found)
        return found.view(batch, -1, side.shape[-1])


def _mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Positions of queries and keys, broadcast against each other -> 0 where a query sees a key, else -inf."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _scores(query: Tensor, keys: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """query [B, rows, D], keys [B, L, D], mask [B or 1, rows or 1, L] -> [B, rows, L]."""
    if softcap is None:
        return torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale)
    return torch.tanh(torch.bmm(query, keys.transpose(1, 2)) * (scale / softcap)) * softcap + mask
