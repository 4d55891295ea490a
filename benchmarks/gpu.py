"""Octavo on one GPU with random weights, beside vLLM 0.22.1 on an H200 and the physical limit.

    python benchmarks/gpu.py [--models qwen3-0.6b ...] [--rows decode ttft ragged bulk] [--batches 1 32 256]
                             [--repeats 3] [--steps K] [--seconds 540] [--json FILE] [--profile FILE]

Token-id prompts, greedy, end of sequence ignored, no detokenization; one warm-up, then the median. Every row is
printed as soon as it is measured, and no row is begun after `--seconds`.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    """The kernels of one run by time, and the host's share."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        run(llm, row, random.Random(99))
    table = found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60)
    with path.open("a") as file:
        file.write(f"== {row.name}\n{table}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(shapes.SHAPES), choices=list(shapes.SHAPES))
    parser.add_argument("--rows", nargs="+", default=["decode", "ttft", "ragged"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="num_scheduler_steps")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    begin, results = time.perf_counter(), []
    rng = random.Random(time.time_ns())
    for model in args.models:
        if time.perf_counter() - begin > args.seconds:
            break
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            llm = LLM(
                str(shapes.write(model, Path(folder))), load_format="dummy", skip_tokenizer_init=True, device="cuda",
                num_scheduler_steps=args.steps, max_num_seqs=args.max_num_seqs, block_size=args.block_size,
                max_model_len=16384,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        phases = ", ".join(f"{name} {value:.1f}" for name, value in llm.engine.start_phases.items())
        print(f"{model}: start {seconds:.1f} s ({phases})", flush=True)
        results.append({"model": model, "name": "start", "seconds": seconds, "phases": llm.engine.start_phases})
        for row in rows(args.rows, args.batches, args.repeats):
            if time.perf_counter() - begin > args.seconds:
                break
            run(llm, row, rng)
            samples = [run(llm, row, rng) for _ in range(row.repeats)]
            results.append(report(model, row, samples))
            if args.profile and row.name.split()[0] in ("decode", "ttft"):
                profile(llm, row, args.profile)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
        llm.close()
        del llm
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def report(model: str, row: Row, samples: list[float]) -> dict[str, object]:
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
        f"({spread})",
        flush=True,
    )
    return {"model": model, "name": row.name, "seconds": seconds, "samples": samples, "limit": limit, "vllm": peer}


if __name__ == "__main__":
    main()
