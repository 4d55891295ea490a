"""Octavo on one GPU with random weights, beside vLLM 0.22.1 on an H200 and the physical limit.

    python benchmarks/gpu.py [--models qwen3-0.6b ...] [--rows decode ttft ragged bulk] [--batches 1 32 256]
                             [--repeats 3] [--steps K] [--seconds 540] [--json FILE] [--profile FILE]
                             [--peer-weights] [--max-num-seqs N] [--block-size N] [--deterministic]

Token-id prompts, greedy, end of sequence ignored, no detokenization; one warm-up, then the median. Every row is
printed as soon as it is measured, with the GPU's mean clock and power; no row is begun after `--seconds`.

`--peer-weights`: every parameter, those of norms too, uniform in +-0.001 as vLLM's dummy weights are, instead of
Octavo's normal ones. A GPU at its power limit is the faster the fewer bits change.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import shapes
import torch

from octavo import LLM, SamplingParams

# vLLM 0.22.1 on the same GPU: output tokens/s of decoding by batch; seconds of a row by its name.
VLLM_DECODE = {
    "qwen2.5-1.5b": {1: 488, 2: 964, 4: 1830, 8: 3535, 16: 7512, 32: 13573, 64: 23374, 128: 32453, 256: 38785},
    "qwen3-0.6b": {1: 465, 2: 1089, 4: 2071, 8: 3340, 16: 7044, 32: 12130, 64: 19955, 128: 22586, 256: 38428},
    "llama-3.1-8b": {1: 205, 2: 407, 4: 806, 8: 1587, 16: 3096, 32: 5641, 64: 10250, 128: 16651, 256: 22145},
}
VLLM_SECONDS = {
    "qwen3-0.6b": {"ragged 256": 6.00},
    "qwen2.5-1.5b": {"ttft 128": 0.0063, "ttft 512": 0.0067, "ttft 2048": 0.0156, "ttft 8192": 0.0532},
    "llama-3.1-8b": {
        "ragged 256": 13.98, "ttft 128": 0.0107, "ttft 512": 0.0156, "ttft 2048": 0.0510, "ttft 8192": 0.2146,
        "bulk 512 x (1024+128)": 16.56, "bulk 512 x (128+1024)": 27.96,
    },
}  # fmt: skip


class Row(NamedTuple):
    name: str
    prompts: list[int]
    outputs: list[int]
    repeats: int


def rows(kinds: list[str], batches: list[int], repeats: int) -> Iterator[Row]:
    if "decode" in kinds:
        for batch in batches:
            yield Row(f"decode {batch}", [32] * batch, [128] * batch, repeats)
    if "ttft" in kinds:
        for length in (128, 512, 2048, 8192):
            yield Row(f"ttft {length}", [length], [1], max(repeats, 5))
    if "ragged" in kinds:
        rng = random.Random(0)
        prompts = []
        for _ in range(256):
            length = rng.randint(100, 1024)
            prompts.append(length)
            for _ in range(length):  # the peers' generator draws the prompts' tokens in between
                rng.randint(10, 10000)
        yield Row("ragged 256", prompts, [rng.randint(100, 1024) for _ in range(256)], min(repeats, 2))
    if "bulk" in kinds:
        yield Row("bulk 512 x (1024+128)", [1024] * 512, [128] * 512, 1)
        yield Row("bulk 512 x (128+1024)", [128] * 512, [1024] * 512, 1)


class Meter:
    """The GPU's clock and power while rows run, read by a thread every few milliseconds."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.clocks: list[int] = []
        self.watts: list[float] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(self.gpu, pynvml.NVML_CLOCK_SM))
            self.watts.append(pynvml.nvmlDeviceGetPowerUsage(self.gpu) / 1e3)
            time.sleep(0.01)

    def take(self) -> str:
        """Means since the last call."""
        clocks, watts, self.clocks, self.watts = self.clocks, self.watts, [], []
        return f"{statistics.mean(clocks or [0]):.0f} MHz, {statistics.mean(watts or [0]):.0f} W"


def run(llm: LLM, row: Row, rng: random.Random) -> float:
    prompts = [[rng.randrange(10, 10000) for _ in range(length)] for length in row.prompts]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in row.outputs]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output, wanted in zip(outputs, row.outputs, strict=True):
        found = len(output.outputs[0].token_ids)
        if found != wanted:  # an engine that stops early has not done the work
            raise SystemExit(f"{row.name}: {found} tokens instead of {wanted}: {output.outputs[0].stop_reason}")
    return seconds


