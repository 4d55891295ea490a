"""Mixed load on a real server for a long time: nothing may leak, and nobody may get an error that was not asked for.

    python benchmarks/soak.py [MODEL] [--seconds 1200] [--clients 24] [--seed 0] [--json FILE]

Starts `octavo serve` and plays clients of many kinds beside each other: streams read to the end, streams left half-way,
several samples, logprobs, priorities, short timeouts, bad input of every sort. Afterwards every KV block must be free,
the memory of the server's processes must not have grown by more than 2 % between the second and the last quarter of
the time, and every answer must have been one of those that its request may have.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

GROWTH = 0.02
CACHE = "128M"  # small, so that every block is written soon: memory counts from its first use
WORDS = ("sea", "bread", "moon", "library", "rain", "chess", "honey", "bridge", "winter", "garden", "train", "letter")


@dataclass
class Report:
    """What happened: answers by kind and outcome, what was not expected, memory over time."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(
        default_factory=list
    )  # seconds since the start, bytes by process
    seconds: float = 0.0
    blocks_left: int = -1
    exit_status: int = -1

    @property
    def growth(self) -> float:
        """Of the processes' memory, from the median of the second quarter of the time to that of the last."""
        quarters: list[list[int]] = [[], [], [], []]
        for at, sizes in self.memory:
            if 0 <= at < self.seconds:
                quarters[int(4 * at / self.seconds)].append(sum(sizes.values()))
        early, late = quarters[1], quarters[3]
        return statistics.median(late) / statistics.median(early) - 1

    @property
    def faults(self) -> list[str]:
        found = [f"unexpected: {what}" for what in self.unexpected[:20]]
        if self.blocks_left:
            found.append(f"{self.blocks_left} KV blocks are still in use")
        if self.growth > GROWTH:
            found.append(f"memory grew by {self.growth:.1%}")
        if self.exit_status:
            found.append(f"the server ended with {self.exit_status}")
        return found


class Clients:
    """Requests of all kinds; each says what it got, and raises `Unexpected` for what it may not get."""

    def __init__(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        self.http, self.rng = http, rng
        self.kinds: list[Callable[[], Awaitable[str]]] = [
            self.stream, self.stream, self.whole, self.samples, self.leaver, self.leaver, self.hurried, self.bad,
        ]  # fmt: skip

    async def one(self) -> tuple[str, str]:
        kind = self.rng.choice(self.kinds)
        return kind.__name__, await kind()

    def body(self, **more: Any) -> dict[str, Any]:
        words = [self.rng.choice(WORDS) for _ in range(self.rng.choice((1, 5, 30, 200)))]
        return {
            "prompt": "Write about " + " ".join(words),
            "max_tokens": self.rng.choice((1, 8, 40)),
            "temperature": self.rng.choice((0, 0.8)),
            "priority": self.rng.choice((0, 0, 5)),
            **more,
        }

    async def stream(self) -> str:
        body = self.body(stream=True, stream_options={"include_usage": True})
        text = ""
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            expect(response.status_code == 200, f"stream: {response.status_code}")
            async for line in response.aiter_lines():
                text += line + "\n"
        expect("data: [DONE]" in text, f"a stream without its end: {text[-300:]}")
        expect('"error"' not in text, f"an error in a stream: {text[-300:]}")
        return "read to the end"

    async def whole(self) -> str:
        message = {"role": "user", "content": self.body()["prompt"]}
        response = await self.http.post(
            "/v1/chat/completions",
            json={"messages": [message], "max_tokens": 16, "logprobs": True, "top_logprobs": self.rng.randint(0, 5)},
        )
        expect(response.status_code == 200, f"chat: {response.status_code} {response.text[:200]}")
        choice = response.json()["choices"][0]
        expect(choice["finish_reason"] in ("stop", "length"), f"chat: {choice}")
        return str(choice["finish_reason"])

    async def samples(self) -> str:
        count = self.rng.randint(2, 4)
        body = self.body(n=count, temperature=1.0, seed=self.rng.randrange(1 << 30), logprobs=2, echo=True)
        response = await self.http.post("/v1/completions", json=body)
        expect(response.status_code == 200, f"samples: {response.status_code} {response.text[:200]}")
        expect(len(response.json()["choices"]) == count, "samples are missing")
        return "all samples"

    async def leaver(self) -> str:
        body = self.body(stream=True, max_tokens=200, ignore_eos=True)
        stays = self.rng.choice((0, 1, 3, 10))
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            expect(response.status_code == 200, f"leaver: {response.status_code}")
            lines = response.aiter_lines()
            with contextlib.suppress(StopAsyncIteration):
                for _ in range(stays):
                    await anext(lines)
        return "left"

    async def hurried(self) -> str:
        body = self.body(timeout_ms=self.rng.choice((1, 30, 400)), max_tokens=200, ignore_eos=True)
        response = await self.http.post("/v1/completions", json=body)
        expect(response.status_code in (200, 408), f"timeout: {response.status_code} {response.text[:200]}")
        return str(response.status_code)

    async def bad(self) -> str:
        path, content = self.rng.choice(
            [
                ("/v1/completions", b"{"),
                ("/v1/completions", b'{"prompt": 5.5}'),
                ("/v1/completions", b'{"prompt": "x", "temperature": NaN}'),
                ("/v1/completions", b'{"prompt": "x", "max_tokens": -1}'),
                ("/v1/completions", b'{"prompt": [99999999]}'),
                ("/v1/completions", b'{"prompt": "x", "max_tokens": 10000000}'),
                ("/v1/completions", json.dumps({"prompt": "word " * 60_000}).encode()),
                ("/v1/completions", b"\xff\xfe"),
                ("/v1/chat/completions", b'{"messages": "hello"}'),
                ("/v1/chat/completions", b'{"messages": [], "n": 0}'),
                ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"a": 1}}'),
                ("/v1/nowhere", b"{}"),
            ]
        )
        response = await self.http.post(path, content=content, headers={"content-type": "application/json"})
        expect(400 <= response.status_code < 500 and response.status_code != 422, f"{path} {content[:60]!r}: "
               f"{response.status_code} {response.text[:200]}")  # fmt: skip
        expect("message" in response.json()["error"], f"no error body: {response.text[:200]}")
        return str(response.status_code)


