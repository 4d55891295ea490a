"""FlashAttention-3, where it is installed: attention of whole prompts, from the rows of a step as they are."""

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.prefill_attention import PrefillAttentionConfig, prefill_attention
from octavo.kernels.rope_cache import PagedCache
from octavo.model_spec import ModelSpec

logger = logging.getLogger("octavo")

LEAST_ROWS = 1024  # of a step: below, the scheduling kernel in front of each of its launches costs what it saves
HEAD_DIMS = (64, 128, 192, 256)  # that it is usually built for
TRIAL_ROWS = 8192  # of the prompt that is measured
TRIALS = 24


class FlashAttention:
    """Prompts that begin in their step need no paged cache: their keys and values are rows of it.

    Its paged kernels were 10 to 25 % slower than these on an H200, and decoding is better served by our own.
    """

    def __init__(self, spec: ModelSpec, attend: Callable[..., Any]) -> None:
        self.spec, self.attend = spec, attend

    @classmethod
    def find(
        cls, spec: ModelSpec, dtype: torch.dtype, cache_dtype: torch.dtype, capability: tuple[int, int]
    ) -> "FlashAttention | str":
        """One for this model, or why there is none."""
        if capability != (9, 0):
            return "FlashAttention-3 is for compute capability 9.0"
        if dtype.itemsize != 2 or cache_dtype != dtype:
            return f"it needs 16-bit activations and a KV cache like them, not {dtype} and {cache_dtype}"
        if spec.head_dim not in HEAD_DIMS:
            return f"it is not built for heads of {spec.head_dim} values"
        if spec.attention_softcap is not None:
            return "it is not built for soft-capped scores"
        try:
            module = importlib.import_module("flash_attn_interface")
            return cls(spec, module.flash_attn_varlen_func)
        except (ImportError, OSError, AttributeError) as error:  # absent, or built for another torch
            return f"flash_attn_interface cannot be used: {error}"

    def prompts(self, qkv: Tensor, starts: Tensor, *, scale: float, window: int | None) -> Tensor:
        """[T, heads * head_dim]: attention within each sequence's rows [starts[i], starts[i + 1]) of `qkv`.

        Query and key heads are transformed already. Rows of no sequence come back undefined.
        """
        spec, rows = self.spec, len(qkv)
        heads = qkv.view(rows, -1, spec.head_dim)
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        found = self.attend(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=rows,
            max_seqlen_k=rows,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.view(rows, -1)

    def is_faster(self, config: PrefillAttentionConfig, block_size: int, device: torch.device) -> bool:
        """Whether it beats our kernel on a prompt of TRIAL_ROWS tokens, measured now on these heads."""
        spec, num_blocks = self.spec, -(-TRIAL_ROWS // block_size)
        dtype = getattr(torch, spec.dtype)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv = torch.randn(TRIAL_ROWS, width, dtype=dtype, device=device)
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        key, value = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        cache = PagedCache(key, value)
        starts, context, slots = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, TRIAL_ROWS], [TRIAL_ROWS], [0])
        )
        table = torch.arange(-(-num_blocks // 16) * 16, dtype=torch.int32, device=device)[None]
        out = qkv.new_empty(TRIAL_ROWS, spec.num_heads * spec.head_dim)
        scale = 1 / math.sqrt(spec.head_dim)

        def ours() -> None:
            prefill_attention(
                qkv, cache, starts, context, slots, table, out, config, num_heads=spec.num_heads, scale=scale
            )

        def theirs() -> None:
            self.prompts(qkv, starts, scale=scale, window=None)

        # As replays, since the host must not count; in turn, as an idle GPU takes a while to reach its clock.
        graphs = [captured(theirs), captured(ours)]
        times = [[milliseconds(graph.replay) for graph in graphs] for _ in range(TRIALS)]
        best_theirs, best_ours = (min(column) for column in zip(*times, strict=True))
        logger.info("A prompt of %d tokens: FlashAttention-3 %.2f ms, ours %.2f", TRIAL_ROWS, best_theirs, best_ours)
        return bool(best_theirs < best_ours)


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def milliseconds(launch: Callable[[], None]) -> float:
    """Of one launch on the current device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def choose(
    spec: ModelSpec,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    capability: tuple[int, int],
    config: PrefillAttentionConfig,
    block_size: int,
    device: torch.device,
) -> FlashAttention | None:
    """FlashAttention-3 where it is there, can run the model and is faster on its heads than our `config`."""
    if device.type != "cuda":
        return None
    found = FlashAttention.find(spec, dtype, cache_dtype, capability)
    if isinstance(found, str):
        logger.debug("Prompts use our attention kernel: %s.", found)
        return None
    faster = found.is_faster(config, block_size, device)
    logger.info("Whole prompts use %s.", "FlashAttention-3" if faster else "our attention kernel, faster here")
    return found if faster else None
