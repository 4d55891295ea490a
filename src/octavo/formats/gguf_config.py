"""From a GGUF file's metadata to the config.json that Hugging Face would have for the same model."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from octavo.errors import InvalidWeights

DEFAULT_ROPE_THETA = 10000.0
GEMMA3_SLIDING_PATTERN = 6  # every sixth layer attends to everything
GEMMA3_27B_LAYERS = 62  # the one size whose attention is scaled by hidden_size / heads and not by the head size

# llama.cpp looks for these when a file does not say which token ends a turn
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
CONTROL = 3  # a value of tokenizer.ggml.token_type

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
_MISTRAL = ("MistralForCausalLM", "mistral")


def hf_config(
    file_name: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    numbers_of: Callable[[str], list[float]],
) -> dict[str, Any]:
    """Config of architectures llama (Llama, Mistral, Mixtral), qwen2, qwen3, qwen3moe, gemma3 and phi3.

    `shapes` are those of the file's tensors; `numbers_of` reads a tensor of one dimension. Absent optional
    keys have llama.cpp's defaults. Rotary positions are in `rope_parameters`, shaped as transformers 5 has
    them: one dictionary, or for Gemma 3 one for `full_attention` and one for `sliding_attention`.
    They may have `frequency_factors`, one divisor for each pair of dimensions, on top of what `rope_type`
    does: the tensor `rope_freqs.weight`, which is how GGUF stores the "llama3" scaling.

    Raises:
        InvalidWeights: an unknown architecture, a required key that is absent, or a value out of range;
            the message names the key.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise InvalidWeights(
            f"{file_name}: general.architecture={architecture!r} is not one that is read.",
            f"These are: {', '.join(_ARCHITECTURES)}.",
        )
    if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
        raise InvalidWeights(f"{file_name}: there is no tensor 'token_embd.weight' of two dimensions.")
    keys = _Keys(file_name, metadata, architecture)
    config = _common(keys, shapes)
    if architecture == "gemma3":
        return config | _gemma3(keys, config)
    config["rope_parameters"] = _rope(keys, config, shapes, numbers_of)
    config["hidden_act"] = "silu"
    if architecture == "llama":
        config |= _llama(keys, shapes)
    elif architecture == "qwen3moe":
        config |= _qwen3_moe(keys)
    elif architecture == "phi3":
        config["sliding_window"] = keys.window()
        config["original_max_position_embeddings"] = config["rope_parameters"].get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        )
    return config


