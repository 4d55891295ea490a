"""Attention of CUDA steps: one plan a step, then our Triton kernels on raw QKV rows and the paged cache."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention import flash_attention
from octavo.kernels.decode_attention import (
    DecodeAttentionConfig,
    DecodeWorkspace,
    decode_attention,
    decode_attention_config,
)
from octavo.kernels.decode_plan import ITEM_FIELDS, DecodeRows, num_places, plan_decode
from octavo.kernels.prefill_attention import PrefillAttentionConfig, prefill_attention, prefill_attention_config
from octavo.kernels.rope_cache import HeadTransform, PagedCache, rope_cache
from octavo.model_spec import ModelSpec

LONG_STEP = 4096  # rows of a step above which attention is most of it
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256  # matrix instructions take 16 and more; registers and shared memory end at 256


@dataclass(frozen=True, slots=True)
class Sequences:
    """The S sequences of a mixed step, int32; padding has slot -1 and no rows."""

    query_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    prefill_slots: Tensor  # [S]; -1 also for those that decode: their rows are the first of the step
    decode_slots: Tensor | None  # [S]; -1 for those that do not; None if nobody decodes
    whole: bool  # those that do not decode are computed from their first token on


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is a layer's own."""

    heads: HeadTransform
    cache: PagedCache
    scale: float
    softcap: float | None
    window: int | None