class Unexpected(Exception):
    """An answer that its request may not have."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unexpected(otherwise)


def soak(
    model: str,
    seconds: float,
    folder: Path,
    *,
    clients: int = 24,
    seed: int = 0,
    warm_up: float = 0.0,
    cache: str = CACHE,
    flags: tuple[str, ...] = (),
) -> Report:
    """Start a server, load it for `warm_up` and then for `seconds`, stop it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-memory-bytes", cache]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data"), *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    report = Report()
    try:
        asyncio.run(_load(report, server, f"http://127.0.0.1:{port}", warm_up, seconds, clients, seed))
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            report.exit_status = server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            report.exit_status = server.wait()
    return report


async def _load(
    report: Report, server: "subprocess.Popen[bytes]", url: str, warm_up: float, seconds: float, clients: int, seed: int
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await _until_ready(http, server)
        begin = time.monotonic() + warm_up
        report.seconds = seconds

        async def client(number: int) -> None:
            played = Clients(http, random.Random(f"{seed} {number}"))
            while time.monotonic() - begin < seconds:
                try:
                    report.outcomes[": ".join(await played.one())] += 1
                except Unexpected as error:
                    report.unexpected.append(str(error))
                except httpx.HTTPError as error:
                    report.unexpected.append(f"{type(error).__name__}: {error}")

        async def watch() -> None:
            while (at := time.monotonic() - begin) < seconds:
                report.memory.append((at, _memory(server.pid)))
                if sys.stderr.isatty():
                    print(f"\r{at:6.0f} s  {sum(report.outcomes.values()):,} requests, "
                          f"{len(report.unexpected)} unexpected", end="", file=sys.stderr)  # fmt: skip
                await asyncio.sleep(min(1.0, seconds / 60))

        await asyncio.gather(watch(), *(client(number) for number in range(clients)))
        report.blocks_left = await _blocks_left(http)


async def _until_ready(http: httpx.AsyncClient, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/health")).status_code == 200:
                return
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        await asyncio.sleep(0.1)
    raise SystemExit("the server was not ready after 120 s")


async def _blocks_left(http: httpx.AsyncClient) -> int:
    """In use after everybody has gone; those who left may take a few steps to be noticed."""
    used = -1
    for _ in range(100):
        load = (await http.get("/load")).json()
        used = load["kv_blocks"]["used"]
        if load["running"] == load["waiting"] == used == 0:
            return 0
        await asyncio.sleep(0.1)
    return int(used) or -1


def _memory(pid: int) -> dict[str, int]:
    """Resident bytes of the server's processes by what they run."""
    parent = psutil.Process(pid)
    sizes: Counter[str] = Counter()
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = next((part for part in process.cmdline() if part.startswith("octavo.")), "supervisor")
            sizes[name] += process.memory_info().rss
    return dict(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("soak"), help="for the server's log and data")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    report = soak(args.model, args.seconds, args.folder, clients=args.clients, seed=args.seed)
    print()
    for outcome, count in sorted(report.outcomes.items()):
        print(f"{count:8,}  {outcome}")
    for name in report.memory[0][1]:
        sizes = [found.get(name, 0) for _, found in report.memory]
        print(f"memory of {name}: {min(sizes) / 2**20:,.0f} to {max(sizes) / 2**20:,.0f} MiB")
    print(f"memory of all: growth {report.growth:+.2%} from the second to the last quarter")
    if args.json:
        content = {
            "outcomes": report.outcomes, "unexpected": report.unexpected, "memory": report.memory,
            "growth": report.growth, "blocks_left": report.blocks_left, "faults": report.faults,
        }  # fmt: skip
        args.json.write_text(json.dumps(content))
    for fault in report.faults:
        print(f"FAULT  {fault}")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