class _Keys:
    """The metadata of one architecture: keys are written without its prefix."""

    def __init__(self, file_name: str, metadata: Mapping[str, Any], architecture: str) -> None:
        self.file_name = file_name
        self.metadata = metadata
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """Without a default the key is required. A list is taken when all its values are equal."""
        value = self.get(key, default)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise self.refusal(key, "differs from layer to layer, which is not supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 31:
            raise self.refusal(key, f"must be an integer from {low}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, as the shortest decimal of its float32, so that 1e-5 is 1e-5 again."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3e38:
            raise self.refusal(key, "must be a finite number above 0")
        return float(str(np.float32(value)))

    def window(self) -> int | None:
        """Positions a token attends to, itself included; 0 or absent is no window."""
        return self.integer("attention.sliding_window", 0, low=0) or None

    def get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise InvalidWeights(f"{self.file_name}: metadata key {self.architecture}.{key} is absent.")
        return value

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def refusal(self, key: str, why: str) -> InvalidWeights:
        shown = repr(self.metadata.get(f"{self.architecture}.{key}"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return InvalidWeights(f"{self.file_name}: metadata key {self.architecture}.{key}={shown} {why}.")


def _common(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    vocab_size, columns = shapes["token_embd.weight"]
    hidden_size = keys.integer("embedding_length")
    if columns != hidden_size:
        raise keys.refusal("embedding_length", f"differs from the {columns} columns of token_embd.weight")
    num_layers = keys.integer("block_count")
    if num_layers > len(shapes):
        raise keys.refusal("block_count", f"is more than the {len(shapes)} tensors of the file")
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refusal("attention.head_count_kv", f"does not divide the {num_heads} heads")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refusal("attention.value_length", f"differs from the key length {head_dim}")
    architecture, model_type = _ARCHITECTURES[keys.architecture]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    return config | _token_ids(keys, vocab_size)


def _token_ids(keys: _Keys, vocab_size: int) -> dict[str, Any]:
    """Every id that ends a text: end of sequence, of turn, of message; and the one that begins it."""

    def token_id(name: str) -> int | None:
        value = keys.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (not isinstance(value, int) or not 0 <= value < vocab_size):
            raise InvalidWeights(
                f"{keys.file_name}: tokenizer.ggml.{name}_token_id={value!r} is not in the vocabulary of {vocab_size}."
            )
        return value

    ends = [token_id("eos"), token_id("eot"), token_id("eom")]
    if ends[1] is None:
        tokens, kinds = (keys.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        if isinstance(tokens, list) and isinstance(kinds, list):
            named = enumerate(zip(tokens, kinds, strict=False))
            ends += [token_id for token_id, (token, kind) in named if kind == CONTROL and token in END_OF_TURN]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {"eos_token_id": eos or None, "bos_token_id": token_id("bos")}


def _rope(
    keys: _Keys,
    config: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    numbers_of: Callable[[str], list[float]],
) -> dict[str, Any]:
    head_dim = config["head_dim"]
    rotary = keys.integer("rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2:
        raise keys.refusal("rope.dimension_count", f"is not an even number up to the head size {head_dim}")
    if keys.architecture == "llama" and rotary != head_dim:
        raise keys.refusal("rope.dimension_count", f"differs from the head size {head_dim}, which is not supported")
    rope = {"rope_theta": keys.number("rope.freq_base", DEFAULT_ROPE_THETA), **_scaling(keys, config)}
    if rotary < head_dim:
        rope["partial_rotary_factor"] = rotary / head_dim

    def factors(name: str) -> list[float]:
        if shapes[name] != (rotary // 2,):
            raise InvalidWeights(
                f"{keys.file_name}: tensor {name!r} has shape {list(shapes[name])}; {[rotary // 2]} is needed."
            )
        return numbers_of(name)

    if "rope_freqs.weight" in shapes:
        rope["frequency_factors"] = factors("rope_freqs.weight")
    if "rope_factors_long.weight" in shapes and "rope_factors_short.weight" in shapes:
        original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        rope |= {
            "rope_type": "longrope",
            "short_factor": factors("rope_factors_short.weight"),
            "long_factor": factors("rope_factors_long.weight"),
            "factor": config["max_position_embeddings"] / original,
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    elif rope["rope_type"] == "longrope":
        raise keys.refusal("rope.scaling.type", "needs the tensors rope_factors_long and rope_factors_short")
    return rope


def _scaling(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A factor without a type is linear, and a factor of 0 is none (llama.cpp's rules)."""
    kind = keys.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.number(key, 1.0) if keys.get(key, 1.0) != 0 else 1.0
    if kind == "longrope":
        return {"rope_type": "longrope"}
    if kind not in ("none", "linear", "yarn"):
        raise keys.refusal("rope.scaling.type", "is not one of none, linear, yarn, longrope")
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF's llama is also Mistral (with a window) and Mixtral (with experts)."""
    config: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    window = keys.window()
    experts = keys.integer("expert_count", 0, low=0)
    if window:
        config |= {"sliding_window": window, "architectures": [_MISTRAL[0]], "model_type": _MISTRAL[1]}
    if experts:
        config |= {"architectures": [_MIXTRAL[0]], "model_type": _MIXTRAL[1], "num_local_experts": experts}
        config["num_experts_per_tok"] = _experts_per_token(keys, experts)
    return config


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    experts = keys.integer("expert_count")
    return {
        "num_experts": experts,
        "num_experts_per_tok": _experts_per_token(keys, experts),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _experts_per_token(keys: _Keys, experts: int) -> int:
    used = keys.integer("expert_used_count")
    if used > experts:
        raise keys.refusal("expert_used_count", f"is more than the {experts} experts")
    return used


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have their own rotary base and no scaling."""
    num_layers, window = config["num_hidden_layers"], keys.window()
    kinds = ["sliding_attention", "full_attention"]
    pattern = keys.get("attention.sliding_window_pattern", GEMMA3_SLIDING_PATTERN)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise keys.refusal("attention.sliding_window_pattern", f"has not one value for each of {num_layers} layers")
        full = [not sliding for sliding in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", GEMMA3_SLIDING_PATTERN)
        full = [layer % period == period - 1 for layer in range(num_layers)]
    scaled_by = config["head_dim"]
    if num_layers == GEMMA3_27B_LAYERS:
        scaled_by = config["hidden_size"] // config["num_attention_heads"]
    softcap = "final_logit_softcapping"
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": window,
        "layer_types": [kinds[is_full or window is None] for is_full in full],
        "final_logit_softcapping": keys.number(softcap) if keys.has(softcap) else None,
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": {
                "rope_theta": keys.number("rope.freq_base", DEFAULT_ROPE_THETA),
                **_scaling(keys, config),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", DEFAULT_ROPE_THETA),
            },
        },
    }
