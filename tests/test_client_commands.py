"""`octavo chat`, `complete` and `run-batch` against a real server process, and run-batch with an engine of its own."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from octavo import env
from octavo.errors import InvalidConfig
from octavo.tools.server_client import NoAnswer, Refused, Server
from server_process import TINY_FLAGS, ServerProcess, running_server


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.save(tiny_models.oracle(), tmp_path_factory.mktemp("model"))
    tiny_tokenizers.f_bpe(folder)
    return folder


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (*TINY_FLAGS, "--api-key", "secret", "--served-model-name", "tiny")
    with running_server(model_folder, *flags, folder=tmp_path_factory.mktemp("server")) as process:
        yield process


def octavo(*args: str, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *args], capture_output=True, text=True, timeout=120, check=False,
        input=stdin or "", env=env.for_child(sys.path) | {"COLUMNS": "120", **more},
    )  # fmt: skip


def line(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "def add", "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def test_complete_and_chat_print_only_the_answer(server: ServerProcess) -> None:
    key = ("--url", server.url, "--api-key", "secret", "--temperature", "0", "--max-tokens", "6")
    client = Server(server.url + "/v1/", "secret")
    body = {"model": "tiny", "prompt": "def add", "max_tokens": 6, "temperature": 0}
    known = client.ask("POST", "/v1/completions", body)["choices"][0]["text"]
    found = octavo("complete", "def add", *key, "--stats")
    assert (found.returncode, found.stdout) == (0, known + "\n")
    assert "6 tokens" in found.stderr
    assert octavo("complete", *key, stdin="def add").stdout == known + "\n"
    assert octavo("complete", "-q", "def add", *key[:2], *key[4:], OCTAVO_API_KEY="secret").stdout == known + "\n"
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    known = client.ask("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    found = octavo("chat", *key, "--system-prompt", "Be kind", stdin="hello")
    assert (found.returncode, found.stdout, found.stderr) == (0, known + "\n", "")


def test_errors_are_one_readable_line(server: ServerProcess) -> None:
    key = ("--url", server.url, "--api-key", "secret")
    for args, words in (
        (("complete", "hi", "--url", server.url, "--api-key", "wrong"), "API key"),
        (("complete", "hi", *key, "--model", "nope"), "nope"),
        (("complete", "hi", *key, "--temperature", "9"), "temperature=9"),
        (("chat", "hi", "--url", "http://127.0.0.1:9"), "No server answers at http://127.0.0.1:9"),
        (("chat", "hi", "--url", "127.0.0.1:9"), "is not a URL"),
        (("chat", *key), "Standard input is empty"),
        (("run-batch", "-i", "nothing.jsonl", "-o", "out.jsonl", *key), "nothing.jsonl cannot be read"),
        (("run-batch", "-i", "https://host/in.jsonl", "-o", "out.jsonl", *key), "no address is followed"),
    ):
        found = octavo(*args)
        assert found.returncode != 0 and found.stdout == ""
        assert words in found.stderr and "Traceback" not in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1, found.stderr


def test_run_batch_on_a_server_goes_on_where_it_was(server: ServerProcess, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "deep" / "out.jsonl"
    lines = [json.dumps(line(str(i))) for i in range(6)]
    lines += ["{", "", json.dumps(line("hot", temperature=9)), json.dumps(line("0")), json.dumps({"custom_id": "x"})]
    source.write_text("\n".join(lines))
    args = ("run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--api-key", "secret")
    found = octavo(*args)
    assert found.returncode == 0, found.stderr
    assert "10 lines, 4 of the 10 asked now failed" in found.stderr
    records = [json.loads(item) for item in target.read_text().splitlines()]
    by_id = {record["custom_id"]: record for record in records if record["custom_id"]}
    assert set(by_id) == {*"12345", "0", "hot", "x"} or set(by_id) == {*"012345", "hot", "x"}
    assert by_id["1"]["response"]["status_code"] == 200 and by_id["1"]["error"] is None
    assert by_id["1"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert by_id["hot"]["response"]["status_code"] == 400
    assert by_id["x"]["error"]["code"] == "invalid_url" and by_id["x"]["error"]["line"] == 11
    assert sorted(r["error"]["line"] for r in records if r["custom_id"] is None) == [7, 10]
    # The first half, and a torn line as a kill leaves it: the rest is asked, nothing twice.
    half = target.read_text().splitlines(keepends=True)[:5]
    target.write_text("".join(half) + '{"id": "torn')
    again = octavo(*args)
    assert again.returncode == 0 and "of the 5 asked now" in again.stderr
    now = [json.loads(item) for item in target.read_text().splitlines()]
    assert sorted(str(r["custom_id"]) for r in now) == sorted(str(r["custom_id"]) for r in records)
    assert "All 10 lines are answered" in octavo(*args).stderr


def test_run_batch_with_an_engine_of_its_own(server: ServerProcess, model_folder: Path, tmp_path: Path) -> None:
    source, ours, theirs = (tmp_path / name for name in ("in.jsonl", "ours.jsonl", "theirs.jsonl"))
    source.write_text("\n".join(json.dumps(line(str(i), model=None, prompt="x" * (i + 1))) for i in range(4)))
    tiny = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "32M", "--num-threads", "1")
    found = octavo("run-batch", "-i", str(source), "-o", str(ours), "--model", str(model_folder), *tiny)
    assert found.returncode == 0, found.stderr
    octavo("run-batch", "-i", str(source), "-o", str(theirs), "--url", server.url, "--api-key", "secret")

    def texts(path: Path) -> dict[str, str]:
        records = [json.loads(item) for item in path.read_text().splitlines()]
        return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}

    assert texts(ours) == texts(theirs) and len(texts(ours)) == 4


def test_an_engine_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("a")))
    found = octavo("run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", str(tmp_path / "none"))
    assert found.returncode != 0 and "The engine did not start." in found.stderr.splitlines()[-1]
    assert (tmp_path / "out").read_text() == ""


def test_an_output_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps(line("a")))
    (tmp_path / "out").write_text("my diary\n")
    found = octavo("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", "http://127.0.0.1:9")
    assert found.returncode != 0 and "no answer of a batch" in found.stderr
    assert (tmp_path / "out").read_text() == "my diary\n"


def one_answer(data: bytes) -> str:
    """The address of a server that sends this once and hangs up."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        connection.recv(65536)
        connection.sendall(data)
        connection.close()
        listening.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_stream_that_breaks_is_told() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    chunk = b'data: {"choices": [{"text": "a"}]}\n\n'
    for body, error in ((chunk, NoAnswer), (chunk + b'data: {"error": {"message": "it died"}}\n\n', Refused)):
        stream = Server(one_answer(head + body)).stream("/v1/completions", {})
        assert next(stream)["choices"][0]["text"] == "a"
        with pytest.raises(error):
            next(stream)
    assert list(Server(one_answer(head + chunk + b"data: [DONE]\n\n")).stream("/x", {}))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InvalidConfig):
        Server(url)


def test_a_conversation_goes_on(server: ServerProcess) -> None:
    """In a terminal of its own: two turns, a forgotten one, an error that does not end it, and Ctrl-D."""
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "octavo", "chat", "--url", server.url, "--api-key", "secret", "--max-tokens", "2"]
    process = subprocess.Popen(
        command, stdin=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env.for_child(sys.path)
    )
    os.close(child)
    for text in ("hello\n", "/help\n", "again\n", "/undo\n", "x" * 3000 + "\n", "/new\n", "last\n", "/exit\n"):
        os.write(parent, text.encode())
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    os.close(parent)
    assert process.returncode == 0, err
    assert out.decode(errors="replace").count("\n") >= 3
    assert b"Commands: /new" in err and b"Traceback" not in err
