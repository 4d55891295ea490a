"""The Triton kernels against plain torch: in the interpreter with small shapes, on a GPU in bf16 and also large."""
# ruff: noqa: E402 - a kernel is made for the interpreter if that is chosen before it is imported

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")
import triton.language as tl

from octavo.errors import InvalidConfig
from octavo.kernels import reference as reference
from octavo.kernels.activation import activate
from octavo.kernels.add_norm import add_norm
from octavo.kernels.cut_tail import CutWorkspace, cut_tail
from octavo.kernels.decode_attention import (
    DecodeAttentionConfig,
    DecodeWorkspace,
    decode_attention,
    decode_attention_config,
)
from octavo.kernels.decode_plan import ITEM_FIELDS, DecodeRows, num_places, plan_decode
from octavo.kernels.edit_logits import count_tokens, edit_logits
from octavo.kernels.embed import embed
from octavo.kernels.logit_rows import (
    BIAS,
    BITMASK,
    CUT,
    MIN_TOKENS,
    PENALTIES,
    SamplingRows,
    sampling_fields,
    sampling_rows,
)
from octavo.kernels.logprobs import LogprobsWorkspace, token_logprobs
from octavo.kernels.prefill_attention import (
    PrefillAttentionConfig,
    prefill_attention,
    prefill_attention_config,
)
from octavo.kernels.reference import Sampling
from octavo.kernels.rope_cache import HeadTransform, PagedCache, rope_cache
from octavo.kernels.sample import (
    INFINITE,
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    Cut,
    Samples,
    advance,
    gumbel,
    sample,
)
from octavo.kernels.skinny_matmul import DeferredNorm, Residual, SkinnyMatmulConfig, num_parts, skinny_matmul
from octavo.kernels.slot_update import Changes, Field, SlotTables

DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter multiplies no bf16 matrices
TOLERANCE = 1.5e-2 if GPU else 3e-6
FP8_TOLERANCE = 0.06 if GPU else 0.3  # the interpreter loses the carry where a mantissa rounds up to the next exponent
NAN = float("nan")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def weight(*shape: int) -> Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(DEVICE, DTYPE)


def norm_weight(size: int) -> Tensor:
    return (1 + 0.1 * torch.randn(size)).to(DEVICE, DTYPE)


