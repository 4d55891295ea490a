"""Safetensors checkpoints: every damage is refused by file name, and what is whole is read exactly."""

import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import tiny_models
from octavo.errors import InvalidWeights, ModelNotFound, OctavoError
from octavo.formats.safetensors import read_header
from octavo.weights.safetensors import safetensors_tensors


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.oracle()


@pytest.fixture
def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return tiny_models.weights_of(model)


@pytest.fixture
def shards(model: PreTrainedModel, tmp_path: Path) -> Path:
    """The model in three shards with an index."""
    folder = tiny_models.save(model, tmp_path, max_shard_size="250KB")
    assert len(list(folder.glob("model-0000?-of-00003.safetensors"))) == 3
    return folder


def assert_whole(folder: Path, weights: dict[str, Tensor]) -> None:
    found = list(safetensors_tensors(folder))
    assert len(found) == len(weights)
    for name, tensor in found:
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name])


@pytest.mark.case("LOAD-01")
def test_one_file_loads(model: PreTrainedModel, weights: dict[str, Tensor], tmp_path: Path) -> None:
    assert_whole(tiny_models.save(model, tmp_path), weights)


@pytest.mark.case("LOAD-01")
def test_shards_load_with_and_without_an_index(shards: Path, weights: dict[str, Tensor]) -> None:
    assert_whole(shards, weights)
    (shards / "model.safetensors.index.json").unlink()
    assert_whole(shards, weights)


@pytest.mark.case("LOAD-01")
def test_files_of_any_name_are_taken_together(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "first.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "second.safetensors")
    assert {name for name, _ in safetensors_tensors(tmp_path)} == {"a", "b"}
    save_file({"b": torch.zeros(3)}, tmp_path / "third.safetensors")
    with pytest.raises(InvalidWeights, match=r"'b' is in second\.safetensors and in third\.safetensors"):
        safetensors_tensors(tmp_path)


@pytest.mark.case("LOAD-01")
@pytest.mark.parametrize("indexed", [True, False])
def test_an_absent_shard_is_refused_by_name(indexed: bool, shards: Path) -> None:
    (shards / "model-00002-of-00003.safetensors").unlink()
    if not indexed:
        (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidWeights, match=r"model-00002-of-00003\.safetensors.* absent"):
        safetensors_tensors(shards)


@pytest.mark.case("LOAD-01")
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_cut_short_is_refused_by_name(share: float, indexed: bool, shards: Path) -> None:
    cut = shards / "model-00002-of-00003.safetensors"
    content = cut.read_bytes()
    cut.write_bytes(content[: int(len(content) * share)])
    if not indexed:
        (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidWeights, match=r"model-00002-of-00003\.safetensors"):
        safetensors_tensors(shards)


@pytest.mark.case("LOAD-01")
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"names gone\.safetensors, which is absent"),
        ({"weight_map": {"a": "../model.safetensors"}}, "which is not a file of the folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is not a file of the folder"),
        ({"weight_map": {"foreign": "model-00001-of-00003.safetensors"}}, "does not hold tensor 'foreign'"),
        ({"weight_map": {"a": 3}}, "index"),
        ({"weight_map": []}, "is not an index"),
        ({}, "is not an index"),
        ([], "is not an index"),
    ],
)
def test_an_index_that_is_wrong_is_refused(index: Any, message: str, shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidWeights, match=message):
        safetensors_tensors(shards)


def test_an_index_decides_which_of_two_equal_names_is_meant(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.ones(1)}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = list(safetensors_tensors(tmp_path))
    assert sorted(name for name, _ in found) == ["a", "b"]
    assert torch.equal(dict(found)["a"], torch.ones(2))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.case("LOAD-07")
def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(InvalidWeights, match=r"pytorch_model\.bin.*not read.*save_pretrained"):
        safetensors_tensors(tmp_path)
    assert not marker.exists()
    pickle.loads((tmp_path / "pytorch_model.bin").read_bytes())  # the bomb does work
    assert marker.exists()


def test_a_folder_without_weights_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no safetensors"):
        safetensors_tensors(tmp_path)


