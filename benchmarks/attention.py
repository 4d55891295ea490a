"""Our attention kernels on one GPU: microseconds a launch by configuration, beside torch's own and the limit.

    python benchmarks/attention.py [prefill] [decode]

Each measurement is a captured graph of launches over several caches, replayed; the median of groups.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from octavo.kernels.decode_attention import DecodeAttentionConfig, DecodeWorkspace, decode_attention
from octavo.kernels.decode_plan import ITEM_FIELDS, num_places, plan_decode
from octavo.kernels.prefill_attention import PrefillAttentionConfig, prefill_attention
from octavo.kernels.rope_cache import HeadTransform, PagedCache

BANDWIDTH, FLOPS = 4.24e12, 801e12
DEVICE, BF16, INT = "cuda", torch.bfloat16, torch.int32


def microseconds(launches: Callable[[], object], replays: int = 10, groups: int = 5) -> float:
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    times = []
    for _ in range(groups):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / replays * 1e3)
    return statistics.median(times)


def caches(count: int, num_blocks: int, kv_heads: int, head_dim: int, block_size: int) -> list[PagedCache]:
    shape = (num_blocks, kv_heads, block_size, head_dim)
    return [PagedCache(*(torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(2))) for _ in range(count)]


def prefill_all(
    paged: list[PagedCache],
    q: Tensor,
    starts: Tensor,
    context: Tensor,
    slots: Tensor,
    table: Tensor,
    out: Tensor,
    config: PrefillAttentionConfig,
    heads: int,
) -> None:
    for cache in paged:
        prefill_attention(q, cache, starts, context, slots, table, out, config, num_heads=heads, scale=0.1)


def decode_all(
    paged: list[PagedCache],
    qkv: Tensor,
    transform: HeadTransform,
    table: Tensor,
    items: Tensor,
    space: DecodeWorkspace,
    out: Tensor,
    config: DecodeAttentionConfig,
) -> None:
    for cache in paged:
        decode_attention(qkv, transform, cache, table, items, space, out, config, scale=0.1, fused=True)


def rivals(
    length: int, heads: int, kv_heads: int, head_dim: int, layers: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Attention of one prompt by others' kernels: torch's, and FlashAttention-3 where it is installed."""
    q = torch.randn(1, heads, length, head_dim, device=DEVICE, dtype=BF16)
    k, v = torch.randn(2, 1, kv_heads, length, head_dim, device=DEVICE, dtype=BF16)

    def of_torch(kind: SDPBackend) -> None:
        with sdpa_kernel(kind):
            for _ in range(layers):
                scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        yield f"torch {kind.name}", partial(of_torch, kind)
    try:
        import flash_attn_interface as flash
    except ImportError as error:
        print(f"no FlashAttention-3: {error}", flush=True)
        return
    rows = q[0].transpose(0, 1).contiguous()
    ends = torch.tensor([0, length], device=DEVICE, dtype=INT)

    def contiguous() -> None:
        for _ in range(layers):
            keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
            flash.flash_attn_varlen_func(rows, keys, values, ends, ends, length, length, causal=True)

    def paged(caches: list[PagedCache], table: Tensor) -> None:
        for cache in caches:
            flash.flash_attn_with_kvcache(
                rows, cache.key.transpose(1, 2), cache.value.transpose(1, 2), cache_seqlens=ends[1:], page_table=table,
                cu_seqlens_q=ends, max_seqlen_q=length, causal=True, num_splits=1,
            )  # fmt: skip

    yield "FlashAttention-3", contiguous
    for block_size in (16, 64, 128):
        table = (torch.randperm(length // block_size, device=DEVICE) + 1).to(INT)[None]
        own = caches(layers, length // block_size + 1, kv_heads, head_dim, block_size)
        yield f"FlashAttention-3, block {block_size}", partial(paged, own, table)


def prefill(layers: int = 2, head_dim: int = 128) -> None:
    configs = [(128, 64, 8, 3, False), (128, 64, 8, 2, True, 128), (128, 64, 8, 3, True)]
    for heads, kv_heads, length in ((32, 8, 8192), (32, 8, 2048), (12, 2, 8192), (16, 8, 8192)):
        flops = 2 * length * length * heads * head_dim
        q = torch.randn(length, heads * head_dim, device=DEVICE, dtype=BF16)
        out = torch.empty_like(q)
        launches = dict(rivals(length, heads, kv_heads, head_dim, layers))
        for block_size in (16, 64):
            paged = caches(layers, length // block_size + 1, kv_heads, head_dim, block_size)
            table = (torch.randperm(length // block_size, device=DEVICE) + 1).to(INT)[None]
            starts, context, slots = (torch.tensor(x, device=DEVICE, dtype=INT) for x in ([0, length], [length], [0]))
            for values in configs:
                config = PrefillAttentionConfig(*values)
                if config.bulk_copies and config.tile > block_size:
                    continue
                launches[f"block {block_size} {values}"] = partial(
                    prefill_all, paged, q, starts, context, slots, table, out, config, heads
                )
        found = {}
        for name, launch in launches.items():
            try:
                found[name] = microseconds(launch)
            except Exception as error:  # what one machine lacks must not end the comparison
                print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        print(f"prefill of {length}, {heads}/{kv_heads} heads: limit {flops / FLOPS * 1e6:.0f} us", flush=True)
        for name, us in sorted(found.items(), key=lambda item: item[1]):
            print(f"    {name:36} {us / layers:8.1f} us  {flops * layers / us / 1e6:6.0f} TFLOP/s", flush=True)


def decode(head_dim: int = 128, layers: int = 4) -> None:
    configs = [(64, 4, 2), (64, 8, 3), (32, 2, 4), (32, 2, 3), (64, 4, 3), (16, 2, 4)]
    for heads, kv_heads in ((16, 8), (12, 2), (32, 8)):
        transform = HeadTransform(
            heads, kv_heads, head_dim, *(torch.randn(16384, head_dim // 2, device=DEVICE) for _ in range(2))
        )
        for rows, context in (
            (1, 100),
            (1, 1000),
            (32, 100),
            (32, 1000),
            (128, 400),
            (256, 100),
            (256, 400),
            (256, 1000),
        ):
            per_row = -(-(context + 1) // 16)
            paged = caches(layers, rows * per_row + 1, kv_heads, head_dim, 16)
            table = torch.zeros(rows, 1024, device=DEVICE, dtype=INT)
            table[:, :per_row] = (torch.randperm(rows * per_row, device=DEVICE) + 1).view(rows, -1)
            slots = torch.arange(rows, device=DEVICE, dtype=INT)
            length = torch.full((rows,), context, device=DEVICE, dtype=INT)
            tokens = torch.zeros(rows, 16384, device=DEVICE, dtype=INT)
            qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=DEVICE, dtype=BF16)
            out = torch.empty(rows, heads * head_dim, device=DEVICE, dtype=BF16)
            found = {}
            for values in configs:
                for max_splits in (128,):
                    for programs in (264, 528):
                        config = DecodeAttentionConfig(*values, max_splits)
                        places = num_places(rows, kv_heads, max_splits, programs)
                        items = torch.zeros(places, ITEM_FIELDS, device=DEVICE, dtype=INT)
                        space = DecodeWorkspace(rows, places, transform, torch.device(DEVICE))
                        plan_decode(
                            slots, length, tokens, table, items, tile=config.tile, block_size=16,
                            max_splits=max_splits, new_in_cache=False,
                        )  # fmt: skip

                        launches = partial(decode_all, paged, qkv, transform, table, items, space, out, config)
                        found[values, max_splits, programs] = microseconds(launches) / layers
            limit = rows * context * 4 * kv_heads * head_dim / BANDWIDTH * 1e6
            best = sorted(found.items(), key=lambda item: item[1])
            shown = "; ".join(f"{name} {us:.1f}" for name, us in best)
            print(f"decode {heads}/{kv_heads} rows {rows} context {context}: limit {limit:.1f} us: {shown}", flush=True)


if __name__ == "__main__":
    for part in sys.argv[1:] or ["prefill", "decode"]:
        {"prefill": prefill, "decode": decode}[part]()