def poisoned(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.full(shape, NAN, device=DEVICE, dtype=dtype)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Relative error of the whole; a NaN anywhere fails."""
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error.item() < tolerance, f"relative error {error.item():.3g}"


# ---------------------------------------------------------------- rows of the model


@pytest.mark.parametrize("deferred", [False, True])
def test_embed(deferred: bool) -> None:
    table, w = normal(50, 48), norm_weight(48)
    token_ids = ints([3, 49, 0])
    hidden, normed, squares = poisoned(3, 48), poisoned(3, 48), poisoned(4, 64, dtype=torch.float32)
    embed(token_ids, table, w, hidden, normed, 1e-6, scale=7.0, squares=squares if deferred else None, parts=4)
    expected = table[token_ids.long()].double() * 7.0
    close(hidden, expected)
    if deferred:
        close(normed, expected * w.double())
        close(squares[:, :3].sum(0), expected.pow(2).sum(-1))
    else:
        close(normed, reference.rms_norm(expected, w, 1e-6))


@pytest.mark.parametrize("mode", ["add", "norm only", "sandwich"])
def test_add_norm(mode: str) -> None:
    x, hidden, w, post = normal(3, 96), normal(3, 96), norm_weight(96), norm_weight(96)
    out, before = poisoned(3, 96), hidden.double()
    if mode == "norm only":
        add_norm(None, hidden, w, out, 1e-5)
        expected = before
    elif mode == "add":
        add_norm(x, hidden, w, out, 1e-5)
        expected = before + x.double()
    else:
        add_norm(x, hidden, w, out, 1e-5, post_weight=post)
        expected = before + reference.rms_norm(x, post, 1e-5)
    close(hidden, expected)
    close(out, reference.rms_norm(expected, w, 1e-5))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_activation(name: str) -> None:
    gate_up, out = normal(3, 2 * 1100) * 3, poisoned(3, 1100)
    gate_up[0, 0], gate_up[0, 1] = 90.0, -90.0  # where exp overflows
    activate(gate_up, out, name)
    gate, up = gate_up.double().chunk(2, -1)
    close(out, reference.activate(gate, name) * up)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(InvalidConfig, match="'relu6'"):
        activate(normal(1, 32), normal(1, 16), "relu6")


SKINNY = [
    (3, 160, 48, SkinnyMatmulConfig(16, 32, 2, 2)),
    (9, 128, 32, SkinnyMatmulConfig(16, 32, 4, 3)),
    (5, 128, 64, SkinnyMatmulConfig(32, 32, 4, 3, bulk_copies=True)),
]
if GPU:
    SKINNY += [
        (1, 1536, 2048, SkinnyMatmulConfig(16, 128, 4, 6)),
        (16, 3072, 1024, SkinnyMatmulConfig(16, 128, 4, 4)),
        (64, 4096, 6144, SkinnyMatmulConfig(32, 64, 4, 4, bulk_copies=True)),
    ]


@pytest.mark.parametrize(("rows", "size", "columns", "config"), SKINNY)
def test_skinny_matmul_with_its_surroundings(rows: int, size: int, columns: int, config: SkinnyMatmulConfig) -> None:
    """Residual product -> deferred norm -> gated product: each reads what the one before left."""
    x, hidden = normal(rows, size), normal(rows, columns)
    down, gate_up, w = weight(columns, size), weight(2 * size, columns), norm_weight(columns)
    before = hidden.double()
    scaled, squares = poisoned(rows, columns), poisoned(num_parts(columns, config), 64, dtype=torch.float32)
    residual = Residual(w, scaled, squares)
    skinny_matmul(x, down, hidden, config, residual=residual)
    stream = before + x.double() @ down.double().T
    close(hidden, stream)
    close(scaled, stream * w.double())
    # The next product's K is this one's columns; its configuration has to divide them if copies are in bulk.
    norm = DeferredNorm(squares, num_parts(columns, config), 1e-6)
    out = poisoned(rows, size)
    following = SkinnyMatmulConfig(16, 16, 2, 2, config.bulk_copies)
    skinny_matmul(scaled, gate_up, out, following, norm=norm, activation="silu")
    gate, up = (reference.rms_norm(stream, w, 1e-6) @ gate_up.double().T).chunk(2, -1)
    close(out, reference.activate(gate, "silu") * up)
    plain = poisoned(rows, columns)
    skinny_matmul(x, down, plain, config)
    close(plain, x.double() @ down.double().T)


def test_skinny_matmul_refuses() -> None:
    with pytest.raises(InvalidConfig, match="at most 64 rows, not 65"):
        skinny_matmul(normal(65, 32), weight(32, 32), normal(65, 32), SkinnyMatmulConfig())
    with pytest.raises(InvalidConfig, match="24 output columns"):
        skinny_matmul(normal(1, 32), weight(24, 32), normal(1, 24), SkinnyMatmulConfig())


# ---------------------------------------------------------------- the plan of a decode step


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize("places", [7, 20])
def test_decode_plan(window: int | None, new_in_cache: bool, places: int) -> None:
    lengths, max_splits, tile, block_size = [1, 300, 17, 64, 129], 6, 16, 32
    slots = [3, -1, 1, 0, 4, 2]
    tokens = torch.arange(5 * 320, dtype=torch.int32).view(5, 320).to(DEVICE)
    block_table = (torch.arange(5 * 10, dtype=torch.int32).view(5, 10) + 1).to(DEVICE)
    items = torch.full((places, ITEM_FIELDS), -7, dtype=torch.int32, device=DEVICE)
    rows = DecodeRows(ints([-7] * 6), ints([-7] * 6), ints([-7] * 6))
    plan_decode(
        ints(slots), ints(lengths), tokens, block_table, items, tile=tile, block_size=block_size, max_splits=max_splits,
        min_tokens=32, window=window, new_in_cache=new_in_cache, rows=rows,
    )  # fmt: skip
    found = items.tolist()
    used = [item for item in found if item[0] >= 0]
    assert used == found[: len(used)]
    for row, slot in enumerate(slots):
        mine = [item for item in used if item[0] == row]
        if slot < 0:
            assert not mine
            assert (rows.positions[row], rows.cache_slots[row]) == (-1, 0)
            continue
        n = lengths[slot]
        lowest = max(0, n - window) if window else 0
        keys = n if new_in_cache else n - 1
        assert 1 <= len(mine) <= max_splits
        assert [(item[1], item[2], item[3]) for item in mine] == [(slot, i, len(mine)) for i in range(len(mine))]
        assert all(item[6] == n - 1 and item[7] == lowest for item in mine)
        assert mine[0][4] == lowest // tile * tile
        assert mine[-1][5] == keys
        assert all(a[5] == b[4] and a[5] % tile == 0 for a, b in pairwise(mine))
        assert all(item[5] > item[4] for item in mine) or len(mine) == 1
        widths = [math.ceil((item[5] - item[4]) / tile) for item in mine]
        assert max(widths) - min(widths) <= 1
        assert rows.token_ids[row] == tokens[slot, n - 1]
        assert rows.positions[row] == n - 1
        place = (n - 1) // block_size
        assert rows.cache_slots[row] == block_table[slot, place] * block_size + (n - 1) % block_size


def test_decode_plan_refuses_too_few_places() -> None:
    table = ints([[0]])
    with pytest.raises(InvalidConfig, match="at least 2 places, not 1"):
        plan_decode(
            ints([0]), ints([1]), table, table, ints([[0] * 8]), tile=16, block_size=16, max_splits=2
        )  # fmt: skip


# ---------------------------------------------------------------- heads and caches


def transform(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, positions: int, bias: bool, qk_norm: bool
) -> HeadTransform:
    angles = torch.rand(positions, rotary_dim // 2) * 6
    return HeadTransform(
        num_heads,
        num_kv_heads,
        head_dim,
        angles.cos().to(DEVICE),
        angles.sin().to(DEVICE),
        normal((num_heads + 2 * num_kv_heads) * head_dim) if bias else None,
        norm_weight(head_dim) if qk_norm else None,
        norm_weight(head_dim) if qk_norm else None,
    )


def transformed(heads: HeadTransform, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of rows [T, (heads + 2 kv_heads) * head_dim], each [T, heads, head_dim] float64."""
    x = qkv.double() if heads.bias is None else qkv.double() + heads.bias.double()
    q, k, v = x.view(len(qkv), -1, heads.head_dim).split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 1)
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = reference.rms_norm(q, heads.q_norm, heads.eps), reference.rms_norm(k, heads.k_norm, heads.eps)
    cos, sin = heads.cos[positions.long()], heads.sin[positions.long()]
    return reference.rotate(q, cos, sin), reference.rotate(k, cos, sin), v


