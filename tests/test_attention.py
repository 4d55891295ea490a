"""The torch backend equals attention written out by hand, for every mixture of chunks, windows and shapes."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

import tiny_models
from octavo.attention import torch_ref
from octavo.attention.torch_ref import TorchAttention
from octavo.batch import Batch
from octavo.model_spec import ModelSpec

SPEC = ModelSpec.from_config({**tiny_models.F_BPE, "architectures": ["LlamaForCausalLM"]})


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """The last rows of one sequence: query [T, heads, D], all its keys and values [L, kv_heads, D]; float64."""
    rows, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    out = torch.empty_like(query, dtype=torch.float64)
    for row in range(rows):
        position = length - rows + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            own = slice(first, position + 1), head // (heads // kv_heads)
            scores = key[own].double() @ query[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ value[own].double()
    return out


class Sequences:
    """Random K, V and queries of whole sequences, and their blocks, scattered over one cache."""

    def __init__(
        self,
        lengths: list[int],
        block_size: int,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.size, self.lengths, self.dtype = block_size, lengths, dtype
        self.spec = dataclasses.replace(
            SPEC, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=str(dtype)[6:]
        )
        self.query = [torch.randn(n, heads, head_dim).to(dtype) for n in lengths]
        self.key = [torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths]
        self.value = [torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths]
        per_sequence = -(-max(lengths) // block_size)
        numbers = list(range(1, 1 + per_sequence * len(lengths)))
        random.Random(0).shuffle(numbers)
        self.tables = [[numbers.pop() for _ in range(per_sequence)] for _ in lengths]
        shape = (1 + per_sequence * len(lengths), block_size, kv_heads, head_dim)
        self.cache = (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        self.backend = TorchAttention(self.spec, block_size)
        self.done = [0] * len(lengths)

    def step(
        self,
        chunks: dict[int, int],
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float = 0.25,
    ) -> dict[int, Tensor]:
        """Attend with the next `chunks[i]` rows of sequence i; each one's rows of the output."""
        starts, slots = [0], []
        before = list(self.done)
        for i, length in chunks.items():
            positions = range(self.done[i], self.done[i] + length)
            slots += [self.tables[i][p // self.size] * self.size + p % self.size for p in positions]
            self.done[i] += length
            starts.append(len(slots))
        used = max(1, *(-(-self.done[i] // self.size) for i in chunks))
        batch = Batch(
            token_ids=torch.zeros(len(slots), dtype=torch.int64),
            positions=torch.zeros(len(slots), dtype=torch.int64),
            cache_slots=torch.tensor(slots, dtype=torch.int64),
            block_table=torch.tensor([self.tables[i][:used] for i in chunks]),
            query_starts=starts,
            context_lens=[self.done[i] for i in chunks],
        )
        rows = [
            torch.cat([side[i][before[i] : self.done[i]] for i in chunks])
            for side in (self.query, self.key, self.value)
        ]
        plan = self.backend.plan(batch, window)
        out = self.backend.forward(rows[0], rows[1], rows[2], self.cache, plan, scale, softcap)
        return {i: out[starts[n] : starts[n + 1]] for n, i in enumerate(chunks)}

    def wanted(
        self, i: int, rows: int, *, window: int | None = None, softcap: float | None = None, scale: float = 0.25
    ) -> Tensor:
        end = self.done[i]
        return by_hand(self.query[i][end - rows : end], self.key[i][:end], self.value[i][:end], scale, softcap, window)

    def check(
        self,
        chunks: dict[int, int],
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float = 0.25,
        atol: float = 1e-5,
    ) -> None:
        for i, found in self.step(chunks, window=window, softcap=softcap, scale=scale).items():
            wanted = self.wanted(i, chunks[i], window=window, softcap=softcap, scale=scale)
            assert found.dtype == self.dtype
            torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=0)


STEPS: list[dict[int, int]] = [
    {0: 1, 1: 9, 2: 30, 4: 5},  # first rows: one alone, and prompts from position 0
    {3: 25, 0: 1, 2: 10, 4: 1},  # later chunks of a prompt beside decodes
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},  # decodes only, of similar and of very different lengths
    {4: 0, 1: 1, 3: 7},  # a chunk without rows
    {2: 1, 1: 1},  # in another order than before
]


@pytest.mark.case("KV-04")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize(("block_size", "piece_rows"), [(1, 128), (4, 8), (16, 7)])
def test_mixed_steps(
    block_size: int, piece_rows: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ref, "PIECE_ROWS", piece_rows)
    monkeypatch.setattr(torch_ref, "FEW_KEYS", 100 * piece_rows)
    sequences = Sequences([4, 20, 50, 40, 10], block_size)
    for chunks in STEPS:
        sequences.check(chunks, window=window, softcap=softcap)


@pytest.mark.case("MOD-01")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 16), (4, 4, 24), (6, 2, 24), (1, 1, 8)])
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    for softcap in (None, 30.0):
        sequences = Sequences([20, 33, 9], 4, heads, kv_heads, head_dim)
        sequences.check({0: 11, 2: 8}, softcap=softcap, scale=0.4)
        sequences.check({1: 17, 0: 1, 2: 1}, softcap=softcap, scale=0.4)
        sequences.check({1: 9, 0: 5}, softcap=softcap, scale=0.4)


