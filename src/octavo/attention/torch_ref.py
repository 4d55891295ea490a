"""Attention with torch's own kernels: the CPU's backend, and the fallback elsewhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.base import Cache
from octavo.batch import Batch
from octavo.model_spec import ModelSpec

GATHERED_BYTES = 4 << 20  # of K, and of V, that a group of sequences may fill: about what a core's caches keep
PREFILL_ROWS = 128  # attended to at once: small enough to skip most of what lies after the rows


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one row each in this step and contexts of similar length."""

    rows: Tensor | None  # [S] int64 into the step's rows; None when these are all rows, in order
    blocks: Tensor  # [S * kv_heads * n] int64: n rows of the cache seen as [num_blocks * kv_heads, ...] each
    mask: Tensor  # [S * kv_heads, 1, n * block_size]: 0 or -inf, added to the scores


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a prefill and the gathered keys that they see; `mask` is of the last of these keys."""

    rows: slice
    keys: slice
    mask: Tensor  # [rows, at most keys]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence with several rows in this step."""

    blocks: Tensor  # [kv_heads * n] int64, as above
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Plan:
    written: Tensor  # [T * kv_heads] int64: rows of the cache seen as [positions of all heads, head_dim]
    decodes: list[Decodes]
    prefills: list[Prefill]


class TorchAttention:
    """Gathers each sequence's blocks once a layer and attends with matrix products.

    Inside a block the cache is ordered [kv_heads, block_size, head_dim], whatever its shape says, so that
    gathered blocks are the operands of the products as they lie. Heads that share a K/V head are rows of
    one product: K and V are read once for all of them. Contexts of a group of decodes are padded to its
    longest, so a group takes contexts down to half of that.
    """

    def __init__(self, spec: ModelSpec, block_size: int) -> None:
        self.num_kv_heads, self.head_dim, self.block_size = spec.num_kv_heads, spec.head_dim, block_size
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
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
        fits = GATHERED_BYTES // (self.num_kv_heads * self.head_dim * self.dtype.itemsize)
        rest = sorted(sequences, key=lambda i: -lengths[i])
        while rest:
            longest = lengths[rest[0]]
            count = sum(2 * lengths[i] >= longest for i in rest[: max(1, fits // longest)])
            yield sorted(rest[:count])
            rest = rest[count:]

    def _by_head(self, blocks: Tensor) -> Tensor:
        """[S, n] blocks -> [S, kv_heads * n] rows of the cache seen as [num_blocks * kv_heads, ...]."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device)
        return (blocks[:, None] * self.num_kv_heads + heads[:, None]).flatten(1)

    def _prefill(self, batch: Batch, i: int, window: int | None) -> Prefill:
        begin, end = batch.query_starts[i], batch.query_starts[i + 1]
        length, size, device = batch.context_lens[i], self.block_size, batch.block_table.device
        first = 0 if window is None else max(0, length - (end - begin) - window + 1) // size * size
        blocks = self._by_head(batch.block_table[i : i + 1, first // size : -(-length // size)])
        pieces = []
        for row in range(begin, end, PREFILL_ROWS):
            rows = slice(row, min(end, row + PREFILL_ROWS))
            queries = torch.arange(rows.start, rows.stop, device=device) + (length - end)
            position = length - end + rows.start  # of the first query
            seen = 0 if window is None else max(0, position - window + 1)  # the first key that any query sees
            masked = position if window is None else seen  # every query sees all before this
            stop = length - end + rows.stop
            mask = self._mask(queries[:, None], torch.arange(masked, stop, device=device), window)
            pieces.append(Piece(rows, slice(seen - first, stop - first), mask))
        return Prefill(blocks.flatten(), pieces)

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
        mask = self._mask(length - 1, keys, window).repeat_interleave(self.num_kv_heads, 0)[:, None]
        rows = [batch.query_starts[i] for i in group]
        every_row = rows == list(range(batch.query_starts[-1]))
        return Decodes(None if every_row else torch.tensor(rows, device=device), blocks.flatten(), mask)

    def _mask(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """Positions of queries and keys, broadcast against each other -> 0 where a query sees a key, else -inf."""
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))

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
        for side, new in zip(cache, (key, value), strict=True):
            side.view(-1, self.head_dim).index_copy_(0, plan.written, new.reshape(-1, self.head_dim))
        if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            return self._decode(query, cache, plan.decodes[0], scale, softcap)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for decodes in plan.decodes:
            if decodes.rows is not None:
                out.index_copy_(0, decodes.rows, self._decode(query[decodes.rows], cache, decodes, scale, softcap))
        for prefill in plan.prefills:
            self._fill(query, cache, prefill, scale, softcap, out)
        return out

    def _decode(self, query: Tensor, cache: Cache, decodes: Decodes, scale: float, softcap: float | None) -> Tensor:
        """query [S, heads, head_dim] -> the same shape."""
        batch = len(query) * self.num_kv_heads
        keys, values = (self._gather(name, side, decodes.blocks, batch) for name, side in zip("kv", cache, strict=True))
        scores = _scores(query.reshape(batch, -1, self.head_dim), keys, scale, softcap).add_(decodes.mask)
        return torch.bmm(torch.softmax(scores, -1), values).view(query.shape)

    def _fill(
        self, query: Tensor, cache: Cache, prefill: Prefill, scale: float, softcap: float | None, out: Tensor
    ) -> None:
        """Write the prefill's rows of `out`; query and out [T, heads, head_dim]."""
        kv_heads, head_dim = self.num_kv_heads, self.head_dim
        keys, values = (
            self._gather(name, side, prefill.blocks, kv_heads) for name, side in zip("kv", cache, strict=True)
        )
        for piece in prefill.pieces:
            rows = query[piece.rows].transpose(0, 1)  # [heads, rows, head_dim]
            scores = _scores(rows.reshape(kv_heads, -1, head_dim), keys[:, piece.keys], scale, softcap)
            by_row = scores.view(*rows.shape[:2], -1)
            by_row[..., by_row.shape[-1] - piece.mask.shape[-1] :].add_(piece.mask)
            found = torch.bmm(torch.softmax(scores, -1), values[:, piece.keys])
            out[piece.rows] = found.view(rows.shape).transpose(0, 1)

    def _gather(self, name: str, side: Tensor, blocks: Tensor, batch: int) -> Tensor:
        """Blocks of K or V -> [batch, positions, head_dim], in memory that the next call reuses."""
        by_block = side.view(-1, self.block_size * self.head_dim)
        needed = len(blocks) * by_block.shape[1]
        space = self.workspace.get(name)
        if space is None or space.numel() < needed:
            space = self.workspace[name] = side.new_empty(needed)
        found = space[:needed].view(len(blocks), -1)
        torch.index_select(by_block, 0, blocks, out=found)
        return found.view(batch, -1, self.head_dim)


def _scores(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """query [B, rows, D], keys [B, L, D] -> [B, rows, L]."""
    ignored = query[:1, :1, :1]  # with beta=0
    scores = torch.baddbmm(ignored, query, keys.transpose(1, 2), beta=0, alpha=scale / (softcap or 1.0))
    return scores if softcap is None else scores.tanh_().mul_(softcap)