def written(header: Any, data: int = 64, length: int | None = None) -> bytes:
    """A file with this header (JSON text or an object) and `data` bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **changes}


HOSTILE = {
    "empty": b"",
    "seven bytes": bytes(7),
    "length of the header": written({"a": entry()}, length=2**62),
    "header longer than the file": written({"a": entry()}, length=200),
    "header longer than the format allows": written({"a": entry()}, length=100_000_001),
    "not JSON": written(b"[[[{{"),
    "not UTF-8": written(b"\xff\xfe\x00\x01"),
    "deep": written(b"[" * 100_000),
    "huge number": written(b'{"a":' + b"9" * 10_000 + b"}"),
    "a list": written([1]),
    "an entry is a number": written({"a": 1}),
    "no offsets": written({"a": {"dtype": "F32", "shape": [16]}}),
    "negative offset": written({"a": entry(data_offsets=[-64, 0])}),
    "offsets turned round": written({"a": entry(data_offsets=[64, 0])}),
    "three offsets": written({"a": entry(data_offsets=[0, 32, 64])}),
    "offset is a fraction": written({"a": entry(data_offsets=[0, 64.0])}),
    "offset is a truth": written({"a": entry(shape=[], dtype="U8", data_offsets=[False, True])}, data=1),
    "out of the file": written({"a": entry(shape=[32], data_offsets=[0, 128])}),
    "far out of the file": written({"a": entry(shape=[2**60], data_offsets=[0, 2**62])}),
    "start out of the file": written({"a": entry(data_offsets=[2**62, 2**62 + 64])}),
    "overlap": written({"a": entry(), "b": entry(data_offsets=[32, 96])}, data=96),
    "same place": written({"a": entry(), "b": entry()}),
    "gap": written({"a": entry(shape=[8], data_offsets=[0, 32]), "b": entry(data_offsets=[64, 128])}, data=128),
    "something after the end": written({"a": entry()}, data=65),
    "shape and bytes": written({"a": entry(shape=[17])}),
    "negative dimension": written({"a": entry(shape=[-4, -4])}),
    "endless shape": written({"a": entry(shape=[2**62] * 10_000)}),
    "shape is a text": written({"a": entry(shape="16")}),
    "type and bytes": written({"a": entry(dtype="F64")}),
    "unknown type": written({"a": entry(dtype="Q9")}),
    "type is a list": written({"a": entry(dtype=["F32"])}),
    "name twice": written(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)),
    "key twice": written(b'{"a":{"dtype":"F32","dtype":"F32","shape":[16],"data_offsets":[0,64]}}'),
}


@pytest.mark.case("LOAD-07")
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused_by_file_name(what: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[what])
    with pytest.raises(InvalidWeights, match=r"model\.safetensors"):
        safetensors_tensors(tmp_path)


def test_the_hostile_headers_differ_from_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(written({"__metadata__": {"format": "pt"}, "a": entry()}))
    assert torch.equal(dict(safetensors_tensors(tmp_path))["a"], torch.zeros(16))


@pytest.mark.case("LOAD-07")
def test_damage_anywhere_in_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    content = path.read_bytes()
    size_of_header = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(2)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(size_of_header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            list(safetensors_tensors(tmp_path))
        except OctavoError:
            refused += 1
    assert refused > 100


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.float16,
    torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64,
]  # fmt: skip


def test_every_type_and_odd_shapes_are_read_exactly(tmp_path: Path) -> None:
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in DTYPES
        for shape in ((), (0,), (3, 0, 2), (7,), (2, 3, 5))
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = dict(safetensors_tensors(tmp_path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].double(), tensor.double())


def test_a_header_tells_where_tensors_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6, dtype=torch.int32).view(2, 3)}, path)
    info = read_header(path)["a"]
    assert (info.shape, info.dtype, info.nbytes) == ((2, 3), "I32", 24)
    assert path.read_bytes()[info.offset : info.offset + info.nbytes] == struct.pack("<6i", *range(6))
    with pytest.raises(ModelNotFound, match="absent"):
        read_header(tmp_path / "absent.safetensors")


@pytest.mark.case("LOAD-07")
def test_reading_holds_one_tensor_and_maps_nothing(tmp_path: Path) -> None:
    """64 MiB of tensors pass by, one of 8 MiB at a time."""
    save_file({str(number): torch.zeros(2 << 20) for number in range(8)}, tmp_path / "model.safetensors")
    before, most = resident_bytes(), 0
    for _, tensor in safetensors_tensors(tmp_path):
        most = max(most, resident_bytes() - before)
        del tensor
    assert most < 32 << 20


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10