def test_half_precision_is_as_near_as_its_rounding() -> None:
    sequences = Sequences([40, 70, 64], 16, dtype=torch.bfloat16)
    sequences.check({0: 30, 1: 69, 2: 60}, atol=3e-2)
    sequences.check({0: 1, 1: 1, 2: 1}, atol=3e-2)


def test_groups_are_bounded_in_padding_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [200, 190, 120, 101, 99, 50, 3, 2]
    backend = TorchAttention(SPEC, 4)
    assert list(backend._similar(list(range(8)), [1] * 8, lengths)) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    counts = [1, 1, 8, 5, 4, 1, 2, 2]
    assert list(backend._similar(list(range(8)), counts, lengths)) == [[2, 3], [4], [6, 7], [0, 1], [5]]
    monkeypatch.setattr(torch_ref, "GROUP_BYTES", 4 * 400 * SPEC.num_kv_heads * SPEC.head_dim)
    assert list(backend._similar(list(range(8)), [1] * 8, lengths)) == [[0, 1], [2, 3, 4], [5], [6, 7]]
    sequences = Sequences([100, 90, 60, 8], 4)
    sequences.check({0: 99, 1: 89, 2: 59, 3: 7})
    monkeypatch.setattr(torch_ref, "GROUP_BYTES", 1)
    sequences.check({3: 1, 1: 1, 0: 1, 2: 1})


@pytest.mark.case("KV-04")
@pytest.mark.parametrize("window", [None, 9])
def test_a_row_does_not_depend_on_its_neighbours(window: int | None) -> None:
    alone, among = Sequences([40, 37, 12, 90], 4), Sequences([40, 37, 12, 90], 4)
    for sequences in (alone, among):
        sequences.step({0: 39, 1: 30, 2: 11, 3: 80}, window=window)
    expected = alone.step({0: 1}, window=window)[0]
    found = among.step({2: 1, 0: 1, 3: 6, 1: 1}, window=window)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_window_reads_only_its_blocks() -> None:
    sequences = Sequences([64, 40], 4)
    sequences.step({0: 40, 1: 39}, window=8)
    for side in sequences.cache:
        for i, end in ((0, 40), (1, 40)):
            side[sequences.tables[i][: (end - 8) // 4]] = float("nan")
    sequences.check({0: 5, 1: 1}, window=8)
    sequences.check({0: 1}, window=8)


def test_blocks_of_others_are_untouched() -> None:
    sequences = Sequences([30, 30], 4)
    sequences.step({0: 30})
    for side in sequences.cache:
        assert not side[[0, *sequences.tables[1]]].any()