def profile(llm: LLM, row: Row, path: Path) -> None:
    """The kernels of one run by time, and how much of it the GPU was busy; after runs without a pause, as in a row."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        rng = random.Random(time.time_ns())  # no prompt of another row, whose blocks would be found in the cache
        seconds = [run(llm, row, rng) for _ in range(4)][-1]
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    events = sorted(
        (event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    last = events[-1].time_range.end
    events = [event for event in events if event.time_range.start > last - seconds * 1e6]
    for event in events:
        kernels.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
    busy = sum(map(sum, kernels.values()))
    span = last - events[0].time_range.start
    with path.open("a") as file:
        file.write(f"== {row.name}: {seconds * 1e3:.2f} ms; GPU {span / 1e3:.2f} ms from first to last kernel, ")
        file.write(f"{busy / 1e3:.2f} ms in {len(events)} kernels\n")
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:16]:
            file.write(f"  {sum(times) / 1e3:9.3f} ms {len(times):6} x {sum(times) / len(times):8.1f} us  {name}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(shapes.SHAPES), choices=list(shapes.SHAPES))
    parser.add_argument("--rows", nargs="+", default=["decode", "ttft", "ragged"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="num_scheduler_steps")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--peer-weights", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    begin, results, meter = time.perf_counter(), [], Meter()
    rng = random.Random(time.time_ns())
    for model in args.models:
        if time.perf_counter() - begin > args.seconds:
            break
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            llm = LLM(
                str(shapes.write(model, Path(folder))), load_format="dummy", skip_tokenizer_init=True, device="cuda",
                num_scheduler_steps=args.steps, max_num_seqs=args.max_num_seqs, block_size=args.block_size,
                max_model_len=16384, deterministic=args.deterministic,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        if args.peer_weights:
            make_weights_small(llm)
        phases = ", ".join(f"{name} {value:.1f}" for name, value in llm.engine.start_phases.items())
        print(f"{model}: start {seconds:.1f} s ({phases})", flush=True)
        results.append({"model": model, "name": "start", "seconds": seconds, "phases": llm.engine.start_phases})
        for row in rows(args.rows, args.batches, args.repeats):
            if time.perf_counter() - begin > args.seconds:
                break
            run(llm, warm_up(row), rng)
            meter.take()
            samples = [run(llm, row, rng) for _ in range(row.repeats)]
            results.append(report(model, row, samples, meter.take()))
            if args.profile and row.name.split()[0] in ("decode", "ttft"):
                profile(llm, row, args.profile)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
        llm.close()
        del llm
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def warm_up(row: Row) -> Row:
    """The whole row where it is short; of bulk rows the prompts and a few tokens, as all kernels are loaded already."""
    return row._replace(outputs=[min(n, 8) for n in row.outputs]) if row.name.startswith("bulk") else row


def make_weights_small(llm: LLM) -> None:
    """Uniform in +-0.001, in place: captured graphs read the same memory."""
    runner: Any = llm.engine.loop.executor
    for parameter in runner.runner.model.parameters():
        parameter.data.uniform_(-1e-3, 1e-3)


def report(model: str, row: Row, samples: list[float], meter: str) -> dict[str, object]:
    seconds = statistics.median(samples)
    tokens = sum(row.outputs)
    limit = shapes.limit_seconds(model, row.prompts, row.outputs)
    kind, _, number = row.name.partition(" ")
    if kind == "decode":
        vllm = VLLM_DECODE[model].get(int(number))
        peer = tokens / vllm if vllm else None
    else:
        peer = VLLM_SECONDS.get(model, {}).get(row.name)
    ratio = f"{peer / seconds:5.2f} x vLLM" if peer else "     - x vLLM"
    shown = f"{seconds * 1e3:10.2f} ms" if kind == "ttft" else f"{seconds:10.3f} s "
    spread = f"{min(samples) * 1e3:.1f}..{max(samples) * 1e3:.1f} ms"
    print(
        f"{model:14} {row.name:24} {shown} {tokens / seconds:10,.0f} tok/s  {ratio}  {limit / seconds:4.0%} of limit  "
        f"({spread}; {meter})",
        flush=True,
    )
    return {"model": model, "name": row.name, "seconds": seconds, "samples": samples, "limit": limit, "vllm": peer}


if __name__ == "__main__":
    main()
