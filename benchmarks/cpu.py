"""Octavo beside other engines on a CPU, interleaved in one run: SmolLM2-135M, greedy, end of sequence ignored.

    python benchmarks/cpu.py [--columns b1,b8] [--engines octavo,openvino] [--peers FOLDER] [--rounds 3] [--json FILE]

Each engine is a process of its own and stays loaded; figures are taken in turn, each beside a measurement of the
memory's bandwidth: on a shared machine only ratios of one round can be trusted. Samples are added to --json as lines,
so a long run can be made of short ones: the table is of all lines in the file. Peers are those that are installed
(requirements-cpu-peers.txt).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cpu_models import folder_of, gguf_as

from octavo import env
from octavo.hub import find_model
from octavo.worker.machine import physical_cores

COLUMNS = {
    "b1": "tok/s: 1 request, 32 in, 128 out",
    "b8": "tok/s: 8 requests",
    "b32": "tok/s: 32 requests",
    "ragged": "tok/s: 64 requests of 16-256 in and out",
    "ttft512": "ms: a prompt of 512, 1 out",
    "ttft2048": "ms: a prompt of 2,048, 1 out",
    "busy": "%: of its quiet speed kept beside a busy process on one core; 1 request, 32 in and out",
    "start": "s: process start to first token",
    "peak": "MB: most memory, whatever ran",
}
LESS_IS_BETTER = ("ttft512", "ttft2048", "start", "peak")
NOISE = 0.3  # cores that other processes may use beside a sample that counts
WARM_UP = 10**6  # a seed that no round has
ENGINES = {  # name: environment of the peer, form of the model
    "octavo": ("", "gguf"),
    "octavo-gguf": ("", "gguf"),
    "octavo-int8": ("", "gguf"),
    "transformers": ("", "folder"),
    "openvino": ("openvino", "F16"),
    "llamacpp-bf16": ("llamacpp", "BF16"),
    "llamacpp-q4_1": ("llamacpp", "gguf"),
    "vllm": ("vllm", "folder"),
}
SLOW = {("transformers", "ragged"), ("llamacpp-bf16", "ragged"), ("llamacpp-q4_1", "ragged")}  # minutes for one figure
# Ends with whoever started it.
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(99999))"


class Engine:
    """A process that generates when asked. `start` is how long its first token took, in seconds."""

    def __init__(self, name: str, python: str, model: Path, threads: int) -> None:
        self.name = name
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("cpu_engines.py")), name, str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
            env=environment,
        )
        self._answer()
        self.start = time.perf_counter() - begin

    def ask(self, column: str, seed: int, *, warm: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"column": column, "seed": seed, "warm": warm}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> int:
        """Bytes at its peak."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        found: int = self._answer()["peak"]
        self.process.wait(30)
        return found

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        self.words.seek(0)
        sys.stderr.write(self.words.read()[-4000:])
        raise SystemExit(f"{self.name} ended with {self.process.wait()}; its last words are above.")


def start_engines(args: argparse.Namespace) -> list[Engine]:
    source = find_model(None).gguf
    assert source is not None
    kept = env.cache_root() / "benchmarks"
    found = []
    for name in args.engines or ENGINES:
        environment, form = ENGINES[name]
        python = str(args.peers / environment / "bin" / "python") if environment else sys.executable
        if not Path(python).exists():
            print(f"{name} is not installed: there is no {python}", flush=True)
            continue
        if form == "gguf":
            model = source
        elif form == "folder":
            model = folder_of(source, kept / source.stem)
        else:
            model = gguf_as(source, kept / f"{source.stem}.{form}.gguf", form)
        found.append(Engine(name, python, model, args.threads))
        print(f"{name}: first token after {found[-1].start:.1f} s", flush=True)
    return found


class Bandwidth:
    """Reads 256 MB, about the size of the weights."""

    def __init__(self) -> None:
        self.data = torch.ones(64 * 2**20)

    def __call__(self) -> float:
        """GB/s, the best of three."""
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            self.data.sum()
            best = min(best, time.perf_counter() - begin)
        return self.data.numel() * 4 / best / 1e9


