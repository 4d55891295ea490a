"""The C++ products and blocks equal double precision on any number of threads; and everything goes without them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from conftest import Make
from octavo import SamplingParams
from octavo.kernels.cpu import library as kernels
from octavo.layers.linear import Linear
from octavo.quant.native import Native
from octavo.worker.runner import CPURunner
from test_greedy import FAMILIES, prompts

needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="no compiler for the CPU kernels")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    kernels.library.cache_clear()
    yield
    monkeypatch.undo()
    kernels.library.cache_clear()


def linear(columns: int, inner: int, dtype: torch.dtype, *, bias: bool) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(columns + inner)
    layer = Linear(inner, columns, bias=bias)
    layer.method = Native(kernels.library())
    layer.build(dtype, torch.device("cpu"))
    weight, shift = torch.randn(columns, inner).to(dtype), torch.randn(columns).to(dtype)
    assert layer.load("", "weight", weight)
    assert layer.load("", "bias", shift) == bias
    return layer, weight.double(), shift.double() if bias else torch.zeros(columns).double()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "inner"), [(16, 2), (48, 70), (601, 64), (1, 8), (320, 32)])
def test_products(columns: int, inner: int, dtype: torch.dtype, bias: bool, threads: int) -> None:
    layer, weight, shift = linear(columns, inner, dtype, bias=bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for rows in (*range(1, 14), 24, 25, 100):
        x = torch.randn(rows, inner).to(dtype)
        wanted = x.double() @ weight.T + shift
        scores = layer.scores(x)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), wanted, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(
            layer(x), wanted.to(dtype), atol=2e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5
        )
    torch.set_num_threads(before)


@needs_kernels
def test_a_product_of_views() -> None:
    layer, weight, shift = linear(32, 16, torch.float32, bias=True)
    x = torch.randn(2, 3, 32)[..., ::2]
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T + shift, atol=1e-5, rtol=0)


def generated(make_llm: Make, folder: Path, asked: list[list[int]], **options: Any) -> list[list[int]]:
    llm = make_llm(folder, max_num_seqs=4, **options)
    return [output.outputs[0].token_ids for output in llm.generate(asked, PARAMS, use_tqdm=False)]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_everything_goes_without_the_kernels(family: str, make_llm: Make, tmp_path: Path) -> None:
    assert kernels.library() is None
    oracle = tiny_models.oracle(**FAMILIES[family])
    asked = prompts(600)
    found = generated(make_llm, tiny_models.save(oracle, tmp_path), asked, max_num_batched_tokens=48)
    assert found == [tiny_models.greedy(oracle, prompt, 24) for prompt in asked]


@needs_kernels
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "phi3"])
def test_rows_in_parts_and_threads(
    family: str, threads: int, make_llm: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more rows than one pass takes, whose parts begin and end inside of sequences."""
    seen: list[bool] = []
    forward = CPURunner._forward

    def watched(self: CPURunner, ahead: int) -> None:
        seen.append(self.network is not None)
        forward(self, ahead)

    monkeypatch.setattr(CPURunner, "_forward", watched)
    oracle = tiny_models.oracle(**FAMILIES[family])
    asked = [[(7 * i + n) % 590 + 3 for i in range(n)] for n in (100, 130, 200, 3, 170)]
    found = generated(make_llm, tiny_models.save(oracle, tmp_path), asked, num_threads=threads)
    assert found == [tiny_models.greedy(oracle, prompt, 24) for prompt in asked]
    assert seen and all(seen)


@pytest.mark.usefixtures("without_kernels")
def test_a_machine_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, with what to install."""
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "1")
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels.logger, "propagate", True)
    kernels.library.cache_clear()
    assert kernels.library() is None and kernels.library() is None
    (message,) = [record.getMessage() for record in caplog.records if "CPU kernels could not" in record.getMessage()]
    assert "install g++ and ninja" in message
    assert not [path for path in (tmp_path / "kernels").iterdir() if path.suffix == ".so"]