class Paged:
    """A cache of sequences with shuffled blocks; whatever belongs to no token is NaN."""

    def __init__(
        self, lengths: list[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = DTYPE
    ) -> None:
        width = max(-(-(n + 1) // block_size) for n in lengths)
        num_blocks = 1 + len(lengths) * width
        self.lengths, self.block_size = lengths, block_size
        self.block_table = (torch.randperm(num_blocks - 1)[: len(lengths) * width] + 1).int().view(-1, width).to(DEVICE)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        scales = (0.5, 0.25) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
        self.cache = PagedCache(poisoned(*shape).to(dtype), poisoned(*shape).to(dtype), *scales)
        for seq, n in enumerate(lengths):
            for position in range(n):
                self.put(seq, position, normal(num_kv_heads, head_dim), normal(num_kv_heads, head_dim))

    def place(self, seq: int, position: int) -> tuple[int, int]:
        return int(self.block_table[seq, position // self.block_size]), position % self.block_size

    def put(self, seq: int, position: int, key: Tensor, value: Tensor) -> None:
        block, offset = self.place(seq, position)
        self.cache.key[block, :, offset] = (key / self.cache.key_scale).to(self.cache.key.dtype)
        self.cache.value[block, :, offset] = (value / self.cache.value_scale).to(self.cache.value.dtype)

    def context(self, seq: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first positions, [length, kv_heads, head_dim] float64."""
        key = reference.gather_context(self.cache.key, self.block_table[seq], length) * self.cache.key_scale
        value = reference.gather_context(self.cache.value, self.block_table[seq], length) * self.cache.value_scale
        return key, value


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "bias", "qk_norm", "fp8"),
    [(6, 2, 64, 64, True, False, False), (4, 4, 80, 32, False, False, False), (4, 1, 96, 96, True, True, True)],
)
def test_rope_cache(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, bias: bool, qk_norm: bool, fp8: bool
) -> None:
    heads = transform(num_heads, num_kv_heads, head_dim, rotary_dim, 50, bias, qk_norm)
    paged = Paged([40, 20], num_kv_heads, head_dim, 16, torch.float8_e4m3fn if fp8 else DTYPE)
    positions = [39, -1, 19, 7]
    places = [paged.place(0, 39), (0, 0), paged.place(1, 19), paged.place(0, 7)]
    qkv = normal(4, (num_heads + 2 * num_kv_heads) * head_dim)
    before, key_before = qkv.clone(), paged.cache.key.clone()
    rope_cache(qkv, heads, paged.cache, ints(positions), ints([b * 16 + o for b, o in places]))
    live = [0, 2, 3]
    q, k, v = transformed(heads, before[live], ints(positions)[live])
    size = num_heads * head_dim
    close(qkv[live, :size], q.flatten(1))
    assert torch.equal(qkv[1], before[1])
    for i, row in enumerate(live):
        block, offset = places[row]
        tolerance = FP8_TOLERANCE if fp8 else TOLERANCE
        close(paged.cache.key[block, :, offset].double() * paged.cache.key_scale, k[i], tolerance)
        close(paged.cache.value[block, :, offset].double() * paged.cache.value_scale, v[i], tolerance)
        key_before[block, :, offset] = paged.cache.key[block, :, offset]
    same = paged.cache.key.view(torch.uint8) == key_before.view(torch.uint8)
    assert same.all(), "a place of another token was written"


def test_fp8_cache_clamps_what_it_cannot_hold() -> None:
    heads = transform(1, 1, 64, 64, 4, False, False)
    paged = Paged([2], 1, 64, 16, torch.float8_e4m3fn)
    qkv = normal(1, 192)
    qkv[:, 128:] = 1e4
    rope_cache(qkv, heads, paged.cache, ints([1]), ints([paged.place(0, 1)[0] * 16 + 1]))
    block, offset = paged.place(0, 1)
    assert (paged.cache.value[block, 0, offset].float() == 448).all()


# heads, kv heads, head_dim, rotary_dim, block_size, tile, fused, bias, qk_norm, window, softcap, fp8
DECODES = [
    (6, 2, 64, 64, 32, 16, True, True, False, None, None, False),
    (4, 2, 64, 64, 16, 32, True, False, True, None, None, False),
    (4, 4, 80, 32, 16, 16, False, False, False, None, 5.0, False),
    (4, 1, 96, 96, 16, 32, True, False, False, 24, None, False),
    (2, 1, 128, 128, 16, 16, False, False, False, 20, 8.0, False),
    (2, 1, 256, 256, 16, 16, False, False, False, None, None, False),
    (20, 1, 64, 64, 16, 16, False, False, False, None, None, True),
    (2, 1, 64, 64, 16, 16, True, False, False, 1, None, False),
]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size", "tile", "fused", "bias", "qk_norm", "window",
     "softcap", "fp8"),
    DECODES,
)  # fmt: skip
@pytest.mark.parametrize("large", [False, *([True] if GPU else [])])
def test_decode_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, tile: int, fused: bool,
    bias: bool, qk_norm: bool, window: int | None, softcap: float | None, fp8: bool, large: bool,
) -> None:  # fmt: skip
    lengths = [1, 33, 70, 16] if not large else [1, 2, 64, 65, 129, 700, 1500, 300, 17, 1000, 333]
    heads = transform(num_heads, num_kv_heads, head_dim, rotary_dim, max(lengths), bias, qk_norm)
    paged = Paged(lengths, num_kv_heads, head_dim, block_size, torch.float8_e4m3fn if fp8 else DTYPE)
    slots = list(range(len(lengths)))
    random.shuffle(slots)
    slots.insert(1, -1)
    live = [row for row, slot in enumerate(slots) if slot >= 0]
    positions = [lengths[slots[row]] - 1 for row in live]
    qkv = normal(len(slots), (num_heads + 2 * num_kv_heads) * head_dim)
    q, k, v = transformed(heads, qkv[live], ints(positions))
    if not fused:
        places = [paged.place(slots[row], position) for row, position in zip(live, positions, strict=True)]
        full = [-1] * len(slots), [0] * len(slots)
        for row, position, (block, offset) in zip(live, positions, places, strict=True):
            full[0][row], full[1][row] = position, block * block_size + offset
        rope_cache(qkv, heads, paged.cache, ints(full[0]), ints(full[1]))
    config = DecodeAttentionConfig(tile, 2, 2, 8)
    places_ = num_places(len(slots), num_kv_heads, config.max_splits, programs=16)
    items = torch.zeros(places_, ITEM_FIELDS, dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int32, device=DEVICE)
    plan_decode(
        ints(slots), ints(lengths), tokens, paged.block_table, items, tile=tile, block_size=block_size,
        max_splits=config.max_splits, min_tokens=tile, window=window, new_in_cache=not fused,
    )  # fmt: skip
    workspace = DecodeWorkspace(len(slots), places_, heads, torch.device(DEVICE))
    outs = []
    for _ in range(2):
        out = poisoned(len(slots), num_heads * head_dim)
        decode_attention(
            qkv, heads, paged.cache, paged.block_table, items, workspace, out, config, scale=head_dim**-0.5,
            softcap=softcap, window=window is not None, fused=fused,
        )  # fmt: skip
        outs.append(out)
    assert torch.equal(outs[0][live], outs[1][live])
    assert outs[0][1].isnan().all(), "a padding row was written"
    assert not workspace.arrivals.any()
    assert window == 1 or (items[:, 3] > 1).any(), "no row was split"
    for i, row in enumerate(live):
        seq, n = slots[row], lengths[slots[row]]
        key, value = paged.context(seq, n)
        close(key[-1], k[i], FP8_TOLERANCE if fp8 else TOLERANCE)
        close(value[-1], v[i], FP8_TOLERANCE if fp8 else TOLERANCE)
        expected = reference.attention(q[i][None], key, value, head_dim**-0.5, softcap, window)
        close(outs[0][row], expected.flatten(), 2e-2 if GPU else TOLERANCE)


def test_decode_attention_does_not_read_past_a_sequence() -> None:
    """With the last position's K and V taken away the answer must change: the test above can fail."""
    heads = transform(2, 1, 64, 64, 20, False, False)
    paged = Paged([20], 1, 64, 16)
    config = decode_attention_config(1, 64)
    outs = []
    for length in (20, 19):
        items = torch.zeros(4, ITEM_FIELDS, dtype=torch.int32, device=DEVICE)
        plan_decode(
            ints([0]), ints([length]), ints([[0] * 20]), paged.block_table, items, tile=config.tile, block_size=16,
            max_splits=config.max_splits,
        )  # fmt: skip
        out = poisoned(1, 128)
        torch.manual_seed(5)
        workspace = DecodeWorkspace(1, 4, heads, torch.device(DEVICE))
        decode_attention(
            normal(1, 256), heads, paged.cache, paged.block_table, items, workspace, out, config, scale=0.125
        )
        outs.append(out)
    assert not torch.allclose(outs[0], outs[1], rtol=1e-2)


# query lengths and contexts; one row, none, a whole prompt, a chunk behind a prefix
PREFILLS = [
    (6, 2, 64, 16, None, None, False, False),
    (4, 4, 80, 16, None, 5.0, False, False),
    (4, 2, 64, 16, 20, None, False, False),
    (2, 1, 128, 32, None, None, False, True),
    (2, 2, 64, 32, 24, None, False, True),
    (4, 1, 96, 16, None, None, True, False),
    (2, 1, 256, 16, 7, 8.0, False, False),
]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window", "softcap", "fp8", "bulk"), PREFILLS
)
@pytest.mark.parametrize("large", [False, *([True] if GPU else [])])
def test_prefill_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None, softcap: float | None,
    fp8: bool, bulk: bool, large: bool,
) -> None:  # fmt: skip
    query_lens, contexts = [1, 37, 0, 20, 9, 1], [50, 37, 12, 45, 9, 1]
    config = PrefillAttentionConfig(32, 32, 2, 2, bulk)
    if large:
        block_size = max(block_size, 64) if bulk else block_size
        query_lens, contexts = [1, 1500, 700, 64, 333], [900, 1500, 1000, 300, 333]
        config = prefill_attention_config(head_dim, block_size, torch.cuda.get_device_capability(), 1 if fp8 else 2)
    paged = Paged(contexts, num_kv_heads, head_dim, block_size, torch.float8_e4m3fn if fp8 else DTYPE)
    starts = np.cumsum([0, *query_lens])
    slots = list(range(len(contexts)))
    skipped = 4
    # Sequences stand in any order in the table, and the query is part of a wider tensor.
    order = torch.randperm(len(contexts))
    table = torch.empty_like(paged.block_table)
    table[order] = paged.block_table
    slots = [-1 if i == skipped else int(order[i]) for i in range(len(contexts))]
    query = normal(int(starts[-1]), (num_heads + 2 * num_kv_heads) * head_dim)
    outs = []
    for _ in range(2):
        out = poisoned(int(starts[-1]), num_heads * head_dim)
        prefill_attention(
            query, paged.cache, ints(starts.tolist()), ints(contexts), ints(slots), table, out, config,
            num_heads=num_heads, scale=head_dim**-0.5, softcap=softcap, window=window,
        )  # fmt: skip
        outs.append(out)
    for i, context in enumerate(contexts):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        if i == skipped:
            assert outs[0][rows].isnan().all()
        elif query_lens[i]:
            assert torch.equal(outs[0][rows], outs[1][rows])
            q = query[rows, : num_heads * head_dim].view(-1, num_heads, head_dim)
            expected = reference.attention(q, *paged.context(i, context), head_dim**-0.5, softcap, window)
            close(outs[0][rows], expected.flatten(1), 2e-2 if GPU else TOLERANCE)


def test_prefill_attention_refuses() -> None:
    paged = Paged([4], 1, 96, 16)
    arguments = (normal(4, 96), paged.cache, ints([0, 4]), ints([4]), ints([0]), paged.block_table, poisoned(4, 96))
    with pytest.raises(InvalidConfig, match="head_dim=96"):
        prefill_attention(*arguments, PrefillAttentionConfig(16, 16, 1, 1, True), num_heads=1, scale=0.1)
    with pytest.raises(InvalidConfig, match="32 query heads"):
        prefill_attention(*arguments, PrefillAttentionConfig(16, 16, 1, 1), num_heads=32, scale=0.1)


# ---------------------------------------------------------------- slots


def test_changes_reach_their_places() -> None:
    fields = {
        "tokens": Field(torch.int32, 1500),
        "length": Field(torch.int32),
        "seed": Field(torch.int64),
        "top_p": Field(torch.float32),
        "bias": Field(torch.float32, 5),
    }
    tables = SlotTables(4, fields, DEVICE)
    changes = Changes(tables)
    prompt = list(range(1, 1301))
    changes.write("tokens", 2, prompt)
    changes.write("tokens", 2, [9, 8], start=1300)
    changes.write("tokens", 0, [5], start=1499)
    changes.write("length", 2, 7)
    changes.write("length", 2, 1302)
    changes.write("seed", 3, -(2**62) - 5)
    changes.write("top_p", 1, 0.1)
    changes.write("bias", 3, [1.5, -2.0], start=3)
    changes.write("bias", 0, [])
    changes.apply()
    assert tables["tokens"][2, :1302].tolist() == [*prompt, 9, 8]
    assert tables["tokens"][0, 1499] == 5
    assert tables["tokens"][[1, 3]].count_nonzero() == 0 and tables["tokens"][2, 1302:].count_nonzero() == 0
    assert tables["length"].tolist() == [0, 0, 1302, 0]
    assert tables["seed"].tolist() == [0, 0, 0, -(2**62) - 5]
    assert tables["top_p"].tolist() == pytest.approx([0, 0.1, 0, 0])
    assert tables["bias"][3, :5].tolist() == [0, 0, 0, 1.5, -2.0]
    assert tables["tokens"].stride(0) % 16 == 0
    changes.apply()  # nothing left


def test_changes_refuse_places_outside() -> None:
    changes = Changes(SlotTables(2, {"tokens": Field(torch.int32, 4)}, DEVICE))
    for slot, values, start in ((2, [1], 0), (0, [1, 2], 3), (0, [1], -1)):
        with pytest.raises(InvalidConfig, match=r"tokens\["):
            changes.write("tokens", slot, values, start)
    with pytest.raises(InvalidConfig, match="bfloat16"):
        SlotTables(1, {"x": Field(torch.bfloat16)}, DEVICE)


# ---------------------------------------------------------------- sampling


def rows_of(params: list[Sampling], vocab_size: int, lengths: list[int] | None = None) -> SamplingRows:
    """One slot for each, in order, over stale rows of former sequences."""
    tables = SlotTables(len(params), sampling_fields(vocab_size, stop_width=4, bias_width=8), DEVICE)
    rows = sampling_rows(tables, vocab_size)
    for stale in (rows.stop_ids, rows.bias_ids, rows.bitmask):
        stale.fill_(1)
    rows.length.copy_(ints(lengths or [10] * len(params)))
    rows.min_length.copy_(rows.length + 1)
    rows.seed.copy_(torch.arange(len(params)) + 1000)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(rows, name).copy_(torch.tensor([getattr(p, name) for p in params]))
    for name in ("repetition", "presence", "frequency"):
        getattr(rows, f"{name}_penalty").copy_(torch.tensor([getattr(p, name) for p in params]))
    for slot, p in enumerate(params):
        features = 0
        if (p.repetition, p.presence, p.frequency) != (1.0, 0.0, 0.0):
            features |= PENALTIES
        if p.bias:
            features |= BIAS
            rows.num_bias[slot] = len(p.bias)
            rows.bias_ids[slot, : len(p.bias)] = ints([token for token, _ in p.bias])
            rows.bias_values[slot, : len(p.bias)] = torch.tensor([value for _, value in p.bias])
        if p.allowed is not None:
            features |= BITMASK
            words = np.zeros(rows.bitmask.shape[1], dtype=np.uint32)
            for token in p.allowed:
                words[token // 32] |= np.uint32(1 << (token % 32))
            rows.bitmask[slot] = torch.from_numpy(words.view(np.int32)).to(DEVICE)
        if p.ruled_out:
            features |= MIN_TOKENS
            rows.num_stop[slot] = len(p.ruled_out)
            rows.stop_ids[slot, : len(p.ruled_out)] = ints(p.ruled_out)
        if p.top_k or p.top_p < 1 or p.min_p:
            features |= CUT
        rows.features[slot] = features
        for token, generated, in_prompt in p.counts:
            rows.counts[slot, token] = 2 * generated + in_prompt
    return rows


def test_edit_logits() -> None:
    vocab_size = 5000
    counts = ((4, 0, True), (7, 3, False), (4100, 1, True), (9, 2, False))
    params = [
        Sampling(),
        Sampling(repetition=1.3, counts=counts),
        Sampling(presence=0.7, frequency=-0.5, counts=counts),
        Sampling(allowed=(0, 31, 32, 4097, 4999)),
        Sampling(ruled_out=(3, 4098, 12)),
        Sampling(bias=((7, 2.5), (4100, -100.0), (4999, 1.0))),
        Sampling(
            repetition=0.8, presence=0.3, frequency=0.2, counts=counts, bias=((7, -1.5), (4100, 3.0), (3, 1.0)),
            allowed=(3, 4, 7, 9, 4100), ruled_out=(9,),
        ),
    ]  # fmt: skip
    rows = rows_of(params, vocab_size)
    slots = [6, 1, -1, 5, 0, 2, 4, 3]
    logits = normal(len(slots), vocab_size)
    edited = poisoned(*logits.shape, dtype=torch.float32)
    edit_logits(logits, edited, ints(slots), rows)
    for row, slot in enumerate(slots):
        if slot <= 0:
            assert edited[row].isnan().all(), "a row without edits was written"
            continue
        expected = reference.edit_logits(logits[row], params[slot])
        torch.testing.assert_close(edited[row], expected, atol=2e-6, rtol=2e-6)


def test_edits_end_and_hide_no_fault() -> None:
    params = [Sampling(ruled_out=(3,)), Sampling(allowed=(5,)), Sampling(allowed=(5,))]
    rows = rows_of(params, 64)
    rows.min_length[0] = 10  # of length 10: long enough
    logits = normal(3, 64)
    logits[1, 2], logits[2, 3] = NAN, float("inf")
    edited = poisoned(3, 64, dtype=torch.float32)
    edit_logits(logits, edited, ints([0, 1, 2]), rows)
    assert torch.equal(edited[0], logits[0].float())
    assert edited[1, 2].isnan() and edited[2, 3] == float("inf")


def test_count_tokens() -> None:
    rows = rows_of([Sampling(), Sampling(presence=1.0)], 5000, lengths=[3, 1200])
    rows.counts.fill_(-3)
    tokens = torch.randint(0, 5000, (2, 1300), dtype=torch.int32, device=DEVICE)
    tokens[1, 5] = 77
    tokens[1, 1100:1110] = 77
    count_tokens(rows, tokens, ints([1]), ints([1000]), 1200)
    known = tokens[1, :1200].long()
    expected = 2 * torch.bincount(known[1000:], minlength=5000)
    expected[known[:1000].unique()] += 1
    assert torch.equal(rows.counts[1].long(), expected)
    assert rows.counts[1, 77] >= 21
    assert (rows.counts[0] == -3).all()


def cut_by_kernels(logits: Tensor, params: list[Sampling]) -> Cut:
    rows = rows_of(params, logits.shape[1])
    workspace = CutWorkspace(len(params), logits.shape[1], DEVICE)
    workspace.cut.values.fill_(NAN)
    return cut_tail(logits, ints(list(range(len(params)))), rows, workspace)


def assert_cut(logits: Tensor, params: list[Sampling]) -> None:
    cut = cut_by_kernels(logits, params)
    for row, p in enumerate(params):
        if p == Sampling(temperature=p.temperature):
            assert cut.values[row].isnan(), "a row without a cut was written"
            continue
        x, ids = logits[row].float(), torch.arange(logits.shape[1], device=DEVICE)
        stays = (x > cut.values[row]) | ((x == cut.values[row]) & (ids <= cut.ids[row]))
        stays &= x > float("-inf")
        found = set(stays.nonzero()[:, 0].tolist())
        expected = reference.kept_tokens(logits[row].cpu(), p)
        assert found == expected, (p, len(found), len(expected), sorted(found ^ expected)[:5])


CUTS = [
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.0),
    Sampling(temperature=1.3, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.3),
    Sampling(temperature=0.5, top_p=1e-6),
    Sampling(temperature=2.0, min_p=0.05),
    Sampling(temperature=1.0, top_k=20, top_p=0.8),
    Sampling(temperature=0.9, top_k=40, top_p=0.6, min_p=0.02),
    Sampling(temperature=1.0, top_k=10**6, top_p=0.5),
    Sampling(temperature=1.0, top_k=150, top_p=0.999),
]


@pytest.mark.parametrize(("vocab_size", "ties"), [(300, False), (300, True), (9000, True)])
def test_cut_tail(vocab_size: int, ties: bool) -> None:
    """At 9000 tokens the candidates are too many where no k bounds them: the whole row is searched."""
    logits = torch.randn(len(CUTS), vocab_size) * 3
    logits = (logits * 2).round() / 2 if ties else logits
    logits[:, 7] = float("-inf")
    assert_cut(logits.to(DEVICE), CUTS)


def test_cut_tail_of_a_large_vocabulary() -> None:
    """Candidates suffice for a peaked row; for a flat one the cut lies below them."""
    logits = torch.randn(4, 70000) * 4
    logits[2] *= 0.05
    logits[3] = (logits[3] * 8).round() / 8
    params = [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_k=50),
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=0.6, top_k=20, top_p=0.95),
    ]
    assert_cut(logits.to(DEVICE), params)


def test_cut_tail_keeps_whole_rows_that_allow_one_token() -> None:
    logits = torch.full((2, 200), float("-inf"))
    logits[:, 150] = -3.0
    assert_cut(logits.to(DEVICE), [Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_p=0.5)])


def test_cut_tail_of_equal_logits() -> None:
    """No group of tokens stands out, so there are no candidates."""
    assert_cut(torch.full((1, 9000), 2.5, device=DEVICE), [Sampling(temperature=1.0, top_k=5)])


def run_sample(
    logits: Tensor, rows: SamplingRows, slots: list[int], edited: Tensor | None = None, cut: Cut | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens by row, faults by row, the slots' token table)."""
    samples = Samples(len(slots), logits.shape[1], DEVICE)
    samples.tokens.fill_(-7)
    tokens = torch.full((len(rows.length), 20), -7, dtype=torch.int32, device=DEVICE)
    sample(logits, ints(slots), rows, samples, edited=edited, cut=cut)
    advance(samples, ints(slots), rows, tokens, 16)
    return samples.tokens, samples.faults, tokens


def test_greedy_takes_the_lowest_of_equal_ids_and_moves_on() -> None:
    vocab_size = 2 * 4096 + 50
    rows = rows_of([Sampling()] * 4, vocab_size, lengths=[10, 3, 16, 5])
    logits = normal(4, vocab_size)
    logits[0, [4500, 8200, 4100]] = 50.0
    logits[1, vocab_size - 1] = 60.0
    logits[3, 0] = 60.0
    sampled, faults, tokens = run_sample(logits, rows, [0, 1, -1, 2])
    assert sampled.tolist() == [4100, vocab_size - 1, -7, 0]
    assert faults.tolist() == [0, 0, 0, 0]
    assert tokens[0, 10] == 4100 and tokens[1, 3] == vocab_size - 1
    assert rows.length.tolist() == [11, 4, 16, 5], "a full slot or one not in the batch moved"
    assert (tokens != -7).sum() == 2


def test_sampling_counts_what_it_generates() -> None:
    rows = rows_of([Sampling(presence=1.0, counts=((3, 1, True),)), Sampling()], 64)
    logits = normal(2, 64)
    logits[:, 3] = 50.0
    edited = logits.float()
    run_sample(logits, rows, [0, 1], edited=edited)
    assert rows.counts[0, 3] == 5 and rows.counts[1].count_nonzero() == 0


def test_draws_follow_softmax_and_do_not_depend_on_the_batch() -> None:
    draws, hot = (20000 if GPU else 120), [3, 17, 40, 41, 98]
    logits = torch.full((1, 100), -30.0)
    logits[0, hot] = torch.tensor([1.0, 0.5, 2.0, 1.5, 0.0])
    temperature = 0.7
    p = torch.softmax(logits[0] / temperature, -1)[hot]
    rows = rows_of([Sampling(temperature=temperature)] * draws, 100)
    batch = logits.to(DEVICE).expand(draws, -1).contiguous()
    sampled = run_sample(batch, rows, list(range(draws)))[0].cpu()
    observed = torch.tensor([(sampled == token).sum() for token in hot]).double()
    assert observed.sum() == draws
    chi_square = ((observed - draws * p.double()) ** 2 / (draws * p.double())).sum()
    assert chi_square < 18.5, "p < 0.001 with four degrees of freedom"
    rows = rows_of([Sampling(temperature=temperature)] * 30, 100)
    alone = run_sample(batch[:1], rows, [23])[0]
    assert alone[0] == sampled[23]
    again = run_sample(batch[:1], rows, [23])[0]  # one position further on
    more = [run_sample(batch[:1], rows, [23])[0].item() for _ in range(3)]
    assert {again.item(), *more} != {alone.item()}


@triton.jit
def gumbel_kernel(bits, out, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(out + i, gumbel(tl.load(bits + i)))


def test_noise_is_finite_and_exact_in_its_tail() -> None:
    bits = [0, 1, 2**20, 2**31 - 1, -(2**31), -1, -2, -130]
    out = poisoned(8, dtype=torch.float32)
    gumbel_kernel[(1,)](ints(bits), out, size=8)
    v = (torch.tensor([b % 2**32 for b in bits], dtype=torch.float64) + 0.5) / 2**32
    expected = -torch.log(-torch.log1p(-v))
    assert out.isfinite().all()
    torch.testing.assert_close(out.cpu().double()[:5], expected[:5], atol=1e-5, rtol=1e-5)


def test_cut_and_edited_rows_bind_the_draw() -> None:
    vocab_size, n = 600, 5
    params = [Sampling(temperature=3.0, top_k=3, allowed=tuple(range(100, 140)))] * n
    rows = rows_of(params, vocab_size)
    logits, slots = normal(n, vocab_size), list(range(n))
    edited = poisoned(n, vocab_size, dtype=torch.float32)
    edit_logits(logits, edited, ints(slots), rows)
    cut = cut_tail(logits, ints(slots), rows, CutWorkspace(n, vocab_size, DEVICE), edited=edited)
    sampled = run_sample(logits, rows, slots, edited, cut)[0].tolist()
    best = [set((logits[row, 100:140].float().topk(3).indices + 100).tolist()) for row in range(n)]
    assert all(token in allowed for token, allowed in zip(sampled, best, strict=True))
    assert len({sorted(allowed).index(token) for token, allowed in zip(sampled, best, strict=True)}) > 1


def test_a_cut_keeps_the_token_it_names_and_none_behind() -> None:
    n = 6
    rows = rows_of([Sampling(temperature=1.0, top_k=1)] * n, 64)
    logits = normal(n, 64)
    logits[:, [9, 10, 30]] = 7.0
    cut = Cut(torch.full((n,), 7.0, device=DEVICE), ints([9] * n))
    assert run_sample(logits, rows, list(range(n)), cut=cut)[0].tolist() == [9] * n


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_faults_are_told_apart(temperature: float) -> None:
    rows = rows_of([Sampling(temperature=temperature)] * 5, 5000)
    logits = normal(5, 5000)
    logits[0, 4500] = NAN
    logits[1, 17] = float("inf")
    logits[2] = float("-inf")
    logits[3, 10:] = float("-inf")
    sampled, faults, _ = run_sample(logits, rows, [0, 1, 2, 3, 4])
    assert faults.tolist() == [NOT_A_NUMBER, INFINITE, NOTHING_ALLOWED, 0, 0]
    assert sampled[:3].tolist() == [0, 0, 0] and 0 <= sampled[3] < 10


def test_token_logprobs() -> None:
    vocab_size = 4096 + 300
    logits = (normal(5, vocab_size).float() * 8).round().div(4).to(DTYPE)  # many equal ones
    asked = [0, 0, -1, 20, 5 if GPU else 0]
    slots = [4, 1, 2, -1, 3]
    targets = [4200, 7, 9, 11, 0]
    workspace = LogprobsWorkspace(5, vocab_size, DEVICE)
    workspace.values.fill_(NAN)
    workspace.ids.fill_(-7)
    workspace.ranks.fill_(-7)
    token_logprobs(logits, ints(targets), ints(slots), ints(asked), workspace)
    for row, slot in enumerate(slots):
        k = -1 if slot < 0 else asked[slot]
        if k < 0:
            assert workspace.values[row].isnan().all() and workspace.ranks[row] == -7
            continue
        ids, values, rank = reference.token_logprobs(logits[row].cpu(), targets[row], k)
        assert workspace.ids[row, : k + 1].tolist() == ids
        assert workspace.values[row, : k + 1].tolist() == pytest.approx(values, abs=2e-5)
        assert workspace.ranks[row] == rank
        assert workspace.values[row, k + 1 :].isnan().all()