def sample(engine: Engine, column: str, seed: int) -> dict[str, Any]:
    """`value` in the column's unit; `others`: cores that other processes used meanwhile."""
    found = engine.ask(column, seed)
    if column.startswith("ttft"):
        return found | {"value": found["seconds"] * 1e3}
    if column != "busy":
        return found | {"value": found["tokens"] / found["seconds"]}
    core = max(os.sched_getaffinity(0))
    spinning = subprocess.Popen([sys.executable, "-c", SPIN], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    time.sleep(0.3)
    beside = engine.ask(column, seed + 1000)
    spinning.kill()
    spinning.wait()
    return found | {"value": 100 * found["seconds"] / beside["seconds"], "beside": beside["seconds"]}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    run, samples = time.strftime("%Y-%m-%d %H:%M:%S"), []

    def keep(engine: str, column: str, round_: int, **values: Any) -> None:
        samples.append({"run": run, "engine": engine, "column": column, "round": round_} | values)
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(samples[-1]) + "\n")
        print(f"round {round_ + 1}, {column}, {engine}: {values['value']:.1f}", flush=True)

    engines = start_engines(args)
    for engine in engines:
        keep(engine.name, "start", 0, value=engine.start)
    wanted = [(column, engine) for column in args.columns for engine in engines if (engine.name, column) not in SLOW]
    for column, engine in wanted:
        engine.ask(column, WARM_UP, warm=True)
    bandwidth = Bandwidth()
    for round_ in range(args.rounds):
        for column, engine in wanted:
            speed = bandwidth()
            keep(engine.name, column, round_, **sample(engine, column, round_), bandwidth=speed)
    for engine in engines:
        keep(engine.name, "peak", 0, value=engine.close() / 1e6)
    return samples


def report(samples: list[dict[str, Any]]) -> None:
    columns = [column for column in COLUMNS if any(s["column"] == column for s in samples)]
    engines = [engine for engine in ENGINES if any(s["engine"] == engine for s in samples)]
    speeds = [s["bandwidth"] for s in samples if "bandwidth" in s]
    print(f"\n{processor()}; memory {spread(speeds)} GB/s; median (least - most, samples)\n")
    print(f"| | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for engine in engines:
        cells = (cell([s for s in samples if (s["engine"], s["column"]) == (engine, column)]) for column in columns)
        print(f"| {engine} | {' | '.join(cells)} |")
    for engine in [e for e in engines if e.startswith("octavo")]:
        print(f"| {engine} / best peer | {' | '.join(ratio(samples, engine, column) for column in columns)} |")
    print("\n" + "\n".join(f"{column}: {COLUMNS[column]}" for column in columns))
    print(f"Left out: samples beside which other processes used more than {NOISE} cores; ! where there are no others.")


def calm(sample: dict[str, Any]) -> bool:
    return bool(sample.get("others", 0) <= NOISE)


def cell(samples: list[dict[str, Any]]) -> str:
    quiet = [s["value"] for s in samples if calm(s)]
    return spread(quiet) if quiet or not samples else f"{spread([s['value'] for s in samples])}!"


def ratio(samples: list[dict[str, Any]], engine: str, column: str) -> str:
    """How many times as good as the best peer of the same round; the peak memory's is of all samples."""
    of = [s for s in samples if s["column"] == column and calm(s)]
    by_round: dict[tuple[str, int], dict[str, float]] = {}
    for s in of:
        by_round.setdefault((s["run"], s["round"]), {})[s["engine"]] = s["value"]
    less, found = column in LESS_IS_BETTER, []
    for values in by_round.values():
        peers = [value for name, value in values.items() if not name.startswith("octavo")]
        if peers and engine in values:
            found.append(min(peers) / values[engine] if less else values[engine] / max(peers))
    return f"{statistics.median(found):.2f}x" if found else "-"


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    digits = 0 if middle >= 100 else 1
    low, mid, high = (f"{value:,.{digits}f}" for value in (min(values), middle, max(values)))
    return f"{mid} ({low} - {high}, {len(values)})"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
    return f"{name}, {physical_cores()} cores"


def main() -> None:
    def names(known: Any) -> Any:
        def parse(text: str) -> list[str]:
            found = text.split(",")
            if unknown := [name for name in found if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
            return found

        return parse

    asked = [column for column in COLUMNS if column not in ("start", "peak")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=names(asked), default=asked, help=", ".join(asked))
    parser.add_argument("--engines", type=names(ENGINES), help=f"those that are installed of {', '.join(ENGINES)}")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--quick", action="store_true", help="one round, without what takes longest")
    parser.add_argument("--json", type=Path, help="add the samples to this file, and report all that it has")
    parser.add_argument("--report", action="store_true", help="measure nothing: only the table of --json")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.columns = 1, [column for column in args.columns if column not in ("ragged", "ttft2048")]
    torch.set_num_threads(args.threads)
    samples = [] if args.report else measure(args)
    if args.json:
        samples = [json.loads(line) for line in args.json.read_text(encoding="utf-8").splitlines()]
    report(samples)


if __name__ == "__main__":
    main()
