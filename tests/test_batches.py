"""Batches and files: OpenAI's shapes, limits, whose they are, and what survives restarts and kills."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch_server import Answers, ScriptedEngine, build
from octavo.batch_lines import BadLine, parse
from octavo.server.batch_runner import PRIORITY
from octavo.server.batch_store import Store

Line = dict[str, Any]


def line(name: str, prompt: str = "", **more: Any) -> Line:
    body = {"model": "scripted", "prompt": prompt or name, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(*lines: Line) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


@asynccontextmanager
async def client(
    data: Path, answers: Answers, engine: ScriptedEngine | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = build(data, answers, engine, **options)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http,
    ):
        yield http


async def upload(http: httpx.AsyncClient, content: bytes, **headers: str) -> str:
    found = await http.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, headers=headers
    )
    assert found.status_code == 200, found.text
    return str(found.json()["id"])


async def start(http: httpx.AsyncClient, *lines: Line, **more: Any) -> dict[str, Any]:
    request = {"input_file_id": await upload(http, jsonl(*lines)), "endpoint": "/v1/completions", **more}
    found = await http.post("/v1/batches", json={"completion_window": "24h", **request})
    assert found.status_code == 200, found.text
    return dict(found.json())


async def end_of(http: httpx.AsyncClient, batch_id: str, seconds: float = 15) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return dict(batch)
        await asyncio.sleep(0.05)
    raise AssertionError(f"the batch did not end: {batch}")


async def records(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    content = (await http.get(f"/v1/files/{file_id}/content")).content
    return [json.loads(item) for item in content.splitlines()]


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_batch_from_upload_to_output(tmp_path: Path) -> None:
    async def test() -> None:
        answers = Answers()
        answers.busy = 3  # a full queue is no answer: those lines are asked again
        async with client(tmp_path, answers) as http:
            begun = await start(http, line("a"), line("b", "bad"), line("c", priority=7), metadata={"for": "test"})
            assert (begun["object"], begun["status"], begun["errors"]) == ("batch", "validating", None)
            batch = await end_of(http, begun["id"])
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
            assert batch["metadata"] == {"for": "test"}
            assert batch["usage"]["total_tokens"] == 6
            good = await records(http, batch["output_file_id"])
            assert [item["custom_id"] for item in good] == ["a", "c"]
            assert set(good[0]) == {"id", "custom_id", "response", "error"}
            assert set(good[0]["response"]) == {"status_code", "request_id", "body"}
            assert good[0]["response"]["status_code"] == 200
            assert good[0]["response"]["body"]["choices"][0]["text"] == "<a>"
            (bad,) = await records(http, batch["error_file_id"])
            assert (bad["custom_id"], bad["response"]["status_code"]) == ("b", 400)
            assert bad["response"]["body"]["error"]["message"] == "no"
            assert sorted(body["priority"] for body in answers.seen) == [PRIORITY, PRIORITY, PRIORITY + 7]
            output = (await http.get(f"/v1/files/{batch['output_file_id']}")).json()
            assert (output["purpose"], output["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
            assert output["bytes"] == sum(len(json.dumps(item, separators=(",", ":"))) + 1 for item in good)
            times = [batch[name] for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at")]
            assert times == sorted(times) and batch["expires_at"] == batch["created_at"] + 86400

    run(test)


def test_the_openai_client_runs_a_batch(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")

    async def test() -> None:
        async with client(tmp_path, Answers()) as http:
            api = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)
            file = await api.files.create(file=("in.jsonl", jsonl(line("a"), line("b"))), purpose="batch")
            batch = await api.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h",
                output_expires_after={"anchor": "created_at", "seconds": 3600},
            )  # fmt: skip
            while batch.status != "completed":
                assert batch.status in ("validating", "in_progress", "finalizing")
                await asyncio.sleep(0.05)
                batch = await api.batches.retrieve(batch.id)
            assert (await api.files.content(batch.output_file_id)).text.count("\n") == 2
            output = await api.files.retrieve(batch.output_file_id)
            assert output.expires_at == output.created_at + 3600
            assert [item.id async for item in api.batches.list(limit=1)] == [batch.id]
            assert {item.id async for item in api.files.list(limit=1)} == {file.id, batch.output_file_id}
            assert (await api.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await api.files.retrieve(file.id)

    run(test)


def test_lists_are_paged(tmp_path: Path) -> None:
    async def test() -> None:
        async with client(tmp_path, Answers()) as http:
            ids = [(await start(http, line("a")))["id"] for _ in range(5)]
            first = (await http.get("/v1/batches", params={"limit": 2})).json()
            assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:2:-1], True)
            assert (first["first_id"], first["last_id"]) == (ids[4], ids[3])
            rest = (await http.get("/v1/batches", params={"limit": 3, "after": first["last_id"]})).json()
            assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
            found = await http.get("/v1/files", params={"limit": 2, "order": "asc", "purpose": "batch"})
            assert len(found.json()["data"]) == 2 and found.json()["has_more"]
            assert (await http.get("/v1/batches", params={"after": "batch_x"})).status_code == 404

    run(test)


def test_a_bad_file_fails_the_batch_and_names_its_lines(tmp_path: Path) -> None:
    content = b"\n".join(
        [
            json.dumps(line("a")).encode(), b"{", b"", b"[]", json.dumps(line("a")).encode(),
            json.dumps({**line("u"), "url": "/v1/embeddings"}).encode(),
            json.dumps({**line("m"), "method": "GET"}).encode(),
            json.dumps({**line("b"), "body": 1}).encode(),
            json.dumps(line("s", stream=True)).encode(),
            json.dumps(line("n", model="other")).encode(),
            json.dumps({**line("x"), "custom_id": 5}).encode(), b'{"custom_id": NaN}', b"[" * 100_000, b"\xff\xfe",
        ]
    )  # fmt: skip

    async def test() -> None:
        answers = Answers()
        async with client(tmp_path, answers) as http:
            file_id = await upload(http, content)
            request = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
            batch = await end_of(http, (await http.post("/v1/batches", json=request)).json()["id"])
            assert batch["status"] == "failed" and batch["failed_at"]
            found = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
            assert found == [
                (2, "invalid_json_line"), (4, "invalid_json_line"), (5, "duplicate_custom_id"), (6, "invalid_url"),
                (7, "invalid_method"), (8, "missing_required_parameter"), (9, "invalid_request"),
                (10, "model_not_found"), (11, "missing_required_parameter"), (12, "invalid_json_line"),
                (13, "invalid_json_line"), (14, "invalid_json_line"),
            ]  # fmt: skip
            assert not answers.seen
            empty = await upload(http, b"\n \n")
            batch = await end_of(
                http, (await http.post("/v1/batches", json={**request, "input_file_id": empty})).json()["id"]
            )
            assert batch["errors"]["data"][0]["code"] == "empty_file"

    run(test)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "24"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../batches.sqlite3"}, "input_file_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"output_expires_after": {"anchor": "never", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
    ],
)
def test_what_a_batch_cannot_be(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with client(tmp_path, Answers(), max_batch_requests=2) as http:
            good = {"endpoint": "/v1/completions", "completion_window": "24h"}
            request = {"input_file_id": await upload(http, jsonl(line("a"))), **good}
            found = await http.post("/v1/batches", json={**request, **change})
            assert (found.status_code, found.json()["error"]["param"]) == (400, param)
            many = await upload(http, jsonl(*(line(str(i)) for i in range(3))))
            found = await http.post("/v1/batches", json={**request, "input_file_id": many})
            assert found.status_code == 400 and "more than 2 lines" in found.text

    run(test)


def test_uploads_have_limits(tmp_path: Path) -> None:
    async def test() -> None:
        async with client(tmp_path, Answers(), max_file_bytes=1000) as http:

            async def post(content: bytes = b"x", name: str = "a", **fields: Any) -> httpx.Response:
                return await http.post(
                    "/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields}
                )

            assert (await post(b"x" * 1000)).status_code == 200
            assert (await post(b"x" * 1001)).status_code == 413
            assert (await post(b"")).status_code == 400
            assert (await post(purpose="fine-tune")).status_code == 400
            assert (await post(extra="y" * 70_000)).status_code == 400
            assert (
                await post(**{"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"})
            ).status_code == 400
            assert (await post(**{str(i): "" for i in range(40)})).status_code == 400
            assert (await http.post("/v1/files", json={})).status_code == 400
            assert (await http.post("/v1/files", data={"purpose": "batch"})).status_code == 400
            form = {"content-type": "multipart/form-data; boundary=x"}
            for broken in (b"", b"--x\r\n", b"--y\r\n\r\n--y--", b"--x\r\n" + b"a" * 100):
                assert (await http.post("/v1/files", content=broken, headers=form)).status_code == 400
            kept = (await post(name="../../etc/passwd")).json()
            assert kept["filename"] == "passwd" and kept["bytes"] == 1
            listed = (await http.get("/v1/files")).json()["data"]
            assert len(listed) == 2
            assert sorted(path.name for path in (tmp_path / "files").iterdir()) == sorted(item["id"] for item in listed)

    run(test)


@pytest.mark.case("SEC-02")
def test_a_file_id_reaches_nothing_else_on_disk(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "secret").write_text("secret")
        async with client(tmp_path, Answers()) as http:
            for name in ("../secret", "..%2Fsecret", "%2Fetc%2Fpasswd", "..", "%00", "file:///etc/passwd"):
                for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                    found = await http.request(method, f"/v1/files/{name}{path}")
                    assert found.status_code in (404, 405, 307) and "secret" not in found.text.replace(name, "")
        assert (tmp_path / "secret").exists()

    run(test)


def test_a_key_sees_only_its_own(tmp_path: Path) -> None:
    async def test() -> None:
        answers = Answers()
        async with client(tmp_path, answers) as http:
            http.headers["x-tenant"] = "ann"
            batch = await end_of(http, (await start(http, line("a")))["id"])
            http.headers["x-tenant"] = "bob"
            assert (await http.get(f"/v1/batches/{batch['id']}")).status_code == 404
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 404
            for name in (batch["input_file_id"], batch["output_file_id"]):
                assert (await http.get(f"/v1/files/{name}")).status_code == 404
                assert (await http.get(f"/v1/files/{name}/content")).status_code == 404
                assert (await http.delete(f"/v1/files/{name}")).status_code == 404
            request = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions"}
            assert (await http.post("/v1/batches", json=request)).status_code == 400
            assert not (await http.get("/v1/batches")).json()["data"]
            assert not (await http.get("/v1/files")).json()["data"]
            assert answers.tenants == {"ann"}

    run(test)


def test_cancelling_keeps_what_is_answered(tmp_path: Path) -> None:
    async def test() -> None:
        async with client(tmp_path, Answers(0.05), batch_concurrency=1) as http:
            batch = await start(http, *(line(str(i)) for i in range(200)))
            assert (await http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 409
            while (await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] < 2:
                await asyncio.sleep(0.02)
            found = await http.post(f"/v1/batches/{batch['id']}/cancel")
            assert found.json()["status"] == "cancelling"
            batch = await end_of(http, batch["id"])
            assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
            good = await records(http, batch["output_file_id"])
            rest = await records(http, batch["error_file_id"])
            assert 2 <= len(good) < 50 and len(good) + len(rest) == 200
            assert rest[0]["response"] is None and rest[0]["error"]["code"] == "batch_cancelled"
            counts = {"total": 200, "completed": len(good), "failed": len(rest)}
            assert batch["request_counts"] == counts
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 200
            done = await end_of(http, (await start(http, line("a")))["id"])
            assert (await http.post(f"/v1/batches/{done['id']}/cancel")).status_code == 400

    run(test)


def test_a_window_that_ends_expires_the_rest(tmp_path: Path) -> None:
    async def test() -> None:
        async with client(tmp_path, Answers(0.1), batch_concurrency=1) as http:
            batch = await end_of(
                http, (await start(http, *(line(str(i)) for i in range(100)), completion_window="2s"))["id"]
            )
            assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
            rest = await records(http, batch["error_file_id"])
            assert {item["error"]["code"] for item in rest} == {"batch_expired"}
            assert len(rest) + len(await records(http, batch["output_file_id"])) == 100

    run(test)


def test_lines_leave_room_for_others(tmp_path: Path) -> None:
    async def test() -> None:
        for load, most in (
            ({"running": 0, "waiting": 0}, 12),
            ({"running": 3, "waiting": 0}, 2),
            ({"running": 16, "waiting": 4}, 1),
        ):
            answers, engine = Answers(0.02), ScriptedEngine(max_num_seqs=16)
            engine.load = load
            async with client(tmp_path / str(most), answers, engine) as http:
                await end_of(http, (await start(http, *(line(str(i)) for i in range(40))))["id"])
            assert answers.most == most

    run(test)


def test_one_process_runs_batches_and_another_takes_over(tmp_path: Path) -> None:
    async def test() -> None:
        first, second = Answers(0.01), Answers(0.01)
        async with client(tmp_path, second) as http:
            one = await end_of(http, (await start(http, *(line(str(i)) for i in range(30))))["id"])
            async with client(tmp_path, first) as reader:
                two = await start(reader, *(line(str(i)) for i in range(30)))
                two = await end_of(reader, two["id"])
                assert [item["id"] for item in (await reader.get("/v1/batches")).json()["data"]] == [
                    two["id"],
                    one["id"],
                ]
        assert (len(first.seen), len(second.seen)) == (0, 60)
        async with client(tmp_path, first) as http:
            await end_of(http, (await start(http, line("a")))["id"])
        assert len(first.seen) == 1

    run(test)


def test_an_ending_server_leaves_lines_for_the_next(tmp_path: Path) -> None:
    async def test() -> None:
        engine, answers = ScriptedEngine(), Answers(0.05)
        async with client(tmp_path, answers, engine, batch_concurrency=2) as http:
            batch = await start(http, *(line(str(i)) for i in range(40)))
            while len(answers.seen) < 6:
                await asyncio.sleep(0.01)
            engine.state = "draining"
            await asyncio.sleep(0.6)
            assert answers.in_flight == 0
            assert (await http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
        before = len(answers.seen)
        assert before < 40
        async with client(tmp_path, answers) as http:
            batch = await end_of(http, batch["id"])
            assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
            found = await records(http, batch["output_file_id"])
            assert [item["custom_id"] for item in found] == [str(i) for i in range(40)]

    run(test)


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 in the middle, several times: every line is in the output once, and few were asked twice."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, batch_id, count = f"http://127.0.0.1:{port}", "", 120

    def serve() -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("batch_server.py")
        return subprocess.Popen([sys.executable, str(program), str(tmp_path), str(port), "0.05"], env={**os.environ})

    def status() -> dict[str, Any]:
        return dict(httpx.get(f"{url}/v1/batches/{batch_id}").json())

    for attempt in range(4):
        server = serve()
        try:
            wait_for(lambda: httpx.get(f"{url}/v1/batches").status_code == 200)
            if not batch_id:
                content = jsonl(*(line(str(i)) for i in range(count)))
                file = httpx.post(f"{url}/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}).json()
                request = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
                batch_id = httpx.post(f"{url}/v1/batches", json=request).json()["id"]
            goal = (attempt + 1) * count // 4
            wait_for(lambda: status()["request_counts"]["completed"] >= goal)  # noqa: B023 - waits at once
            if attempt == 3:
                wait_for(lambda: status()["status"] == "completed")
                output = status()["output_file_id"]
                lines = httpx.get(f"{url}/v1/files/{output}/content").text.splitlines()
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
    assert [json.loads(item)["custom_id"] for item in lines] == [str(i) for i in range(count)]
    asked = (tmp_path / "answered.log").read_text().splitlines()
    assert count <= len(asked) <= count + 3 * 12  # at each kill no more than what was in flight


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (httpx.TransportError, KeyError):
            pass
        time.sleep(0.03)
    raise AssertionError("it did not come about in time")


def test_a_line_is_recorded_once_and_finishing_can_be_repeated(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch = store.add_batch(
        "", "scripted", 60, endpoint="/v1/completions", input_file_id="file-1", completion_window="60s"
    )
    record = {
        "id": "1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "", "body": {}},
        "error": None,
    }
    assert store.record(batch["id"], 1, record) and not store.record(batch["id"], 1, record)
    store._write_answers(store.path("half"), batch["id"], 1)  # as a process that ended before the transaction
    for _ in range(2):
        if store.batch(batch["id"])["status"] != "completed":
            store.finish(store.batch(batch["id"]), "completed")
    row = store.batch(batch["id"])
    assert (row["completed"], row["status"]) == (1, "completed")
    assert len(store.path(row["output_file_id"]).read_bytes().splitlines()) == 1
    old = time.time() - 2 * 3600
    os.utime(store.path("half"), (old, old))
    store.sweep()
    assert not store.path("half").exists() and store.path(row["output_file_id"]).exists()
    store.close()


def test_lines_of_the_wrong_kind() -> None:
    assert parse(1, b'{"custom_id": "a", "url": "/v1/completions", "body": {}}').body == {}
    for raw in (b"null", b"{}", b'{"custom_id": "a", "url": "/v1/completions", "body": []}', b"\x00"):
        with pytest.raises(BadLine):
            parse(1, raw)
