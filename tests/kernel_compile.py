"""Compiles the Triton kernels for GPUs that are not there: python tests/kernel_compile.py CAPABILITY ..., as in 80 90.

Older capabilities than 9.0 get a few kernels whose code differs there, and all of them with --every. Prints a JSON line
for each variant: kernel, label, capability, registers a thread, spilled bytes, shared memory, warps.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.activation import activate
from octavo.kernels.add_norm import add_norm
from octavo.kernels.batch_rows import batch_rows
from octavo.kernels.cut_tail import CutWorkspace, cut_tail
from octavo.kernels.decode_attention import DecodeAttentionConfig, DecodeWorkspace, decode_attention
from octavo.kernels.decode_plan import ITEM_FIELDS, DecodeRows, plan_decode
from octavo.kernels.edit_logits import count_tokens, edit_logits
from octavo.kernels.embed import embed
from octavo.kernels.fixed_matmul import fixed_matmul
from octavo.kernels.logit_rows import SamplingRows, sampling_fields, sampling_rows
from octavo.kernels.logprobs import LogprobsWorkspace, token_logprobs
from octavo.kernels.moe import expert_matmul, expert_matmul_config, route, sort_by_expert, sum_experts
from octavo.kernels.prefill_attention import prefill_attention, prefill_attention_config
from octavo.kernels.rope_cache import HeadTransform, PagedCache, rope_cache
from octavo.kernels.sample import Samples, advance, sample
from octavo.kernels.skinny_matmul import DeferredNorm, Residual, SkinnyMatmulConfig, skinny_matmul
from octavo.kernels.slot_update import SlotTables, slot_update_kernel

VOCAB = 151936
# On older capabilities than 9.0 the code of matrix products and copies is another; the rest would take the time twice.
ON_OLDER = {
    80: {"gemma decode", "llama prefill", "gate_up", "experts 128", "fixed"},
    89: {"fp8 decode", "gemma prefill", "experts 16"},
}

Job = tuple[str, Callable[[], None]]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def heads(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int | None = None, **given: Any
) -> HeadTransform:
    angles = floats(4096, (rotary_dim or head_dim) // 2)
    return HeadTransform(num_heads, num_kv_heads, head_dim, angles, angles, **given)


def cache(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> PagedCache:
    shape = (100, num_kv_heads, block_size, head_dim)
    return PagedCache(meta(*shape, dtype=dtype), meta(*shape, dtype=dtype), 0.5, 0.5)


def decode(
    transform: HeadTransform,
    block_size: int,
    config: DecodeAttentionConfig,
    dtype: torch.dtype = torch.bfloat16,
    **given: Any,
) -> None:
    rows, places = 16, 64
    size = transform.head_dim * (transform.num_heads + 2 * transform.num_kv_heads)
    decode_attention(
        meta(rows, size),
        transform,
        cache(transform.num_kv_heads, transform.head_dim, block_size, dtype),
        ints(rows, 32),
        ints(places, ITEM_FIELDS),
        DecodeWorkspace(rows, places, transform, torch.device("meta")),
        meta(rows, transform.num_heads * transform.head_dim),
        config,
        scale=0.1,
        **given,
    )


def prefill(
    capability: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, **given: Any
) -> None:
    paged = cache(num_kv_heads, head_dim, block_size, dtype)
    prefill_attention(
        meta(64, (num_heads + 2 * num_kv_heads) * head_dim),
        paged,
        ints(17),
        ints(16),
        ints(16),
        ints(64, 32),
        meta(64, num_heads * head_dim),
        prefill_attention_config(head_dim, block_size, divmod(capability, 10), dtype.itemsize),
        num_heads=num_heads,
        scale=0.1,
        **given,
    )


def matmul(rows: int, size: int, columns: int, config: SkinnyMatmulConfig, kind: str, **given: Any) -> None:
    x, out = meta(rows, size), meta(rows, columns)
    norm = DeferredNorm(floats(96, 64), 96, 1e-6)
    if kind == "gate_up":
        skinny_matmul(x, meta(2 * columns, size), out, config, norm=norm, activation="silu", **given)
    elif kind == "down":
        residual = Residual(meta(columns), meta(rows, columns), floats(96, 64))
        skinny_matmul(x, meta(columns, size), out, config, residual=residual, **given)
    else:
        skinny_matmul(x, meta(columns, size), out, config, norm=norm, **given)


def experts(rows: int, tile: int) -> None:
    """Qwen3-30B-A3B's."""
    num, k, hidden, inner = 128, 8, 2048, 768
    order, starts, shares = ints(rows * k), ints(num + 1), floats(rows, k)
    route(meta(rows, num), ints(rows, k), shares, normalize=True)
    sort_by_expert(ints(rows, k), order, starts)
    gated, parts = meta(rows * k, inner), meta(rows * k, hidden)
    gate_up, down = (expert_matmul_config(tile, 2, gated=gated) for gated in (True, False))
    weight = meta(num, 2 * inner, hidden)
    expert_matmul(meta(rows, hidden), weight, order, starts, shares, gated, gate_up, activation="silu")
    expert_matmul(gated, meta(num, hidden, inner), order, starts, shares, parts, down)
    sum_experts(parts, meta(rows, hidden))


