"""From names to files: what is local never touches the network, and every failure says what to do."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from octavo import hub
from octavo.errors import InvalidConfig, ModelNotFound
from octavo.hub import ModelFiles, find_model
from octavo.text.tokenizer import Tokenizer
from octavo.tools.pull import PACKAGES
from tiny_tokenizers import f_bpe

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path / "octavo"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "some" / "model")


def make_model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(ModelNotFound) as caught:
        find_model(*args, **options)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.case("ENV-01")
@pytest.mark.parametrize("offline", [None, "0", "1"])
def test_local_paths_make_no_network_call(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: str | None
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a network call: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    if offline is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (str(model), "some/model", "./some/model", "some/model/", "~/some/model", "some/../some/model"):
        assert find_model(name) == ModelFiles(model)
    f_bpe(model)
    assert Tokenizer.from_files(find_model("some/model")).encode("hi")
    file = make_model(tmp_path / "gguf", "a.gguf") / "a.gguf"
    for name in (str(file), "gguf/a.gguf", "~/gguf/a.gguf", "gguf", "gguf/"):
        assert find_model(name) == ModelFiles(file.parent, file)


def test_folders_with_gguf_files(tmp_path: Path) -> None:
    split = make_model(tmp_path / "split", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf")
    assert find_model(str(split)).gguf == split / "m-00001-of-00002.gguf"
    both = make_model(tmp_path / "both", "config.json", "model.safetensors", "m.gguf")
    assert find_model(str(both)) == ModelFiles(both)
    assert "a.gguf, b.gguf" in refusal(str(make_model(tmp_path / "two", "a.gguf", "b.gguf")))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["README.md"], "no config.json and no weights"),
        (["config.json"], "a config.json and no weights"),
        (["config.json", "pytorch_model.bin"], "convert them to safetensors"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_folders_that_are_no_model(tmp_path: Path, names: list[str], words: str) -> None:
    assert words in refusal(str(make_model(tmp_path / "x", *names)))


def test_a_tokenizer_alone_is_enough_without_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "x", "tokenizer.json", "a.gguf", "b.gguf")
    assert find_model(str(folder), weights=False) == ModelFiles(folder)


@pytest.mark.parametrize("name", ["./no", "/no/such", "~/no", "no/", "a/b/c", "no.gguf", "a\\b"])
def test_what_looks_like_a_path_is_taken_for_one(name: str) -> None:
    text = refusal(name)
    assert "looks like a path" in text
    assert repr(name) in text


@pytest.mark.parametrize("name", ["", "two words", "a" * 300, "x\0y", "-a/b", "a--b", "ünï/code"])
def test_what_cannot_be_a_name(name: str) -> None:
    assert "neither a path" in refusal(name)


def test_a_file_that_is_no_gguf(model: Path) -> None:
    assert "Give the model's folder" in refusal(str(model / "model.safetensors"))


def test_pulled_models_have_short_names(tmp_path: Path) -> None:
    assert "octavo pull smollm2" in refusal(None)
    assert "octavo pull smollm2" in refusal("smollm2")
    make_model(tmp_path / "octavo" / "models" / "smollm2", ".new-interrupted")
    assert "octavo pull smollm2" in refusal("smollm2")
    file = tmp_path / "octavo" / "models" / "smollm2" / "smollm2.gguf"
    file.write_text("")
    assert find_model("smollm2") == find_model(None) == ModelFiles(file.parent, file)
    assert set(hub.PULLABLE) == set(PACKAGES)


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs. `repositories` maps names to files, or to a status and error code."""

    repositories: dict[str, dict[str, bytes] | tuple[int, str]] = {}  # noqa: RUF012 - set by the fixture
    gated: set[str] = set()  # noqa: RUF012
    revisions = ("main", SHA)
    tokens: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        self.tokens.append(self.headers.get("Authorization"))
        api = path[:2] == ["api", "models"]
        path = path[2:] if api else path
        name = "/".join(path[:2])
        files = self.repositories.get(name, (401, "RepoNotFound"))
        if isinstance(files, tuple):
            return self.answer(b"", files[0], files[1])
        revision = path[3] if len(path) > 3 else "main"
        if revision not in self.revisions:
            return self.answer(b"", 404, "RevisionNotFound")
        if api and path[2:3] == ["tree"]:
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": digest(data)} for file, data in files.items()
            ]
            return self.answer(json.dumps(entries).encode())
        if api:
            siblings = [{"rfilename": file} for file in files]
            return self.answer(json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode())
        if name in self.gated:
            return self.answer(b"", 403, "GatedRepo")
        return self.answer(files["/".join(path[4:])])

    do_HEAD = do_GET  # noqa: N815

    def answer(self, data: bytes, status: int = 200, error: str = "") -> None:
        self.send_response(status)
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{digest(data)}"', "Content-Length": str(len(data))}
        for header, value in (headers | ({"X-Error-Code": error} if error else {})).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    files = {"config.json": b"{}", "model.safetensors": b"w" * 9, "tokenizer.json": b"{}", "chat_template.jinja": b"t"}
    others = {"pytorch_model.bin": b"b", "original/x.safetensors": b"b", "consolidated.safetensors": b"b"}
    FakeHub.repositories = {
        "org/full": {**files, **others},
        "org/gated": files,
        "org/gguf": {"a.gguf": b"g"},
        "org/bin": {"config.json": b"{}", "pytorch_model.bin": b"b"},
        "org/broken": (500, ""),
        "org/forbidden": (403, ""),
    }
    FakeHub.gated, FakeHub.tokens = {"org/gated"}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield FakeHub
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_once_and_then_found_offline(
    fake_hub: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files = find_model("org/full")
    names = sorted(str(path.relative_to(files.folder)) for path in files.folder.rglob("*.*"))
    assert names == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert tmp_path / "hf" / "hub" in files.folder.parents
    assert "Bearer hf_secret" in fake_hub.tokens
    asked = len(fake_hub.tokens)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model("org/full") == files
    assert find_model("org/full", revision=SHA) == files
    assert len(fake_hub.tokens) == asked


def test_other_caches(fake_hub: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tmp_path / "mine" in find_model("org/full", download_dir=tmp_path / "mine").folder.parents
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert tmp_path / "cache" in find_model("org/full", revision=SHA).folder.parents


def test_only_the_tokenizer_is_downloaded_when_only_that_is_asked_for(fake_hub: type[FakeHub]) -> None:
    folder = find_model("org/full", weights=False).folder
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/absent", ["no model", "path of a model folder", "HF_TOKEN"]),
        ("absent", ["no model", "path of a model folder"]),
        ("org/gated", ["gated", "HF_TOKEN"]),
        ("org/forbidden", ["gated", "HF_TOKEN"]),
        ("org/gguf", ["GGUF files only", "give its path"]),
        ("org/bin", ["no safetensors", "convert"]),
        ("org/broken", ["answered 500", "path of a model folder"]),
    ],
)
def test_what_the_hub_refuses_is_explained(fake_hub: type[FakeHub], name: str, words: list[str]) -> None:
    text = refusal(name)
    assert all(word in text for word in words), text


def test_an_unknown_revision_is_named(fake_hub: type[FakeHub]) -> None:
    assert "no revision 'v9'" in refusal("org/full", revision="v9")


def test_the_cached_copy_serves_when_the_hub_fails(
    fake_hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = find_model("org/full")
    fake_hub.repositories["org/full"] = (503, "")
    assert find_model("org/full") == files
    assert "answered 503" in caplog.text
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_model("org/full") == files


@pytest.mark.case("ENV-01")
def test_an_absent_model_fails_soon_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = refusal("org/model")
    assert "HF_HUB_OFFLINE" in text
    assert "path of a model folder" in text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert "path of a model folder" in refusal("org/model")
    with socket.socket() as silent:  # takes the connection and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "HUB_TIMEOUT", 0.3)
        assert "path of a model folder" in refusal("org/model")
    assert time.monotonic() - begin < 6


def test_an_endpoint_needs_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "hub.example.com")
    with pytest.raises(InvalidConfig, match="HF_ENDPOINT=hub.example.com is not a URL. Set it to https://hub"):
        find_model("org/model")
