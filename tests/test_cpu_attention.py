"""The C++ attention kernel equals the double-precision reference on ragged, shuffled, poisoned caches."""

import dataclasses

import pytest
import torch

from octavo.attention.cpu import NativeAttention
from octavo.kernels import reference
from octavo.kernels.cpu.library import library
from test_attention import STEPS, Sequences

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler for the CPU kernels")

CHUNK = 256  # keys whose scores the kernel holds at once


def sequences(lengths: list[int], block_size: int, *shape: int, dtype: torch.dtype = torch.float32) -> Sequences:
    """On the C++ kernel, over a cache full of NaN: what was not written must not be read."""
    found = Sequences(lengths, block_size, *shape, dtype=dtype)
    found.backend = NativeAttention(found.spec, block_size, library())  # type: ignore[assignment]
    for side in found.cache:
        side.fill_(float("nan"))
    return found


def check(s: Sequences, chunks: dict[int, int], *, atol: float = 1e-5, window: int | None = None, **options: float):
    softcap, scale = options.get("softcap"), options.get("scale", 0.25)
    for i, found in s.step(chunks, window=window, softcap=softcap, scale=scale).items():
        end, rows = s.done[i], chunks[i]
        wanted = reference.attention(
            s.query[i][end - rows : end], s.key[i][:end], s.value[i][:end], scale, softcap, window
        )
        torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=0)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.case("KV-04")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32])
def test_mixed_steps(block_size: int, window: int | None, softcap: float | None) -> None:
    s = sequences([4, 20, 50, 40, 10], block_size)
    for chunks in STEPS:
        check(s, chunks, window=window, softcap=softcap)


@pytest.mark.case("MOD-01")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 1, 16), (4, 4, 24), (6, 2, 24), (1, 1, 8), (9, 3, 64), (4, 1, 256), (8, 8, 96), (64, 1, 32), (5, 1, 10)],
)
def test_head_shapes(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    for block_size in (16, 6):
        s = sequences([20, 133, 9], block_size, heads, kv_heads, dim, dtype=dtype)
        check(s, {0: 11, 2: 8, 1: 100}, scale=dim**-0.5, atol=atol)
        check(s, {1: 17, 0: 1, 2: 1}, scale=dim**-0.5, atol=atol, softcap=20.0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 300, 40])
def test_long_contexts_in_parts(window: int | None) -> None:
    """More keys than scores are held at once; few rows, whose keys several threads share."""
    s = sequences([5 * CHUNK, 3 * CHUNK + 5], 16, 3, 1, 32)
    check(s, {0: 5 * CHUNK - 7, 1: 3 * CHUNK}, window=window)
    check(s, {0: 1, 1: 1}, window=window)
    check(s, {0: 1}, window=window)
    check(s, {1: 3, 0: 2}, window=window)


def test_large_scores() -> None:
    """Peaks that grow from chunk to chunk, and softmax far from even."""
    s = sequences([2 * CHUNK + 9], 16)
    s.key[0] *= torch.linspace(1, 30, len(s.key[0]))[:, None, None]
    check(s, {0: 2 * CHUNK}, atol=5e-5)
    check(s, {0: 1}, atol=5e-5)


def test_numbers_that_are_none_stay_with_their_sequence() -> None:
    s = sequences([20, 20], 16)
    s.value[0][3, 0] = float("nan")
    s.key[0][5, 1] = float("inf")
    check_rows = s.step({0: 10, 1: 10})
    assert check_rows[0][3:, :2].isnan().all() and not check_rows[1].isnan().any()


def test_what_the_kernel_refuses() -> None:
    s = sequences([8], 16)
    assert s.backend.refuses(s.spec) is None
    assert "float16" in (s.backend.refuses(dataclasses.replace(s.spec, dtype="float16")) or "")
    assert "even" in (s.backend.refuses(dataclasses.replace(s.spec, head_dim=9)) or "")
