"""Headers of safetensors files, read without torch and checked before anything is believed."""

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from octavo.errors import InvalidWeights, ModelNotFound

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 16

BYTES_OF = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of an element, by the format's names of types."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `offset` and `nbytes` in bytes, from the start of the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, by name, in the order of their bytes.

    Raises:
        ModelNotFound: no such file.
        InvalidWeights: damaged or cut short; the message names the file.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            entries, start = _entries(path, file, size)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error}.") from None
    entries.pop("__metadata__", None)
    tensors = [(name, _tensor(path, name, entry, start)) for name, entry in entries.items()]
    tensors.sort(key=lambda named: (named[1].offset, named[1].nbytes))
    end = start
    for name, tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise _damaged(path, f"tensor {name!r} {what}")
        end += tensor.nbytes
    if end != size:
        what = "it was cut short" if size < end else "something follows the last tensor"
        raise _damaged(path, f"the header describes {end} bytes and the file has {size}: {what}")
    return dict(tensors)


def _entries(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header as JSON, and where the tensors' bytes start."""
    if size < 8:
        raise _damaged(path, f"it has only {size} bytes")
    length = int.from_bytes(file.read(8), "little")
    limit = min(size - 8, MAX_HEADER_BYTES)
    if length > limit:
        raise _damaged(path, f"it announces a header of {length} bytes, and at most {limit} are possible")

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        name, count = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 0)
        if count > 1:
            raise _damaged(path, f"its header has {name!r} {count} times")
        return dict(pairs)

    try:
        header = json.loads(file.read(length), object_pairs_hook=no_repeats)
    except InvalidWeights:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header, 8 + length


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BYTES_OF:
        raise InvalidWeights(
            f"{path.name}: tensor {name!r} has type {dtype!r:.40}, which is not read.",
            f"These are: {', '.join(BYTES_OF)}.",
        )
    if not _is_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _damaged(path, f"tensor {name!r} has the shape {shape!r:.60}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"tensor {name!r} has the offsets {offsets!r:.60}")
    begin, end = offsets
    if prod(shape) * BYTES_OF[dtype] != end - begin:
        raise _damaged(path, f"tensor {name!r} of type {dtype} and shape {shape} has {end - begin} bytes")
    return TensorInfo(tuple(shape), dtype, start + begin, end - begin)


def _is_counts(values: Any) -> bool:
    """A list of integers from 0, as JSON has them."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _damaged(path: Path, what: str) -> InvalidWeights:
    return InvalidWeights(f"{path.name} is not a safetensors file that can be read: {what}.", "Download it again.")
