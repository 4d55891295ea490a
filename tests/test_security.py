"""Attacks on a real server with keys: paths, headers, control routes, slow connections, what is logged."""

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models
import tiny_tokenizers
from octavo.server.auth import Keys
from server_process import TINY_FLAGS, ServerProcess, running_server

ANN, BOB, ADMIN = "ann-key-8c1f", "bob-key-77aa", "admin-key-d00d"
OPEN = {"/livez", "/health", "/ready", "/readyz", "/docs", "/"}
"""The paths that need no key; the static files under /page/ are open as well."""
CONTROL = ("/reset_prefix_cache", "/start_profile", "/stop_profile")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    model = tiny_models.save(tiny_models.oracle(), folder / "model")
    tiny_tokenizers.f_bpe(model)
    flags = ("--api-key", ANN, "--api-key", BOB, "--admin-api-key", ADMIN, "--profile-dir", str(folder / "traces"))
    with running_server(model, *TINY_FLAGS, *flags, "--served-model-name", "tiny", folder=folder) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def raw(server: ServerProcess, data: bytes, seconds: float = 5.0) -> bytes:
    """What a connection gets for these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        found = b""
        try:
            while b"\r\n\r\n" not in found:
                piece = connection.recv(65536)
                if not piece:
                    break
                found += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return found


@pytest.mark.case("SEC-04")
def test_every_route_but_the_documented_ones_needs_a_key(client: httpx.Client) -> None:
    paths: dict[str, Any] = client.get("/openapi.json", headers=bearer(ANN)).json()["paths"]
    assert {"/v1/completions", "/v1/files", "/v1/batches", *CONTROL} <= set(paths)
    for path, methods in paths.items():
        for method in methods:
            for headers in ({}, bearer("wrong"), bearer(ANN + "x"), bearer(ANN[:-1]), {"x-api-key": ""}):
                place = path.replace("{", "").replace("}", "")
                status = client.request(method, place, headers=headers).status_code
                assert status == 401 or path in OPEN or path.startswith("/page/"), (method, path, status)


@pytest.mark.case("SEC-04")
def test_control_routes_open_to_the_administrator_only(client: httpx.Client) -> None:
    for path in CONTROL:
        for key in (ANN, BOB, "admin", "none"):
            assert client.post(path, headers=bearer(key)).status_code == 401, path
        assert client.get(path, headers=bearer(ADMIN)).status_code == 405
    assert client.post("/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 200


@pytest.mark.case("SEC-04")
def test_a_profile_lies_where_the_server_says(client: httpx.Client, folder: Path) -> None:
    escape = {"path": "../../x", "output_dir": "/tmp/x", "activities": ["CPU"]}
    begun = client.post("/start_profile?path=../../x", json=escape, headers=bearer(ADMIN))
    assert begun.status_code == 200, begun.text
    assert client.post("/start_profile", headers=bearer(ADMIN)).status_code == 409
    body = {"prompt": "x", "max_tokens": 2}
    assert client.post("/v1/completions", json=body, headers=bearer(ANN)).status_code == 200
    path = Path(client.post("/stop_profile", json=escape, headers=bearer(ADMIN)).json()["path"])
    assert path.parent == folder / "traces" and path.stat().st_size > 1000
    assert client.post("/stop_profile", headers=bearer(ADMIN)).status_code == 409
    assert not (folder.parent / "x").exists()


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1//models", "/./v1/models", "/livez/../v1/models", "/livez/..%2fv1/models",
        "/page/../v1/models",
        "/page/..%2fv1/models", "/page/%2e%2e/v1/models", "/%76%31/models", "/v1/models/", "/V1/MODELS", "/v1/models;x",
        "/v1/models%00", "/v1%2fmodels", "/livez%00/v1/models", "/health/v1/models", "/v1/models?key=ann-key-8c1f",
        "/reset_prefix_cache/", "/docs/../reset_prefix_cache", "http://127.0.0.1/v1/models", "*", "\\v1\\models",
    ],
)  # fmt: skip
def test_tricks_with_paths(server: ServerProcess, path: str) -> None:
    for method in (b"GET", b"POST"):
        head = method + b" " + path.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        status = raw(server, head)[9:12]
        assert status in (b"400", b"401", b"404", b"405"), (path, status)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"}, {"x-original-url": "/livez"}, {"x-rewrite-url": "/livez"},
        {"x-http-method-override": "GET"}, {"x-forwarded-prefix": "/livez"}, {"octavo.tenant": "admin"},
        {"octavo-tenant": "admin"}, {"host": "localhost"}, {"authorization": "Basic YW5uOg=="}, {"authorization": ANN},
        {"authorization": "Bearer"}, {"authorization": "Bearer null"}, {"cookie": f"api_key={ANN}"},
        {"x-api-key": ""}, {"authorization": f"Bearer {ANN}, Bearer {ANN}"}, {"authorization": "Bearer *"},
    ],
    ids=str,
)  # fmt: skip
def test_tricks_with_headers(client: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics"):
        assert client.get(path, headers=headers).status_code == 401


def test_requests_that_two_parsers_read_differently(server: ServerProcess) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    for head in (
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 0\r\ncontent-length: 40\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"content-length: -1\r\n",
        b"content-length : 3\r\n",
    ):
        found = raw(server, b"POST /livez HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n0\r\n\r\n" + hidden)
        assert b" 200 " not in found.split(b"\r\n")[0] and b"tiny" not in found, head


@pytest.mark.case("HTTP-06")
def test_slow_and_oversized_connections_hold_nobody_up(server: ServerProcess, client: httpx.Client) -> None:
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for number, connection in enumerate(sockets):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            connection.sendall(head if number % 2 else head + b"content-length: 100\r\n\r\n{")
        large = b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (5 << 20)
        many = b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: 1\r\n" % i for i in range(10_000)) + b"\r\n"
        for data in (large, many):
            begin = time.monotonic()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # cut off while it still sends
                assert raw(server, data)[9:12] in (b"431", b"")
            assert time.monotonic() - begin < 2, "a header without an end is kept and waited for"
        for _ in range(5):
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            assert time.monotonic() - begin < 0.5
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=bearer(BOB))
        assert answer.status_code == 200
    finally:
        for connection in sockets:
            connection.close()


def test_batches_of_one_key_are_not_another_s(server: ServerProcess, client: httpx.Client) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    form = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = client.post("/v1/files", files=form, data={"purpose": "batch"}, headers=bearer(ANN)).json()
    request = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    assert client.post("/v1/batches", json=request, headers=bearer(BOB)).status_code == 400
    batch = client.post("/v1/batches", json=request, headers=bearer(ANN)).json()
    deadline = time.monotonic() + 20
    while batch["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.get(f"/v1/batches/{batch['id']}", headers=bearer(ANN)).json()
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    names = (f"batches/{batch['id']}", f"files/{file['id']}", f"files/{batch['output_file_id']}/content")
    for path in (f"/v1/{name}" for name in names):
        assert client.get(path, headers=bearer(ANN)).status_code == 200
        for key in (BOB, ADMIN):
            assert client.get(path, headers=bearer(key)).status_code == 404
    assert client.get("/v1/batches", headers=bearer(BOB)).json()["data"] == []


def test_keys_are_written_nowhere(server: ServerProcess, client: httpx.Client, folder: Path) -> None:
    texts = [client.get(path, headers=bearer(ADMIN)).text for path in ("/metrics", "/load", "/openapi.json")]
    client.get("/v1/models", headers=bearer("secret-guess"))
    time.sleep(0.2)
    texts.append(server.log)
    data = [path.read_bytes() for path in folder.glob("data-*/**/*") if path.is_file()]
    assert data
    for key in (ANN, BOB, ADMIN, "secret-guess"):
        assert not any(key in text for text in texts)
        assert not any(key.encode() in content for content in data)


def test_all_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return original(a, b)

    keys = Keys((ANN, BOB), ADMIN)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (ANN, BOB, ADMIN, "a", ""):
        compared.clear()
        keys.tenant("/v1/models", key)
        assert len(compared) == 3 and {len(part) for pair in compared for part in pair} == {32}
