"""The load benchmark: arrivals, definitions, the synthetic tokenizer, and its client against a scripted server."""

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import serve  # noqa: E402
import synthetic_tokenizer  # noqa: E402
from sse_client import Answer  # noqa: E402


def test_arrivals_are_those_of_vllm() -> None:
    rng = random.Random(0)
    assert serve.arrivals(3, float("inf"), 1.0, rng) == [0.0, 0.0, 0.0]
    assert serve.arrivals(4, 2.0, float("inf"), rng) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    for burstiness, deviation in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        times = serve.arrivals(20_000, 10.0, burstiness, rng)
        assert times[-1] == pytest.approx(2000.0) and times == sorted(times)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.1)


def test_times_are_what_they_are_called() -> None:
    answers = [
        Answer(0, sent=10.0, times=[10.5, 10.7, 10.9], prompt_tokens=4, output_tokens=3),
        Answer(1, waited=9.0, sent=11.0, times=[12.0], prompt_tokens=4, output_tokens=1),
        Answer(2, sent=10.0, error="status 400"),
    ]
    found = serve.summary(answers, busy=1.0)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"status 400": 1})
    assert found["duration"] == pytest.approx(2.0) and found["output_throughput"] == pytest.approx(2.0)
    assert found["mean_ttft_ms"] == pytest.approx(750) and found["p99_ttft_ms"] == pytest.approx(995)
    assert found["mean_tpot_ms"] == pytest.approx(200) and found["median_itl_ms"] == pytest.approx(200)
    assert found["mean_e2el_ms"] == pytest.approx(950) and found["max_concurrent_requests"] == 1
    assert found["client_busy"] == pytest.approx(0.5)


@pytest.mark.parametrize("size", [300, 5000, 49152])
def test_text_of_the_synthetic_tokenizer_comes_back(tmp_path: Path, size: int) -> None:
    synthetic_tokenizer.write(tmp_path, size)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert raw.get_vocab_size() == size
    rng = random.Random(0)
    ids = [rng.randrange(size - 40, size) for _ in range(256)]
    assert raw.encode(raw.decode(ids)).ids == ids
    assert raw.decode(raw.encode("Grüße, 世界! 12").ids) == "Grüße, 世界! 12"


@pytest.fixture
def scripted_server() -> Iterator[int]:
    """A server that streams four tokens and a usage chunk, refuses prompts that begin with 7, cut into odd pieces."""
    ready, stop = threading.Event(), threading.Event()
    port = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) if b"POST" in head else 0
            body = json.loads(await reader.readexactly(length)) if length else {}
            if not length:
                content = b'{"data": [{"id": "scripted"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
            elif body["prompt"][0] == 7:
                content = b'{"error": {"message": "no"}}'
                writer.write(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                count = len(body["prompt"])
                usage = b'{"prompt_tokens": %d, "completion_tokens": 4}' % count
                events = [b'data: {"choices":[{"text":"a"}]}\n\n'] * 4
                events += [b'data: {"choices":[],"usage":' + usage + b"}\n\n", b"data: [DONE]\n\n"]
                for event in events:
                    chunk = b"%x\r\n%b\r\n" % (len(event), event)
                    for piece in (chunk[:9], chunk[9:]):
                        writer.write(piece)
                        await writer.drain()
                    await asyncio.sleep(0.005)
                writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(reader, writer)

    async def main() -> None:
        nonlocal port
        server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        ready.set()
        await asyncio.to_thread(stop.wait)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    ready.wait(10)
    yield port
    stop.set()
    thread.join(10)


def test_the_client_counts_what_a_server_sends(scripted_server: int, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "serve.py"), "--port", str(scripted_server), "--num-prompts", "12"]
    command += ["--random-input-len", "5", "--max-concurrency", "3", "--clients", "2", "--json", str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Serving Benchmark Result" in found.stdout
    result = json.loads((tmp_path / "out").read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "scripted")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (60, 48)
    assert 5 <= result["median_itl_ms"] < 100 and result["max_concurrent_requests"] <= 3
    ids = ["--lowest-id", "7", "--vocab-size", "8"]
    refused = subprocess.run([*command, *ids], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1 and '12 x status 400: {"error": {"message": "no"}}' in refused.stdout