def sampling(run: Callable[[Tensor, Tensor, SamplingRows], None]) -> None:
    tables = SlotTables(32, sampling_fields(VOCAB), "meta")
    run(meta(16, VOCAB), ints(16), sampling_rows(tables, VOCAB))


def jobs(capability: int) -> Iterator[Job]:
    """A representative set of variants of every kernel, by label."""
    hopper = capability == 90
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    few, many = DecodeAttentionConfig(64, 4, 2), DecodeAttentionConfig(32, 2, 4)
    large = DecodeAttentionConfig(32, 4, 3)
    qwen2, qwen3 = heads(12, 2, 128, bias=meta(2048)), heads(16, 8, 128, q_norm=meta(128), k_norm=meta(128))
    partial, gemma = heads(8, 8, 80, rotary_dim=32), heads(8, 4, 256)
    yield "qwen2 decode", lambda: decode(qwen2, 64, few, fused=True, dependent=hopper)
    yield "gemma decode", lambda: decode(gemma, 16, large, softcap=50.0, window=True)
    yield "llama prefill", lambda: prefill(capability, 32, 8, 128, 16, bf16)
    yield "gemma prefill", lambda: prefill(capability, 8, 4, 256, 16, bf16, softcap=50.0, window=512)
    config = SkinnyMatmulConfig(16, 64, 4, 4, prefetch=512)
    yield "gate_up", lambda: matmul(8, 1536, 8960, config, "gate_up", dependent=hopper)
    if capability >= 89:
        yield "fp8 decode", lambda: decode(qwen3, 64, many, fp8, fused=True)
    yield "head_dim 80 decode", lambda: decode(partial, 16, many)
    yield "llama bulk", lambda: prefill(capability, 32, 8, 128, 64, bf16)
    yield "head_dim 80 prefill", lambda: prefill(capability, 8, 8, 80, 16, bf16)
    if capability >= 89:
        yield "fp8 prefill", lambda: prefill(capability, 12, 2, 128, 64, fp8)
        yield "fp8 partial", lambda: rope_cache(meta(16, 1920), partial, cache(8, 80, 16, fp8), ints(16), ints(16))
    yield "qwen3", lambda: rope_cache(meta(16, 4096), qwen3, cache(8, 128, 16), ints(16), ints(16))
    bulk = SkinnyMatmulConfig(16, 64, 4, 8, bulk_copies=True, prefetch=-1)
    yield "qkv bulk", lambda: matmul(16, 1024, 4096, bulk, "qkv", dependent=hopper)
    down = SkinnyMatmulConfig(32, 128, 4, 3, prefetch=1024)
    yield "down", lambda: matmul(32, 3072, 1024, down, "down", dependent=hopper, early=hopper)
    rows = DecodeRows(ints(256), ints(256), ints(256))
    yield (
        "256 rows",
        lambda: plan_decode(
            ints(256), ints(256), ints(256, 4096), ints(256, 64), ints(300, 8), tile=32, block_size=16, max_splits=128,
            rows=rows,
        ),
    )  # fmt: skip
    yield (
        "mixed",
        lambda: batch_rows(ints(17), ints(16), ints(16), ints(32, 4096), ints(32, 64), rows, block_size=16),
    )
    wide = meta(16, 1536)
    yield (
        "deferred",
        lambda: embed(ints(16), meta(VOCAB, 1536), meta(1536), wide, wide, 1e-6, squares=floats(96, 64), parts=96),
    )
    yield "", lambda: add_norm(wide, wide, meta(1536), wide, 1e-6, dependent=hopper)
    yield "sandwich", lambda: add_norm(wide, wide, meta(1536), wide, 1e-6, post_weight=meta(1536))
    for tile in (16, 64, 128):
        yield f"experts {tile}", functools.partial(experts, 16 * tile, tile)
    yield "fixed", lambda: fixed_matmul(wide, meta(2048, 1536), meta(16, 2048), bias=meta(2048))
    yield "gelu_tanh", lambda: activate(meta(16, 17920), meta(16, 8960), "gelu_pytorch_tanh")
    yield "", lambda: sampling(lambda logits, slots, rows: edit_logits(logits, floats(16, VOCAB), slots, rows))
    yield "", lambda: sampling(lambda logits, slots, rows: count_tokens(rows, ints(32, 4096), slots, slots, 4096))
    yield (
        "plain",
        lambda: sampling(
            lambda logits, slots, rows: sample(logits, slots, rows, Samples(16, VOCAB, "meta"), dependent=hopper)
        ),
    )
    yield "edited cut", lambda: sampling(edited_and_cut)
    yield (
        "",
        lambda: sampling(
            lambda logits, slots, rows: advance(Samples(16, VOCAB, "meta"), slots, rows, ints(32, 4096), 4096)
        ),
    )
    yield (
        "",
        lambda: sampling(
            lambda logits, slots, rows: token_logprobs(
                logits, slots, slots, rows.num_logprobs, LogprobsWorkspace(16, VOCAB, "meta")
            )
        ),
    )
    yield "", lambda: slot_update_kernel[(1,)](ints(1000), ints(100), block=1024, num_warps=4)


def edited_and_cut(logits: Tensor, slots: Tensor, rows: SamplingRows) -> None:
    edited = floats(16, VOCAB)
    cut = cut_tail(logits, slots, rows, CutWorkspace(16, VOCAB, "meta"), edited=edited)
    sample(logits, slots, rows, Samples(16, VOCAB, "meta"), edited=edited, cut=cut)


class NoDriver:
    """What Triton asks a driver when it compiles and does not run."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """One device a target: Triton asks for a device's target only once."""
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack, which are spilled registers, of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    return registers, stack


def main(arguments: list[str]) -> None:
    every = "--every" in arguments
    capabilities = [int(argument) for argument in arguments if argument != "--every"]
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_only
    for capability in capabilities:
        driver.set_active(NoDriver(capability))
        for label, job in jobs(capability):
            if not every and label not in ON_OLDER.get(capability, {label}):
                continue
            compiled.clear()
            job()
            for kernel in compiled:
                registers, spilled = resources(kernel.asm["cubin"])
                row = {
                    "kernel": kernel.name,
                    "label": label,
                    "capability": capability,
                    "registers": registers,
                    "spilled": spilled,
                    "shared": kernel.metadata.shared,
                    "warps": kernel.metadata.num_warps,
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
