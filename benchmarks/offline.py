"""Octavo beside transformers in one run, interleaved: SmolLM2-135M, greedy, end of sequence ignored.

    python benchmarks/offline.py [--rounds 3] [--dtype bfloat16] [--threads 2] [--only octavo]

Prints the median of each engine with its spread, the median of the ratios of neighbouring samples, and the
memory bandwidth measured beside each round: on a shared machine only ratios can be trusted.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from octavo import LLM, SamplingParams
from octavo.formats.gguf import GGUFFile
from octavo.hub import find_model
from octavo.weights.gguf import gguf_tensors

Work = tuple[list[list[int]], list[int]]
Generate = Callable[[list[list[int]], list[int]], int]


def prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(1000, 48000) for _ in range(length)] for length in lengths]


def workloads(seed: int, beginning: str = "") -> dict[str, Work]:
    """Fresh prompts each round, so that a prefix cache has nothing to find."""
    rng = random.Random(seed)
    shapes = random.Random(0)
    lengths = [(shapes.randint(16, 256), shapes.randint(16, 256)) for _ in range(64)]
    works = {
        "batch 1, 32 in, 128 out": (prompts(rng, [32]), [128]),
        "batch 32, 32 in, 128 out": (prompts(rng, [32] * 32), [128] * 32),
        "ragged 64, 16-256 in, 16-256 out": (prompts(rng, [a for a, _ in lengths]), [b for _, b in lengths]),
    }
    return {name: work for name, work in works.items() if name.startswith(beginning)}


def octavo_engine(args: argparse.Namespace) -> Generate:
    llm = LLM(dtype=args.dtype, num_threads=args.threads, max_model_len=4096)

    def generate(batch: list[list[int]], lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(batch, params, use_tqdm=False))

    return generate


def transformers_engine(args: argparse.Namespace) -> Generate:
    """Static batches of 32, padded on the left, each as long as its longest output."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    gguf = find_model(None).gguf
    dtype = getattr(torch, args.dtype)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.quantization_config = None  # plain weights, as Octavo has them
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.load_state_dict(dict(gguf_tensors(GGUFFile(gguf), dtype)), strict=False)
    model.tie_weights()

    def generate(batch: list[list[int]], lengths: list[int]) -> int:
        for begin in range(0, len(batch), 32):
            part, longest = batch[begin : begin + 32], max(lengths[begin : begin + 32])
            width = max(map(len, part))
            ids = torch.tensor([[2] * (width - len(p)) + p for p in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
            config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=2)
            with torch.inference_mode():
                model.generate(ids, attention_mask=mask, generation_config=config)
        return sum(lengths)

    return generate


def bandwidth() -> float:
    """GB/s of reading 256 MB, about the size of the weights."""
    data = torch.ones(64 * 2**20)
    best = min(_seconds(lambda: data.sum()) for _ in range(3))
    return data.numel() * 4 / best / 1e9


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["octavo", "transformers"])
    parser.add_argument("--work", default="", help="only work whose name begins like this")
    parser.add_argument("--json", help="also write all samples to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    makers = {"octavo": octavo_engine, "transformers": transformers_engine}
    engines = {name: make(args) for name, make in makers.items() if args.only in (None, name)}
    torch.set_num_threads(args.threads)
    for engine, generate in engines.items():  # warm up every shape
        for name, (batch, lengths) in workloads(10**6, args.work).items():
            seconds = _seconds(lambda g=generate, b=batch, n=lengths: g(b, [min(x, 8) for x in n]))
            print(f"warm-up, {engine}, {name}: {seconds:.1f} s", flush=True)
    samples: dict[str, dict[str, list[float]]] = {}
    bandwidths = []
    for round_ in range(args.rounds):
        for name, (batch, lengths) in workloads(round_, args.work).items():
            bandwidths.append(bandwidth())
            for engine, generate in engines.items():
                seconds = _seconds(lambda g=generate, b=batch, n=lengths: g(b, n))
                samples.setdefault(name, {}).setdefault(engine, []).append(seconds)
                print(f"round {round_ + 1}, {engine}, {name}: {seconds:.1f} s", flush=True)
        print(f"round {round_ + 1} of {args.rounds} done, memory {statistics.median(bandwidths):.1f} GB/s", flush=True)
    report(samples, args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"samples": samples, "bandwidths": bandwidths, "args": vars(args)}, file)


def report(samples: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> None:
    sizes = {name: sum(lengths) for name, (_, lengths) in workloads(0).items()}
    print(f"\nSmolLM2-135M {args.dtype}, {args.threads} threads, greedy, {args.rounds} rounds; median (least - most)\n")
    print("| work | Octavo | transformers | ratio |\n| --- | --- | --- | --- |")
    for name, by_engine in samples.items():
        cells = []
        for engine in ("octavo", "transformers"):
            values = by_engine.get(engine, [])
            if not values:
                cells.append("-")
            else:
                low, mid, high = (sizes[name] / f(values) for f in (max, statistics.median, min))
                cells.append(f"{mid:.1f} tok/s ({low:.1f} - {high:.1f})")
        pairs = zip(by_engine.get("transformers", []), by_engine.get("octavo", []), strict=False)
        ratios = [theirs / ours for theirs, ours in pairs]
        cells.append(f"{statistics.median(ratios):.2f}x" if ratios else "-")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
