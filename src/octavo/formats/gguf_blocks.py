"""The block types of GGUF tensors: their sizes, and numpy code that turns their bytes into float32.

A quantized row is a run of blocks of 32 or 256 elements; each block carries its own scales. The layouts
are those of ggml's block structures, little-endian. Every formula keeps ggml's order of float32
operations, so that the values equal its reference to the last bit.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidWeights

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Blocks = NDArray[np.void]

_SCALE = ("scale", "<f2")
_MINIMUM = ("minimum", "<f2")

_LAYOUTS: dict[str, tuple[int, np.dtype[np.void]]] = {
    "F32": (1, np.dtype([("value", "<f4")])),
    "F16": (1, np.dtype([("value", "<f2")])),
    "BF16": (1, np.dtype([("value", "<u2")])),
    "Q4_0": (32, np.dtype([_SCALE, ("nibbles", "u1", 16)])),
    "Q4_1": (32, np.dtype([_SCALE, _MINIMUM, ("nibbles", "u1", 16)])),
    "Q5_0": (32, np.dtype([_SCALE, ("fifth_bits", "u1", 4), ("nibbles", "u1", 16)])),
    "Q5_1": (32, np.dtype([_SCALE, _MINIMUM, ("fifth_bits", "u1", 4), ("nibbles", "u1", 16)])),
    "Q8_0": (32, np.dtype([_SCALE, ("value", "i1", 32)])),
    "Q2_K": (256, np.dtype([("scales", "u1", 16), ("pairs", "u1", 64), _SCALE, _MINIMUM])),
    "Q3_K": (256, np.dtype([("third_bits", "u1", 32), ("pairs", "u1", 64), ("scales", "u1", 12), _SCALE])),
    "Q4_K": (256, np.dtype([_SCALE, _MINIMUM, ("scales", "u1", 12), ("nibbles", "u1", 128)])),
    "Q5_K": (256, np.dtype([_SCALE, _MINIMUM, ("scales", "u1", 12), ("fifth_bits", "u1", 32), ("nibbles", "u1", 128)])),
    "Q6_K": (256, np.dtype([("nibbles", "u1", 128), ("pairs", "u1", 64), ("scales", "i1", 16), _SCALE])),
}

BLOCK_SIZES: dict[str, tuple[int, int]] = {name: (count, layout.itemsize) for name, (count, layout) in _LAYOUTS.items()}
"""Elements and bytes of one block, for every type that can be read."""


def num_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` (rows last); the last dimension must be whole blocks."""
    elements, size = BLOCK_SIZES[type_name]
    return prod(shape) // elements * size


def dequantize(type_name: str, raw: memoryview | bytes, shape: tuple[int, ...]) -> Floats:
    """Values of a tensor, float32, in `shape` (torch order: rows last). The result owns its memory.

    Raises:
        InvalidWeights: a type that is not read, or bytes that do not fit the shape.
    """
    if type_name not in _LAYOUTS:
        raise InvalidWeights(f"GGUF type {type_name} is not read; these are: {', '.join(_LAYOUTS)}.")
    elements, layout = _LAYOUTS[type_name]
    if shape[-1] % elements or len(raw) != num_bytes(type_name, shape):
        raise InvalidWeights(f"{len(raw)} bytes of {type_name} do not make a tensor of shape {list(shape)}.")
    blocks = np.frombuffer(raw, layout)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite scales are for the reader of the values to refuse
        return _DECODERS[type_name](blocks).reshape(shape)


def _float(blocks: Blocks, field: str = "scale") -> Floats:
    """[blocks, 1] float32."""
    values: Floats = blocks[field].astype(np.float32).reshape(-1, 1)
    return values


