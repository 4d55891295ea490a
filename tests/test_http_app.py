"""The HTTP API over an engine that is played: errors, keys, limits, streams, what happens to those who leave."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import tiny_tokenizers
from octavo import env
from octavo.errors import InvalidConfig
from octavo.server import http_limits, serving
from octavo.server.app import build
from octavo.server.options import ServerOptions
from stand_in import StandIn

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SAID = {"prompt": "hello", "max_tokens": 4}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.f_bpe(tmp_path_factory.mktemp("tokenizer"))


@contextlib.asynccontextmanager
async def played(
    folder: Path, options: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, StandIn]]:
    """A client of the app in this process."""
    stand_in = await StandIn(folder, **engine).start()
    app = build(ServerOptions(**{"data_dir": str(folder / "data"), **(options or {})}), stand_in)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield client, stand_in
    await stand_in.close()


@contextlib.asynccontextmanager
async def listening(folder: Path, options: dict[str, Any] | None = None, **engine: Any) -> AsyncIterator[Any]:
    """The same on a real port, for what a client's connection tells."""
    stand_in = await StandIn(folder, **engine).start()
    app = build(ServerOptions(**{"data_dir": str(folder / "data"), **(options or {})}), stand_in)
    config = uvicorn.Config(app, port=0, http=http_limits.protocol(), log_config=None, access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield port, stand_in
    finally:
        server.should_exit = True
        await task
        await stand_in.close()


def assert_error(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param, error
    assert answer.headers["x-request-id"]
    return error


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_states_of_the_engine(folder: Path) -> None:
    async with played(folder, begin=False) as (client, engine):
        assert (await client.get("/livez")).status_code == 200
        for path in ("/health", "/ready", "/readyz"):
            answer = await client.get(path)
            assert_error(answer, 503)
            assert answer.json()["state"] == "starting" and answer.json()["phase"]
        answer = await client.post("/v1/completions", json=SAID)
        assert_error(answer, 503)
        assert answer.headers["retry-after"] == "1"
        await engine.get_ready()
        assert (await client.get("/health")).status_code == 200
        assert (await client.head("/health")).status_code == 200
        assert (await client.post("/v1/completions", json=SAID)).status_code == 200
        engine.drain()
        assert_error(await client.get("/health"), 503)
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert_error(answer, 503)
        assert answer.headers["retry-after"]
        assert (await client.get("/metrics")).text == "octavo:x 1\n"
        engine.end("It broke.")
        answer = await client.post("/v1/completions", json=SAID)
        assert "It broke." in assert_error(answer, 503)["message"]
        assert (await client.get("/livez")).status_code == 200


@pytest.mark.case("HTTP-07")
async def test_a_full_queue(folder: Path) -> None:
    async with played(folder, refuse="The queue is full.") as (client, _):
        for body in (SAID, SAID | {"stream": True}):
            answer = await client.post("/v1/completions", json=body)
            assert assert_error(answer, 503)["message"].startswith("The queue is full.")
            assert answer.headers["retry-after"] == "7"


@pytest.mark.case("SSE-01")
async def test_shapes_and_counts(folder: Path) -> None:
    async with played(folder) as (client, engine):
        body = SAID | {"prompt": ["hello", "good day"], "n": 2, "max_tokens": 5}
        whole = (await client.post("/v1/completions", json=body)).json()
        length = sum(len(engine.tokenizer.encode(prompt)) for prompt in body["prompt"])
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
        usage = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert usage == {"prompt_tokens": length, "completion_tokens": 20, "total_tokens": length + 20}
        for asked in (True, False):
            stream = body | {"stream": True, "stream_options": {"include_usage": asked}}
            chunks = events((await client.post("/v1/completions", json=stream)).text)
            assert [chunk["choices"] for chunk in chunks].count([]) == asked
            if asked:
                assert chunks[-1]["choices"] == [] and chunks.pop()["usage"] == whole["usage"]
            texts, ends = [""] * 4, [0] * 4
            for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                assert not ends[choice["index"]], "the finish is the last of its choice"
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] += choice["finish_reason"] is not None
            assert texts == [choice["text"] for choice in whole["choices"]] and ends == [1] * 4


@pytest.mark.case("SSE-04")
async def test_an_error_in_the_middle(folder: Path) -> None:
    async with played(folder, fail_at=2) as (client, engine):
        for path, body in (("/v1/completions", SAID), ("/v1/chat/completions", CHAT)):
            assert "a fault" in assert_error(await client.post(path, json=body), 500)["message"]
            chunks = events((await client.post(path, json=body | {"stream": True})).text)
            assert "a fault" in chunks[-1]["error"]["message"] and chunks[-1]["error"]["code"] == 500
            assert not any(choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"])
        assert engine.num_live == 0


async def test_the_engine_dies_in_the_middle(folder: Path) -> None:
    async with played(folder, seconds=0.01) as (client, engine):
        asyncio.get_running_loop().call_later(0.1, engine.end, "It broke.")
        answers = await asyncio.gather(
            client.post("/v1/completions", json=SAID | {"max_tokens": 200, "stream": True}),
            client.post("/v1/completions", json=SAID | {"max_tokens": 200}),
        )
        assert events(answers[0].text)[-1]["error"]["message"] == "It broke."
        assert_error(answers[1], 503)


@pytest.mark.case("SEC-04")
async def test_keys(folder: Path) -> None:
    options = {"api_key": ("first", "second"), "admin_api_key": "boss", "metrics_key": "scraper"}
    async with played(folder, options) as (client, engine):
        for path in ("/livez", "/health", "/docs"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/v1/models", "/load", "/version", "/metrics", "/openapi.json", "/tokenizer_info", "/ping", "/no"):
            answer = await client.get(path)
            assert_error(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert_error(await client.get(path, headers={"authorization": "Bearer wrong"}), 401)
        for key, status in (("scraper", 200), ("first", 200), ("boss", 200), ("nobody", 401)):
            answer = await client.get("/metrics", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, key
        assert_error(await client.get("/v1/models", headers={"authorization": "Bearer scraper"}), 401)
        assert (await client.get("/v1/models", headers={"x-api-key": "second"})).status_code == 200
        for key in ("first", "second", "first"):
            answer = await client.post("/v1/completions", json=SAID, headers={"authorization": f"bearer {key}"})
            assert answer.status_code == 200
        tenants = [(request.tenant, request.namespace) for request in engine.received]
        assert tenants[0] == tenants[2] != tenants[1]
        assert "first" not in str(tenants)
        assert_error(await client.post("/reset_prefix_cache", headers={"x-api-key": "first"}), 401)
        assert (await client.post("/reset_prefix_cache", headers={"x-api-key": "boss"})).status_code == 200
    async with played(folder, {"api_key": ("first",)}) as (client, engine):
        assert_error(await client.post("/reset_prefix_cache", headers={"x-api-key": "first"}), 404)
        await client.post("/v1/completions", json=SAID, headers={"x-api-key": "first"})
        assert engine.received[0].tenant == ""
    async with played(folder) as (client, _):
        assert (await client.get("/metrics")).status_code == 200
        assert_error(await client.post("/reset_prefix_cache"), 404)
    with pytest.raises(InvalidConfig, match="api_key"):
        build(ServerOptions(api_key=("naïve",)), StandIn(folder))


async def test_unknown_fields(folder: Path) -> None:
    async with played(folder) as (client, _):
        answer = await client.post(
            "/v1/completions", json=SAID | {"foo": 1, "naïve\n": 2, "best_of": 1, "stream": None, "user": "u"}
        )
        assert answer.status_code == 200
        assert answer.headers["x-octavo-ignored"] == "foo, na%C3%AFve%0A"
        answer = await client.post(
            "/v1/chat/completions", json=CHAT | {"chat_template_kwargs": {"typo_key": 1}, "store": False}
        )
        assert answer.headers["x-octavo-ignored"] == "store, chat_template_kwargs.typo_key"
        many = SAID | {f"x{i}": i for i in range(100)}
        assert (await client.post("/v1/completions", json=many)).headers["x-octavo-ignored"].count(",") == 20
        for name, value in {"guided_json": [], "best_of": 3, "suffix": "x", "use_beam_search": True}.items():
            assert_error(await client.post("/v1/completions", json=SAID | {name: value}), 400, name)
        for name, value in {"response_format": {"type": "xml"}, "functions": [{}]}.items():
            assert_error(await client.post("/v1/chat/completions", json=CHAT | {name: value}), 400, name)
        plain = {"response_format": {"type": "text"}, "modalities": ["text"], "function_call": "none"}
        assert "x-octavo-ignored" not in (await client.post("/v1/chat/completions", json=CHAT | plain)).headers
    async with played(folder, {"reject_unknown_fields": True}) as (client, _):
        assert_error(await client.post("/v1/completions", json=SAID | {"foo": 1}), 400, "foo")
        assert (await client.post("/v1/completions", json=SAID)).status_code == 200


@pytest.mark.case("HTTP-05")
async def test_browsers_of_allowed_origins(folder: Path) -> None:
    asked = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    for allowed, origin in ((("http://a.test",), "http://a.test"), (("*",), "*")):
        options = {"allowed_origins": allowed, "api_key": ("k",)}
        async with played(folder, options) as (client, _):
            headers = {"origin": "http://a.test"}
            preflight = {"access-control-request-method": "POST", "access-control-request-headers": asked}
            answer = await client.options("/v1/chat/completions", headers=headers | preflight)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
            key = {"authorization": "Bearer k"}
            for body, more in ((CHAT | {"n": 0}, key), (CHAT, {}), (CHAT | {"stream": True}, key), (CHAT, key)):
                answer = await client.post("/v1/chat/completions", json=body, headers=headers | more)
                assert answer.headers["access-control-allow-origin"] == origin, answer.status_code
                credentials = answer.headers.get("access-control-allow-credentials")
                assert credentials == (None if origin == "*" else "true")
            answer = await client.get("/livez", headers={"origin": "http://b.test"})
            assert answer.headers.get("access-control-allow-origin") == ("*" if origin == "*" else None)
    async with played(folder) as (client, _):
        answer = await client.get("/livez", headers={"origin": "http://a.test"})
        assert "access-control-allow-origin" not in answer.headers


async def test_large_bodies(folder: Path) -> None:
    async with played(folder, {"max_body_bytes": 5000}) as (client, engine):
        long = json.dumps(SAID | {"user": "x" * 6000}).encode()
        kind = {"content-type": "application/json"}

        async def pieces(endless: bool) -> AsyncIterator[bytes]:
            while True:
                for start in range(0, len(long), 100):
                    yield long[start : start + 100]
                if not endless:
                    return

        assert_error(await client.post("/v1/completions", content=long, headers=kind), 413, "body")
        for endless in (False, True):
            answer = await client.post("/v1/completions", content=pieces(endless), headers=kind)
            assert_error(answer, 413, "body")
        lists = json.dumps({"prompt": [[1]] * 1000}).encode()
        assert (await client.post("/v1/completions", content=lists, headers=kind)).status_code == 413
        assert not engine.received


@pytest.mark.case("SEC-03")
async def test_many_answers_are_counted_before_anything_is_made(folder: Path) -> None:
    async with played(folder) as (client, engine):
        for body, param in (
            ({"prompt": [""] * 1_000_000}, "n"),
            ({"prompt": [[1]] * 1_000_000}, "body"),
            ({"prompt": ["a"] * 1000, "n": 100}, "n"),
            ({"prompt": "a", "n": 2**63}, "n"),
            ({"prompt": "a", "n": 10**6}, "n"),
            ({"prompt": "a", "n": 1.5}, "n"),
            ({"prompt": "a", "n": -1}, "n"),
            ({"prompt": "a", "n": 2000}, "n"),
            ({"prompt": "a", "best_of": 10**6}, "best_of"),
            ({"prompt": "a", "stop": ["x"] * 0 + [""]}, "stop"),
        ):
            assert_error(await client.post("/v1/completions", json=body), 400, param)
        assert not engine.received


@pytest.mark.case("ABT-01")
async def test_who_leaves_is_aborted_at_once(folder: Path) -> None:
    async with listening(folder, seconds=0.02) as (port, engine):
        for stream in (True, False):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps(SAID | {"max_tokens": 200, "n": 2, "stream": stream}).encode()
            writer.write(POST % len(body) + body)
            if stream:
                await reader.readuntil(b"data: ")
            else:
                await asyncio.sleep(0.2)
            assert engine.num_live == 1
            writer.close()
            for _ in range(50):
                if not engine.num_live:
                    break
                await asyncio.sleep(0.01)
            assert engine.num_live == 0 and len(set(engine.aborted)) == (2 if stream else 4)
        await asyncio.sleep(1.1)  # counts are sent once a second
        assert [row[:3] for row in engine.http] == [("POST", "/v1/completions", 200), ("POST", "/v1/completions", 499)]


async def test_silence_is_broken(folder: Path) -> None:
    async with played(folder, {"sse_keep_alive_interval": 0.05}, seconds=0.2) as (client, _):
        text = (await client.post("/v1/completions", json=SAID | {"stream": True, "max_tokens": 2})).text
        assert text.count(": keep-alive\n\n") >= 4
        chunks = events("".join(part + "\n\n" for part in text.split("\n\n") if part.startswith("data")))
        assert len(chunks) == 2


async def raw(port: int, data: bytes, wait: float = 5.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(wait):
            while piece := await reader.read(65536):
                answer += piece
    writer.close()
    return answer


@pytest.mark.case("HTTP-06")
async def test_large_headers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEADER_SECONDS", 0.5)
    async with listening(folder) as (port, engine):
        many = b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n"
        large = b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (5 << 20) + b"\r\n\r\n"
        address = b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
        for data in (many, large, address):
            answer = await raw(port, data)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 431 "), answer[:200]
        assert (await raw(port, many)).startswith(b"HTTP/1.1 431 ")
        assert b'"error"' in await raw(port, b"nonsense\r\n\r\n")
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in slow:
            writer.write(b"GET /livez HTTP/1.1\r\nhost")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/livez")).status_code == 200
        async with asyncio.timeout(5):
            assert await slow[0][0].read() == b""  # dropped
        for _, writer in slow:
            writer.close()
        lies = POST % 9
        assert (await raw(port, lies + b"{}", 0.3)) == b""  # still waiting for the rest
        assert b" 400 " in await raw(port, lies + b'{"prompt":""}', 0.5)
        assert not engine.received


async def test_the_id_of_a_request(folder: Path) -> None:
    async with played(folder) as (client, engine):
        answer = await client.post("/v1/completions", json=SAID, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine" and answer.json()["id"] == "cmpl-mine"
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=SAID, headers={"x-request-id": "same"}) for _ in range(10))
        )
        assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}
        assert len({request.id for request in engine.received}) == 11
        for bad in ("x" * 200, "a b"):
            answer = await client.get("/livez", headers={"x-request-id": bad})
            assert answer.headers["x-request-id"] != bad


async def test_what_a_process_of_the_api_loads() -> None:
    code = (
        "import sys; import octavo.server.process; from octavo.server.app import _router_modules; _router_modules();"
        "print([name for name in ('torch', 'triton', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env.for_child(sys.path))
    assert done.stdout == "[]\n", done.stderr


async def test_docs_need_nothing_from_elsewhere(folder: Path) -> None:
    async with played(folder) as (client, _):
        page = (await client.get("/docs")).text
        assert "openapi.json" in page and "http" not in page.replace("http-equiv", "")
        api = (await client.get("/openapi.json")).json()
        body = api["components"]["schemas"]["CompletionBody"]["properties"]
        assert {"temperature", "prompt", "echo", "min_p", "stop_token_ids"} <= set(body)
        assert "detokenize" not in body
        assert "422" not in json.dumps(list(api["paths"]["/v1/completions"]["post"]["responses"]))
    async with played(folder, {"disable_fastapi_docs": True}) as (client, _):
        assert_error(await client.get("/docs"), 404)
        assert_error(await client.get("/openapi.json"), 404)


async def test_long_texts_are_refused_before_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(folder) as (client, engine):
        monkeypatch.setattr(serving, "LONG_TEXT", 100)
        monkeypatch.setattr(engine.tokenizer, "encode", pytest.fail)
        answer = await client.post("/v1/completions", json={"prompt": "a" * 100_000})
        assert "256 tokens" in assert_error(answer, 400, "prompt")["message"]


@pytest.mark.case("HTTP-06")
async def test_huge_texts_hold_up_only_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(folder) as (client, engine):
        free = threading.Event()
        encode = engine.tokenizer.encode

        def slow(text: str, *args: Any) -> list[int]:
            assert len(text) <= serving.HUGE_TEXT or free.wait(20)
            return encode(text, *args)

        monkeypatch.setattr(serving, "HUGE_TEXT", 30_000)
        monkeypatch.setattr(engine.tokenizer, "encode", slow)
        body = {"prompt": "a b " * 10_000, "return_token_strs": True}
        huge = [asyncio.create_task(client.post("/tokenize", json=body)) for _ in range(10)]
        await asyncio.sleep(0.2)
        assert (await client.get("/health")).status_code == 200
        for text in ("hello", "good day " * 3_000):
            assert (await client.post("/tokenize", json={"prompt": text})).status_code == 200
        assert not any(task.done() for task in huge)
        free.set()
        answers = [await task for task in huge]
        assert {answer.status_code for answer in answers} == {200}
        assert len(answers[0].json()["token_strs"]) == answers[0].json()["count"]
