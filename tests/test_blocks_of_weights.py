"""Weights in blocks of whole numbers: their products and rows equal those of the weights that the blocks stand for."""

import numpy as np
import pytest
import torch

from octavo.formats.gguf_blocks import BLOCK_SIZES, WHOLE_NUMBERS, dequantize, whole_numbers
from octavo.kernels.cpu.library import library
from octavo.layers.linear import Linear
from octavo.quant.blocks import Blocks, Quantized

needs_kernels = pytest.mark.skipif(library() is None, reason="no compiler for the CPU kernels")


def raw_blocks(type_name: str, rows: int, inner: int) -> bytes:
    """Random numbers; scales and minima (the first bytes of each block, but Q4_K's and Q5_K's too) are small."""
    elements, size = BLOCK_SIZES[type_name]
    found = np.random.default_rng(inner).integers(0, 256, (rows * inner // elements, size), np.uint8)
    small = np.random.default_rng(rows).uniform(0.01, 0.1, (len(found), 2)).astype(np.float16).view(np.uint8)
    width = 2 if type_name.endswith("_0") else 4
    found[:, :width] = small[:, :width]
    return found.tobytes()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("type_name", sorted(WHOLE_NUMBERS))
def test_products_and_rows(type_name: str, dtype: torch.dtype) -> None:
    shape = (48, 512)
    raw = raw_blocks(type_name, *shape)
    weight = torch.from_numpy(dequantize(type_name, raw, shape)).double()
    layer = Linear(shape[1], shape[0])
    layer.method = method = Blocks(library(), WHOLE_NUMBERS[type_name])
    layer.build(dtype, torch.device("cpu"))
    assert layer.load("", "blocks", torch.from_numpy(whole_numbers(type_name, raw, shape)))
    half = 1e-3 if "K" in type_name else 1e-6  # scales that are products are rounded
    for rows in (1, 3, 12, 13, 36, 37, 60):
        x = torch.randn(rows, shape[1]).to(dtype)
        wanted = x.double() @ weight.T
        size = (x.double().abs() @ weight.abs().T).amax().item()
        few = dtype == torch.float32 or rows <= 3  # more are multiplied by weights rounded to bfloat16
        torch.testing.assert_close(layer.scores(x).double(), wanted, atol=size * (half if few else 4e-3), rtol=0)
    numbers = torch.tensor([0, 47, 17, 17])
    found = method.rows(layer, numbers, torch.float32).double()
    torch.testing.assert_close(found, weight[numbers], atol=half * weight.abs().amax().item(), rtol=0)


@needs_kernels
def test_8_bits_of_plain_weights() -> None:
    layer = Linear(64, 32, bias=True)
    layer.method = Quantized(library())
    layer.build(torch.float32, torch.device("cpu"))
    weight, bias, x = torch.randn(32, 64), torch.randn(32), torch.randn(5, 64)
    assert layer.load("", "weight", weight) and layer.load("", "bias", bias)
    kept = layer.method.rows(layer, torch.arange(32), torch.float32)
    torch.testing.assert_close(layer(x), x @ kept.T + bias, atol=1e-4, rtol=0)
    largest = weight.abs().amax().item()
    torch.testing.assert_close(kept, weight, atol=largest / 127 * 0.51, rtol=0)