def _shifted(packed: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """[..., bytes] -> [..., shifts, bytes]: the same bytes at each shift, masked."""
    return (packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _low_then_high(blocks: Blocks) -> Bytes:
    """16 bytes -> 32 numbers: the low nibbles, then the high ones."""
    return _shifted(blocks["nibbles"], (0, 4), 0x0F).reshape(-1, 32)


def _with_fifth_bit(blocks: Blocks) -> Bytes:
    bits = np.unpackbits(blocks["fifth_bits"], axis=-1, bitorder="little")
    return _low_then_high(blocks) | bits << np.uint8(4)


def _f32(blocks: Blocks) -> Floats:
    values: Floats = blocks["value"].astype(np.float32)
    return values


def _bf16(blocks: Blocks) -> Floats:
    values: Floats = (blocks["value"].astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def _q4_0(blocks: Blocks) -> Floats:
    return _float(blocks) * (_low_then_high(blocks).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Blocks) -> Floats:
    return _float(blocks) * _low_then_high(blocks).astype(np.float32) + _float(blocks, "minimum")


def _q5_0(blocks: Blocks) -> Floats:
    return _float(blocks) * (_with_fifth_bit(blocks).astype(np.float32) - np.float32(16))


def _q5_1(blocks: Blocks) -> Floats:
    return _float(blocks) * _with_fifth_bit(blocks).astype(np.float32) + _float(blocks, "minimum")


def _q8_0(blocks: Blocks) -> Floats:
    return _float(blocks) * blocks["value"].astype(np.float32)


def _quarters(blocks: Blocks) -> Bytes:
    """64 bytes -> [8, 32] two-bit numbers: each half of 32 bytes gives four rows, lowest bits first."""
    return _shifted(blocks["pairs"].reshape(-1, 2, 32), (0, 2, 4, 6), 0x03).reshape(-1, 8, 32)


def _q2_k(blocks: Blocks) -> Floats:
    scales = _float(blocks) * (blocks["scales"] & 0x0F).astype(np.float32)
    minima = _float(blocks, "minimum") * (blocks["scales"] >> 4).astype(np.float32)
    values = _quarters(blocks).reshape(-1, 16, 16).astype(np.float32)
    return scales[..., None] * values - minima[..., None]


def _q3_k(blocks: Blocks) -> Floats:
    packed: Bytes = blocks["scales"]
    low = _shifted(packed[:, :8], (0, 4), 0x0F).reshape(-1, 16)
    high = _shifted(packed[:, 8:], (0, 2, 4, 6), 0x03).reshape(-1, 16)
    scales: Floats = _float(blocks) * ((low | high << np.uint8(4)).astype(np.float32) - np.float32(32))
    third = _shifted(blocks["third_bits"], tuple(range(8)), 0x01)
    values: Floats = (_quarters(blocks) | third << np.uint8(2)).astype(np.float32) - np.float32(4)
    return scales[..., None] * values.reshape(-1, 16, 16)


def _scales_and_minima(blocks: Blocks) -> tuple[Floats, Floats]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima, multiplied out; both [blocks, 8, 1]."""
    first, second, third = blocks["scales"].reshape(-1, 3, 4).swapaxes(0, 1)
    six, four, two = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)
    scales = np.concatenate([first & six, third & four | first >> np.uint8(2) & two], axis=-1)
    minima = np.concatenate([second & six, third >> np.uint8(4) | second >> np.uint8(2) & two], axis=-1)
    return (
        (_float(blocks) * scales.astype(np.float32))[..., None],
        (_float(blocks, "minimum") * minima.astype(np.float32))[..., None],
    )


def _eighths(blocks: Blocks) -> Bytes:
    """128 bytes -> [8, 32] four-bit numbers: each run of 32 bytes gives its low nibbles, then its high ones."""
    return _shifted(blocks["nibbles"].reshape(-1, 4, 32), (0, 4), 0x0F).reshape(-1, 8, 32)


def _q4_k(blocks: Blocks) -> Floats:
    scales, minima = _scales_and_minima(blocks)
    return scales * _eighths(blocks).astype(np.float32) - minima


def _q5_k(blocks: Blocks) -> Floats:
    scales, minima = _scales_and_minima(blocks)
    fifth = _shifted(blocks["fifth_bits"], tuple(range(8)), 0x01)
    return scales * (_eighths(blocks) | fifth << np.uint8(4)).astype(np.float32) - minima


def _q6_k(blocks: Blocks) -> Floats:
    low = _shifted(blocks["nibbles"].reshape(-1, 2, 64), (0, 4), 0x0F).reshape(-1, 8, 32)
    values = (low | _quarters(blocks) << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = _float(blocks) * blocks["scales"].astype(np.float32)
    return scales[..., None] * values.reshape(-1, 16, 16)


_DECODERS: dict[str, Callable[[Blocks], Floats]] = {
    "F32": _f32,
    "F16": _f32,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def whole_numbers(type_name: str, raw: memoryview | bytes, shape: tuple[int, ...]) -> Bytes:
    """Blocks of 32 as uint8 [rows, columns / 32, 36]: scale and minimum in half precision, then signed bytes.

    scale * number + minimum is the weight: exact for types of 32, and for Q4_K and Q5_K with the products of their
    scales rounded to half precision. The type must be in WHOLE_NUMBERS.
    """
    blocks = np.frombuffer(raw, _LAYOUTS[type_name][1])
    with np.errstate(over="ignore", invalid="ignore"):
        scales, minima, numbers = _SPLITTERS[type_name](blocks)
        heads = np.stack([scales, minima], -1, dtype=np.float16, casting="unsafe").view(np.uint8)
    joined: Bytes = np.concatenate([heads.reshape(-1, 4), numbers.reshape(-1, 32).view(np.uint8)], -1)
    return joined.reshape(shape[0], -1, 36)


Split = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _split_simple(blocks: Blocks) -> Split:
    """Types of 32 with a scale and perhaps a minimum."""
    names = blocks.dtype.names or ()
    scale = blocks["scale"]
    if "value" in names:
        return scale, np.zeros_like(scale), blocks["value"]
    numbers = _with_fifth_bit(blocks) if "fifth_bits" in names else _low_then_high(blocks)
    if "minimum" in names:
        return scale, blocks["minimum"], numbers
    middle = 16 if "fifth_bits" in names else 8
    return scale, scale * np.float16(-middle), numbers


def _split_k(blocks: Blocks) -> Split:
    scales, minima = _scales_and_minima(blocks)
    numbers = _eighths(blocks)
    if "fifth_bits" in (blocks.dtype.names or ()):
        numbers = numbers | _shifted(blocks["fifth_bits"], tuple(range(8)), 0x01) << np.uint8(4)
    return scales.reshape(-1), -minima.reshape(-1), numbers


_SPLITTERS: dict[str, Callable[[Blocks], Split]] = {
    "Q4_0": _split_simple,
    "Q4_1": _split_simple,
    "Q5_0": _split_simple,
    "Q5_1": _split_simple,
    "Q8_0": _split_simple,
    "Q4_K": _split_k,
    "Q5_K": _split_k,
}

WHOLE_NUMBERS: dict[str, int] = {name: 4 if name.startswith("Q4") else 8 for name in _SPLITTERS}
"""Types that `whole_numbers` splits, and the bits that their numbers need (five count as eight)."""
