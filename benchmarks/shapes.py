"""Configurations in the shapes of well-known models, for runs with random weights; their sizes and physical limits."""

import json
import sys
from pathlib import Path
from typing import Any

import synthetic_tokenizer

from octavo.core.memory import kv_bytes_per_token, num_parameters
from octavo.model_spec import ModelSpec

# One NVIDIA H200, measured: bytes/s of a large copy, FLOP/s of a large bf16 product.
BANDWIDTH, FLOPS = 4.24e12, 801e12

_COMMON: dict[str, Any] = {"hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
        "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


def write(name: str, folder: Path, **overrides: Any) -> Path:
    """A model folder with a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | SHAPES[name] | overrides, indent=1))
    return folder


def limit_seconds(name: str, prompts: list[int], outputs: list[int]) -> float:
    """The least time for these requests at once: weights and KV bytes over bandwidth, FLOPs over the matrix rate.

    Prefill as one step bound by arithmetic or by one read of the weights, then one decode step for each further
    token of the longest output, over the sequences that still run.
    """
    spec = ModelSpec.from_config(_COMMON | SHAPES[name])
    parameters, head = num_parameters(spec), spec.vocab_size * spec.hidden_size
    body = parameters - head * (1 if spec.tie_word_embeddings else 2)
    per_token = kv_bytes_per_token(spec, 2)
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim  # FLOPs of one query over one key

    flops = sum(2 * body * n + attention * n * n / 2 for n in prompts) + 2 * head * len(prompts)
    weights = 2 * (body + head)
    seconds = max(flops / FLOPS, weights / BANDWIDTH)
    for step in range(1, max(outputs)):
        contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
        work = 2 * (body + head) * len(contexts)
        seconds += max(work / FLOPS, weights / BANDWIDTH) + sum(contexts) * per_token / BANDWIDTH
    return seconds


def main() -> None:
    """python benchmarks/shapes.py NAME FOLDER [VOCABULARY]: also a tokenizer, so that a server can be started on it."""
    name, folder, *vocabulary = sys.argv[1:]
    size = int(vocabulary[0]) if vocabulary else SHAPES[name]["vocab_size"]
    synthetic_tokenizer.write(write(name, Path(folder), vocab_size=size), size)


if __name__ == "__main__":
    main()
