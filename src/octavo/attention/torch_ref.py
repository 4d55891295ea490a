"""Attention with torch's own kernels: the CPU's backend, and the fallback elsewhere."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.attention.base import Cache
from octavo.batch import Batch
from octavo.model_spec import ModelSpec

GROUP_BYTES = 4 << 20  # of K, of V, and of scores that a group may fill: about what a core's caches keep
FEW_KEYS = 1024  # of all heads: up to here one fused call costs less than three plain ones
PIECE_ROWS = 128  # of a long chunk, attended to at once: few enough to skip most of what lies after them


@dataclass(frozen=True, slots=True)
class Piece:
    """R rows of each sequence of a group and the gathered keys that they see."""

    rows: Tensor | None  # [S * R] int64 into the step's rows; None when these are all rows, in order
    keys: slice
    mask: Tensor  # [S, 1, R, m]: 0 or -inf, added to the scores of the last m keys; all see the others


@dataclass(frozen=True, slots=True)
class Group:
    """S sequences that are attended together, with n blocks each."""

    blocks: Tensor  # [S * kv_heads * n] int64: rows of the cache seen as [num_blocks * kv_heads, ...]
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Plan:
    written: Tensor  # [T * kv_heads] int64: rows of the cache seen as [positions of all heads, head_dim]
    groups: list[Group]


class TorchAttention:
    """Gathers each sequence's blocks once a layer and attends with batched matrix products.

    Inside a block the cache is ordered [kv_heads, block_size, head_dim], whatever its shape says, so that
    gathered blocks are the operands of the products as they lie. Heads that share a K/V head are rows of
    one product: K and V are read once for all of them. In a group, shorter sequences are padded: with
    keys that the mask hides, and with their last row again.
    """

    def __init__(self, spec: ModelSpec, block_size: int) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.block_size = block_size
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.workspace: dict[str, Tensor] = {}

    def refuses(self, spec: ModelSpec) -> str | None:
        return None

    def plan(self, batch: Batch, window: int | None) -> Plan:
        counts = [end - begin for begin, end in itertools.pairwise(batch.query_starts)]
        long = [i for i, count in enumerate(counts) if count > PIECE_ROWS]
        short = [i for i, count in enumerate(counts) if 0 < count <= PIECE_ROWS]
        groups = [self._long(batch, i, window) for i in long]
        groups += [self._short(batch, group, window) for group in self._similar(short, counts, batch.context_lens)]
        blocks, offsets = batch.cache_slots // self.block_size, batch.cache_slots % self.block_size
        written = self._by_head(blocks[:, None]) * self.block_size + offsets[:, None]
        return Plan(written.flatten(), groups)

    def _similar(self, sequences: list[int], counts: list[int], lengths: list[int]) -> Iterator[list[int]]:
        """Split so that padding less than doubles rows and keys and no group fills too much; each in order of rows."""
        rest = sorted(sequences, key=lambda i: (-counts[i], -lengths[i]))
        while rest:
            rows, keys = counts[rest[0]], lengths[rest[0]]
            elements = keys * max(self.num_kv_heads * self.head_dim, self.num_heads * rows)
            fits = max(1, GROUP_BYTES // (elements * self.dtype.itemsize))
            alike = [i for i in rest if 2 * counts[i] > rows and keys <= 2 * lengths[i] and lengths[i] <= keys][:fits]
            yield sorted(alike)
            rest = [i for i in rest if i not in set(alike)]

    def _by_head(self, blocks: Tensor) -> Tensor:
        """[S, n] blocks -> [S, kv_heads * n] rows of the cache seen as [num_blocks * kv_heads, ...]."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device)
        return (blocks[:, None] * self.num_kv_heads + heads[:, None]).flatten(1)

    def _short(self, batch: Batch, group: list[int], window: int | None) -> Group:
        """Sequences with few rows, padded to the most rows and blocks among them."""
        size, device = self.block_size, batch.block_table.device
        starts = [batch.query_starts[i] for i in group]
        counts = [batch.query_starts[i + 1] - batch.query_starts[i] for i in group]
        lengths = [batch.context_lens[i] for i in group]
        before = [length - count for length, count in zip(lengths, counts, strict=True)]
        firsts = [0 if window is None else max(0, position - window + 1) // size for position in before]
        num_blocks = max(-(-length // size) - first for length, first in zip(lengths, firsts, strict=True))
        host = torch.tensor([group, firsts, starts, counts, before]).to(device)[..., None]
        # Past a sequence's last block any block will do: the mask hides it.
        columns = (host[1] + torch.arange(num_blocks, device=device)).clamp(max=batch.block_table.shape[1] - 1)
        blocks = self._by_head(batch.block_table[host[0], columns])
        row = torch.arange(max(counts), device=device).minimum(host[3] - 1)  # [S, R]
        keys = host[1] * size + torch.arange(num_blocks * size, device=device)  # [S, positions]
        mask = self._mask((host[4] + row)[:, None, :, None], keys[:, None, None], window)
        every_row = max(counts) == 1 and starts == list(range(batch.query_starts[-1]))
        rows = None if every_row else (host[2] + row).flatten()
        return Group(blocks.flatten(), [Piece(rows, slice(None), mask)])

    def _long(self, batch: Batch, i: int, window: int | None) -> Group:
        """One sequence with many rows, in pieces."""
        begin, end = batch.query_starts[i], batch.query_starts[i + 1]
        size, length, device = self.block_size, batch.context_lens[i], batch.block_table.device
        shift = length - end  # from a row's number to its position
        first = 0 if window is None else max(0, begin + shift - window + 1) // size * size
        blocks = self._by_head(batch.block_table[i : i + 1, first // size : -(-length // size)])
        pieces = []
        for row in range(begin, end, PIECE_ROWS):
            rows = torch.arange(row, min(end, row + PIECE_ROWS), device=device)
            position = row + shift
            seen = 0 if window is None else max(0, position - window + 1)
            masked = position if window is None else seen
            stop = position + len(rows)
            mask = self._mask(rows[:, None] + shift, torch.arange(masked, stop, device=device), window)
            pieces.append(Piece(rows, slice(seen - first, stop - first), mask[None, None]))
        return Group(blocks.flatten(), pieces)

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
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in plan.groups:
            keys, values = (self._gather(name, side, group) for name, side in zip("kv", cache, strict=True))
            for piece in group.pieces:
                rows = query if piece.rows is None else query.index_select(0, piece.rows)
                found = self._attend(rows, keys[:, piece.keys], values[:, piece.keys], piece.mask, scale, softcap)
                if piece.rows is None:
                    return found
                out.index_copy_(0, piece.rows, found)
        return out

    def _gather(self, name: str, side: Tensor, group: Group) -> Tensor:
        """Blocks of K or V -> [S, kv_heads * positions, head_dim], in memory that the next call reuses."""
        by_block = side.view(-1, self.block_size * self.head_dim)
        num_blocks, sequences = group.blocks.shape[0], group.pieces[0].mask.shape[0]
        needed = num_blocks * by_block.shape[1]
        space = self.workspace.get(name)
        if space is None or space.numel() < needed:
            space = self.workspace[name] = side.new_empty(needed)
        found = space[:needed].view(num_blocks, -1)
        torch.index_select(by_block, 0, group.blocks, out=found)
        return found.view(sequences * self.num_kv_heads, -1, self.head_dim)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """query [S * R, heads, head_dim], keys and values [S * kv_heads, L, head_dim] -> as query."""
        sequences, num_rows = mask.shape[0], mask.shape[2]
        rows = query
        if num_rows > 1:  # heads first: [S, heads, R, head_dim]
            rows = query.view(sequences, num_rows, self.num_heads, -1).transpose(1, 2)
        rows = rows.reshape(keys.shape[0], -1, self.head_dim)
        if num_rows == 1 and softcap is None and keys.shape[0] * keys.shape[1] <= FEW_KEYS:
            rows, keys, values = (side.view(sequences, -1, *side.shape[1:]) for side in (rows, keys, values))
            return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).view(query.shape)
        ignored = rows[:1, :1, :1]  # with beta=0
        scores = torch.baddbmm(ignored, rows, keys.transpose(1, 2), beta=0, alpha=scale / (softcap or 1.0))
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        masked = scores.view(sequences, self.num_heads, num_rows, -1)
        if mask.shape[-1] < masked.shape[-1]:
            masked = masked[..., -mask.shape[-1] :]
        masked.add_(mask)
        found = torch.bmm(torch.softmax(scores, -1), values)
        if num_rows > 1:
            found = found.view(sequences, self.num_heads, num_rows, -1).transpose(1, 2)
        return found.reshape(query.shape)
