"""How far each way of computing on a CPU is from float32, on real text: top-1 agreement and errors of logprobs.

    python benchmarks/accuracy.py [--models smollm2,gemma3-270m] [--tokens 384]

The reference is transformers in float32 with the same weights, the text Octavo's own documents. Each position of a text
is predicted from all before it (teacher forcing); errors are those of the logprob of the token that stands there.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from cpu_models import plain_model

from octavo import LLM, SamplingParams
from octavo.hub import find_model

WAYS = {  # name: options
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
ROOT = Path(__file__).parent.parent
TEXTS = ("LICENSE", "docs/architecture.md", "CONTRIBUTING.md")


class Prediction(NamedTuple):
    best: list[int]  # the likeliest token of each position but the first
    logprobs: list[float]  # of the token that stands there


class Accuracy(NamedTuple):
    agreement: float  # share of positions with the same likeliest token
    mean: float  # absolute error of logprobs
    largest: float


def texts(llm: LLM, tokens: int) -> list[list[int]]:
    return [llm.engine.tokenizer.encode((ROOT / name).read_text(encoding="utf-8"))[:tokens] for name in TEXTS]


def reference(model: str, prompts: list[list[int]]) -> list[Prediction]:
    gguf = find_model(model).gguf
    assert gguf is not None
    network = plain_model(gguf, torch.float32)
    found = []
    for ids in prompts:
        with torch.inference_mode():
            rows = network(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        standing = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append(Prediction(rows.argmax(-1).tolist(), standing.tolist()))
    return found


def predicted(llm: LLM, prompts: list[list[int]]) -> list[Prediction]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    found = []
    for ids, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        rows = output.prompt_logprobs[1:]
        best = [max(row, key=lambda token: row[token].logprob) for row in rows]
        found.append(Prediction(best, [row[token].logprob for row, token in zip(rows, ids[1:], strict=True)]))
    return found


def accuracy(found: list[Prediction], wanted: list[Prediction]) -> Accuracy:
    pairs = list(zip(found, wanted, strict=True))
    same = [a == b for ours, theirs in pairs for a, b in zip(ours.best, theirs.best, strict=True)]
    errors = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
    return Accuracy(sum(same) / len(same), sum(errors) / len(errors), max(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2,gemma3-270m")
    parser.add_argument("--tokens", type=int, default=384, help="of each text")
    args = parser.parse_args()
    print("| model | weights | same likeliest token | mean error of logprobs | largest |\n|" + " --- |" * 5)
    for model in args.models.split(","):
        wanted: list[Prediction] = []
        for name, options in WAYS.items():
            with LLM(model, device="cpu", max_model_len=args.tokens + 16, **options) as llm:
                prompts = texts(llm, args.tokens)
                wanted = wanted or reference(model, prompts)
                found = accuracy(predicted(llm, prompts), wanted)
            print(f"| {model} | {name} | {found.agreement:.1%} | {found.mean:.4f} | {found.largest:.3f} |", flush=True)


if __name__ == "__main__":
    main()
