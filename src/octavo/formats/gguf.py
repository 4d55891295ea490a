"""GGUF files: metadata, the table of tensors and their raw bytes, read from a memory map."""

import mmap
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import InvalidWeights, ModelNotFound
from octavo.formats.gguf_blocks import BLOCK_SIZES, dequantize, num_bytes
from octavo.formats.gguf_config import hf_config

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_LENGTH = 1 << 24  # 60 times the largest vocabulary; a longer list is damage, and would cost gigabytes

# ggml's numbers of tensor types; those absent from BLOCK_SIZES are known by name only, to refuse them by it
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# value types of metadata: number -> struct code; 8 is a string and 9 an array
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `shape` in torch order (rows last), `offset` in bytes from the start of `file`."""

    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int
    file: Path


class GGUFFile:
    """A GGUF checkpoint; of a split one, give the first file (`NAME-00001-of-00003.gguf`).

    `metadata` holds numbers, strings and lists of them under GGUF's own keys; it comes from the first
    file. `tensors` covers all files.

    Raises:
        ModelNotFound: no such file.
        InvalidWeights: damaged, truncated, or with a tensor type that is not read; the message names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for number, file in enumerate(_split_files(self.path)):
            self._maps[file] = _map(file)
            metadata, tensors = _Header(self._maps[file], file).read()
            if number == 0:
                self.metadata = metadata
            if repeated := self.tensors.keys() & tensors.keys():
                raise InvalidWeights(f"{file.name}: tensor {min(repeated)!r} is also in an earlier file.")
            self.tensors |= tensors
        self._check_split()

    def raw(self, name: str) -> memoryview:
        """The bytes of tensor `name`, not copied."""
        tensor = self._tensor(name)
        return memoryview(self._maps[tensor.file])[tensor.offset : tensor.offset + tensor.nbytes]

    def values(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Tensor `name` as float32, whole; for the small ones that configure a model."""
        tensor = self._tensor(name)
        return dequantize(tensor.type_name, self.raw(name), tensor.shape)

    def forget(self, name: str) -> None:
        """Give back the memory of the pages that reading tensor `name` mapped; they can be read again."""
        tensor = self._tensor(name)
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.offset + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, start, length)

    def hf_config(self) -> dict[str, Any]:
        """A Hugging Face style config.json; see `gguf_config.hf_config`."""
        return dict(self._config)

    @cached_property
    def _config(self) -> dict[str, Any]:
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return hf_config(self.path.name, self.metadata, shapes, lambda name: self.values(name).tolist())

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise InvalidWeights(f"{self.path.name}: there is no tensor {name!r}.")
        return self.tensors[name]

    def _check_split(self) -> None:
        count = self.metadata.get("split.count", len(self._maps))
        if not isinstance(count, int):
            raise InvalidWeights(f"{self.path.name}: split.count={count!r:.60} is not a number of files.")
        if count > 1 and count != len(self._maps):
            raise InvalidWeights(
                f"{self.path.name} is one of {count} files of a split checkpoint, and its name does not say so.",
                f"Name the files NAME-00001-of-{count:05}.gguf and so on.",
            )
        expected = self.metadata.get("split.tensors.count", 0)
        if expected and expected != len(self.tensors):
            raise InvalidWeights(f"{self.path.name}: the split files hold {len(self.tensors)} of {expected} tensors.")


def _split_files(path: Path) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    files = [path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf") for number in range(1, count + 1)]
    if path not in files or not files:
        raise InvalidWeights(f"{path.name} says it is file {match['number']} of {count}.")
    if path != files[0]:
        raise InvalidWeights(f"{path.name} is not the first file of a split checkpoint.", f"Give {files[0].name}.")
    for file in files[1:]:
        if not file.is_file():
            raise InvalidWeights(f"{path.name} is one of {count} files, and {file.name} is absent.")
    return files


def _map(file: Path) -> mmap.mmap:
    if not file.is_file():
        raise ModelNotFound(f"There is no GGUF file {file}.")
    if file.stat().st_size == 0:
        raise InvalidWeights(f"{file.name} is empty.")
    try:
        opened = file.open("rb")
    except OSError as error:
        raise ModelNotFound(f"{file} cannot be read: {error}.") from None
    with opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


class _Header:
    """A cursor over the start of one file. Counts and lengths are checked against what is left of the file."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data = data
        self.file = file
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.take(4) != MAGIC:
            raise self.damage("it does not start with the letters GGUF")
        version = self.scalar("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise self.damage("it is big-endian" if swapped else f"its version is {version}, not one of {VERSIONS}")
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.damage(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(self.scalar("<I"), key)
        return metadata, self.tensors(num_tensors, metadata.get("general.alignment", DEFAULT_ALIGNMENT))

    def tensors(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
            raise self.damage(f"general.alignment={alignment!r} is not a number of bytes")
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, dimensions = self.string(), self.scalar("<I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self.damage(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self.scalar("<Q") for _ in range(dimensions))[::-1]
            found.append((name, shape, self.scalar("<I"), self.scalar("<Q")))
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = start
        for name, shape, type_number, offset in sorted(found, key=lambda entry: entry[3]):
            if name in tensors:
                raise self.damage(f"tensor {name!r} appears twice")
            tensor = self.tensor(name, shape, type_number, start + offset)
            if tensor.offset < end:
                raise self.damage(f"tensor {name!r} overlaps another one")
            end = tensor.offset + tensor.nbytes
            tensors[name] = tensor
        return tensors

    def tensor(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> TensorInfo:
        type_name = TYPE_NAMES.get(type_number, f"number {type_number}")
        if type_name not in BLOCK_SIZES:
            raise InvalidWeights(
                f"{self.file.name}: tensor {name!r} has type {type_name}, which is not read.",
                f"Use a file with these types only: {', '.join(BLOCK_SIZES)}.",
            )
        elements = BLOCK_SIZES[type_name][0]
        if 0 in shape or shape[-1] % elements:
            raise self.damage(f"tensor {name!r} of shape {list(shape)} is not made of {type_name} blocks of {elements}")
        nbytes = num_bytes(type_name, shape)
        if offset + nbytes > len(self.data):
            raise self.damage(f"tensor {name!r} ends at byte {offset + nbytes}, past the end at {len(self.data)}")
        return TensorInfo(shape, type_name, offset, nbytes, self.file)

    def value(self, type_number: int, key: str) -> Any:
        if type_number == _STRING:
            return self.string()
        if type_number == _ARRAY:
            return self.array(key)
        if type_number not in _SCALARS:
            raise self.damage(f"metadata key {key!r} has the unknown value type {type_number}")
        return self.scalar(_SCALARS[type_number])

    def array(self, key: str) -> list[Any]:
        element, count = self.scalar("<I"), self.scalar("<Q")
        if count > MAX_ARRAY_LENGTH:
            raise self.damage(f"metadata key {key!r} lists {count} values, above the limit of {MAX_ARRAY_LENGTH}")
        if element == _STRING:
            return [self.string() for _ in range(count)]
        if element not in _SCALARS:
            raise self.damage(f"metadata key {key!r} is an array of the unknown value type {element}")
        numbers = np.dtype(_SCALARS[element])
        return list(np.frombuffer(self.take(count * numbers.itemsize), numbers).tolist())

    def string(self) -> str:
        if self.at + 8 > len(self.data):
            raise self.truncated(8)
        start = self.at + 8
        self.at = start + _LENGTH.unpack_from(self.data, self.at)[0]
        if self.at > len(self.data):
            raise self.truncated(self.at - start, start)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.damage(f"the text at byte {start} is not UTF-8") from None

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def take(self, length: int) -> bytes:
        if self.at + length > len(self.data):
            raise self.truncated(length)
        self.at += length
        return self.data[self.at - length : self.at]

    def truncated(self, length: int, start: int | None = None) -> InvalidWeights:
        start = self.at if start is None else start
        return self.damage(f"{length} bytes are needed at byte {start}, and the file ends at {len(self.data)}")

    def damage(self, what: str) -> InvalidWeights:
        return InvalidWeights(f"{self.file.name} is not a GGUF file that can be read: {what}.", "Is it complete?")