class TritonAttention:
    """Work space and plans for steps of at most `max_rows` decoding rows; a plan is made once a step and window.

    `dependent` launches (compute capability 9.0) may start while the kernel before them still runs. `deterministic`:
    only `mixed` is used, without decoding rows, and a row's result does not depend on the step it is computed in.
    """

    def __init__(
        self,
        spec: ModelSpec,
        block_size: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        capability: tuple[int, int],
        *,
        cache_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        self.spec, self.block_size, self.dtype = spec, block_size, dtype
        self.cache_dtype = cache_dtype or dtype
        self.windows = spec.windows
        places = self._places(max_rows)
        self.items = {
            window: torch.zeros(places, ITEM_FIELDS, dtype=torch.int32, device=device) for window in self.windows
        }
        unread = torch.empty(0)
        shape = HeadTransform(spec.num_heads, spec.num_kv_heads, spec.head_dim, unread, unread)
        self.workspace = DecodeWorkspace(max_rows, places, shape, device)
        self.prefill_configs = (
            (self._uniform_config(),) * 2
            if deterministic
            else tuple(self._prefill_config(capability, long) for long in (False, True))
        )
        self.flash = None
        if not deterministic:
            self.flash = flash_attention.choose(
                spec, dtype, self.cache_dtype, capability, self.prefill_configs[0], block_size, device
            )

    @staticmethod
    def refuses(spec: ModelSpec) -> str | None:
        """Why these kernels cannot run the model, or None."""
        if not MIN_HEAD_DIM <= spec.head_dim <= MAX_HEAD_DIM:
            return f"heads of {spec.head_dim} values are outside of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        return None

    def cache(self, num_blocks: int, device: torch.device) -> PagedCache:
        """K and V of one layer. Zeros are for tidiness: the kernels read no position that was not written."""
        shape = (num_blocks, self.spec.num_kv_heads, self.block_size, self.spec.head_dim)
        key, value = (torch.zeros(shape, dtype=self.cache_dtype, device=device) for _ in range(2))
        return PagedCache(key, value)

    def plan(
        self,
        slots: Tensor,
        length: Tensor,
        tokens: Tensor,
        block_table: Tensor,
        *,
        rows: DecodeRows | None,
        new_in_cache: bool,
        short: bool = False,
        dependent: bool = False,
    ) -> None:
        """Plan for decoding rows `slots` [B]; with `rows` also write what each feeds (see `plan_decode`).

        `short` as in `decode_attention_config`; the same for `decode`.
        """
        config = self._decode_config(len(slots), short)
        for i, window in enumerate(self.windows):
            plan_decode(
                slots,
                length,
                tokens,
                block_table,
                self._items(window, len(slots)),
                tile=config.tile,
                block_size=self.block_size,
                max_splits=config.max_splits,
                window=window,
                new_in_cache=new_in_cache,
                rows=rows if i == 0 else None,
                dependent=dependent,
            )

    def decode(
        self,
        layer: LayerAttention,
        qkv: Tensor,
        block_table: Tensor,
        out: Tensor,
        *,
        rows: int,
        fused: bool,
        short: bool = False,
        dependent: bool = False,
    ) -> None:
        """Attention of the first `rows` rows of `qkv`, as planned; `fused` also transforms heads and writes K and V."""
        decode_attention(
            qkv,
            layer.heads,
            layer.cache,
            block_table,
            self._items(layer.window, rows),
            self.workspace,
            out,
            self._decode_config(rows, short),
            scale=layer.scale,
            softcap=layer.softcap,
            window=layer.window is not None,
            fused=fused,
            dependent=dependent,
        )

    def mixed(
        self,
        layer: LayerAttention,
        qkv: Tensor,
        rows: DecodeRows,
        sequences: Sequences,
        block_table: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Transform heads, write K and V, and attend for rows of all kinds; the result may be `out`."""
        flash = self.flash if sequences.whole and self.serves_whole(len(qkv)) else None
        rope_cache(qkv, layer.heads, layer.cache, rows.positions, rows.cache_slots, in_place=flash is not None)
        if flash is not None:
            # It takes decoding rows for prompts of one token; what they really see comes afterwards.
            out = flash.prompts(qkv, sequences.query_starts, scale=layer.scale, window=layer.window)
        if sequences.decode_slots is not None:
            self.decode(layer, qkv, block_table, out, rows=len(sequences.decode_slots), fused=False)
        if flash is not None:
            return out
        prefill_attention(
            qkv,
            layer.cache,
            sequences.query_starts,
            sequences.context_lens,
            sequences.prefill_slots,
            block_table,
            out,
            self.prefill_configs[len(qkv) > LONG_STEP],
            num_heads=self.spec.num_heads,
            scale=layer.scale,
            softcap=layer.softcap,
            window=layer.window,
        )
        return out

    def serves_whole(self, rows: int) -> bool:
        """Whether steps of so many rows have another way for whole prompts."""
        return self.flash is not None and rows >= flash_attention.LEAST_ROWS

    def _items(self, window: int | None, rows: int) -> Tensor:
        return self.items[window][: self._places(rows)]

    def _places(self, rows: int) -> int:
        return num_places(rows, self.spec.num_kv_heads, self._decode_config(rows).max_splits)

    def _decode_config(self, rows: int, short: bool = False) -> DecodeAttentionConfig:
        config = decode_attention_config(rows, self.spec.head_dim, short)
        return replace(config, tile=32, warps=4, stages=1) if self.dtype.itemsize == 4 else config

    def _prefill_config(self, capability: tuple[int, int], long: bool) -> PrefillAttentionConfig:
        group = self.spec.num_heads // self.spec.num_kv_heads
        if self.dtype.itemsize == 4:  # for checking, not for speed: small tiles fit everywhere
            return PrefillAttentionConfig(_at_least(32, group), 32, 4, 1)
        config = prefill_attention_config(
            self.spec.head_dim, self.block_size, capability, self.cache_dtype.itemsize, long
        )
        return replace(config, query_rows=_at_least(config.query_rows, group))

    def _uniform_config(self) -> PrefillAttentionConfig:
        """One for every GPU and every step; decoding rows use it too, so its tiles are small."""
        query_rows = _at_least(32 if self.dtype.itemsize == 4 else 64, self.spec.num_heads // self.spec.num_kv_heads)
        if self.dtype.itemsize == 4 or self.spec.head_dim > 128:
            return PrefillAttentionConfig(query_rows, 32, 4, 1, uniform=True)
        return PrefillAttentionConfig(query_rows, 64, 4, 2, uniform=True)


def _at_least(query_rows: int, group: int) -> int:
    """Enough rows for one token's heads of a group, a power of two."""
    while query_rows < group:
        query_rows *= 2
    return query_rows
