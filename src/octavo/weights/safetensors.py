"""The tensors of a folder of safetensors files: one file, shards with an index, or shards without one."""

import json
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import InvalidWeights, ModelNotFound
from octavo.formats.safetensors import TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth")

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}

Shards = dict[Path, dict[str, TensorInfo]]


def safetensors_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every weight of `folder` under its own name and type, on the CPU, file after file.

    All headers are checked before the first tensor is read. Bytes are read, not mapped, so that no more
    than the tensor that is yielded is held, file pages included.

    Raises:
        ModelNotFound: there are no weights.
        InvalidWeights: a file is damaged, cut short or absent, or there are pickled weights only.
    """
    return _read(_indexed(folder) if (folder / INDEX).is_file() else _union(folder))


def _indexed(folder: Path) -> Shards:
    """The files that the index names, each with the tensors that the index seeks in it, and those it forgot."""
    index = folder / INDEX
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(file_of.values()))
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise InvalidWeights(f"{index} is not an index of safetensors files: {error!r}.") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidWeights(f"{INDEX} names {name!r}, which is not a file of the folder {folder}.")
        if not (folder / name).is_file():
            raise InvalidWeights(f"{INDEX} names {name}, which is absent from {folder}.", "Download it.")
    shards = {folder / name: read_header(folder / name) for name in names}
    for tensor, name in file_of.items():
        if tensor not in shards[folder / name]:
            raise InvalidWeights(f"{name} does not hold tensor {tensor!r}, although {INDEX} says so.")
    return {
        path: {tensor: info for tensor, info in header.items() if file_of.get(tensor, path.name) == path.name}
        for path, header in shards.items()
    }


def _union(folder: Path) -> Shards:
    """model.safetensors alone, else all numbered shards, else every safetensors file."""
    files = sorted(folder.glob("*.safetensors"))
    numbered = [(file, match) for file in files if (match := _SHARD.fullmatch(file.name))]
    if folder / SINGLE in files:
        files = [folder / SINGLE]
    elif numbered:
        files = [file for file, _ in numbered]
        for match in {match["stem"]: match for _, match in numbered}.values():
            _check_complete(folder, match)
    if not files:
        raise _no_weights(folder)
    shards = {file: read_header(file) for file in files}
    owner: dict[str, Path] = {}
    for path, header in shards.items():
        for tensor in header:
            if tensor in owner:
                raise InvalidWeights(f"Tensor {tensor!r} is in {owner[tensor].name} and in {path.name} of {folder}.")
            owner[tensor] = path
    return shards


def _check_complete(folder: Path, shard: re.Match[str]) -> None:
    for number in range(1, int(shard["count"]) + 1):
        name = f"{shard['stem']}-{number:0{len(shard['number'])}}-of-{shard['count']}.safetensors"
        if not (folder / name).is_file():
            raise InvalidWeights(f"{name} is absent from {folder}, which has {shard.string}.", "Download it.")


def _no_weights(folder: Path) -> ModelNotFound | InvalidWeights:
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if not pickled:
        return ModelNotFound(f"There are no safetensors files in {folder}.")
    convert = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    return InvalidWeights(
        f"{folder} has pickled weights only ({pickled[0]}), which are not read: opening them can run any code.",
        f'If you trust them, convert them: python -c "from transformers import AutoModelForCausalLM; {convert}"',
    )


def _read(shards: Shards) -> Iterator[tuple[str, Tensor]]:
    for path, tensors in shards.items():
        with path.open("rb", buffering=0) as file:
            for name, info in tensors.items():
                yield name, _read_one(file, name, info)


def _read_one(file: FileIO, name: str, info: TensorInfo) -> Tensor:
    content = torch.empty(info.nbytes, dtype=torch.uint8)
    left = memoryview(content.numpy().data)
    file.seek(info.offset)
    while left:
        count = file.readinto(left)
        if not count:
            raise InvalidWeights(f"{file.name} ended while tensor {name!r} was read.")
        left = left[count:]
    return content.view(_DTYPES[info.dtype]).view(info.shape)
