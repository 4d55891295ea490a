"""One arithmetic of memory: what weights and KV cache take, and what fits."""

from dataclasses import dataclass

from octavo.errors import InvalidConfig
from octavo.model_spec import ModelSpec

GIB = 1024**3

# What a process on a GPU takes beside weights and cache, as measured on an H200.
DRIVER_BYTES = 600 << 20
LIBRARY_BYTES = 50 << 20
SPARE_BYTES = 256 << 20
GRAPH_BYTES_OF_A_SLOT = 1_300_000  # captured graphs grow with the sizes of steps, and those with the slots
CPU_PROCESS_BYTES = 320 << 20  # Python, torch and the tokenizer before a model is loaded


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int) -> int:
    """K and V of one token over all layers: 2 * layers * kv heads * head_dim * bytes of an element."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes


def num_parameters(spec: ModelSpec) -> int:
    """Weights of the linear layers and embeddings; norms and biases are left out, a thousandth of them."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    attention = 2 * hidden * (heads + spec.num_kv_heads * spec.head_dim)
    moe = spec.moe
    sparse = len(moe.layers) if moe else 0
    experts = sparse * moe.num_experts * hidden * (3 * moe.intermediate_size + 1) if moe else 0
    dense = (spec.num_layers - sparse) * 3 * hidden * spec.intermediate_size
    tables = (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * hidden
    return spec.num_layers * attention + dense + experts + tables


def gpu_lines(
    spec: ModelSpec, *, weight_bytes: int, element_bytes: int, max_num_seqs: int, max_num_batched_tokens: int
) -> dict[str, int]:
    """Bytes by what they are for, of everything on a GPU but the KV cache.

    Slots: counts of generated tokens and edited logits, each [max_num_seqs, vocabulary] of 4 bytes. Activations of the
    largest step: gate and up and their product, the hidden states before and after a norm, and what attention reads
    and writes.
    """
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    intermediate = spec.intermediate_size
    if spec.moe:
        intermediate = max(intermediate, spec.moe.experts_per_token * spec.moe.intermediate_size)
    activations = max_num_batched_tokens * element_bytes * (3 * intermediate + 4 * spec.hidden_size + heads)
    return {
        "driver": DRIVER_BYTES,
        "weights": weight_bytes,
        "slots and work space": 8 * max_num_seqs * spec.vocab_size + (150 << 20),
        "libraries": LIBRARY_BYTES,
        "captured graphs": GRAPH_BYTES_OF_A_SLOT * max_num_seqs + activations // 4,
        "activations of the largest step": activations,
        "kept free": SPARE_BYTES,
    }


def cpu_lines(weight_bytes: int, cache_bytes: int) -> dict[str, int]:
    """Bytes by what they are for, of an engine on a CPU."""
    return {"process": CPU_PROCESS_BYTES, "weights": weight_bytes, "KV cache": cache_bytes}


@dataclass(frozen=True, slots=True)
class CacheSize:
    """`num_blocks` counts block 0, which belongs to nobody; `max_model_len` is what one sequence may reach."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def concurrency(self) -> float:
        """Sequences of the longest length that fit together."""
        return self.num_tokens / self.max_model_len


def size_cache(
    spec: ModelSpec,
    *,
    element_bytes: int,
    block_size: int,
    wanted_len: int | None,
    available_bytes: int,
    num_blocks: int | None = None,
) -> CacheSize:
    """How many blocks fit, and how long a sequence may become.

    `wanted_len` None takes the model's own length, lowered to what fits. `num_blocks` overrides
    `available_bytes` and counts usable blocks.

    Raises:
        InvalidConfig: one sequence of `wanted_len` tokens does not fit, or it is longer than the model's.
    """
    per_token = kv_bytes_per_token(spec, element_bytes)
    longest = spec.max_model_len
    if wanted_len is not None and wanted_len > longest:
        raise InvalidConfig(
            f"max_model_len={wanted_len} is longer than the {longest} tokens this model was made for.",
            f"Give max_model_len={longest} or less.",
        )
    usable = num_blocks if num_blocks is not None else available_bytes // (per_token * block_size) - 1
    fits = max(0, usable) * block_size
    length = min(longest, fits) if wanted_len is None else wanted_len
    if fits < length or fits == 0:
        needed = -(-max(length, 1) // block_size) + 1
        have = (usable + 1) * block_size * per_token if num_blocks is not None else available_bytes
        raise InvalidConfig(
            f"One sequence of {length or longest} tokens needs {_size(needed * block_size * per_token)} of KV cache, "
            f"and {_size(max(0, have))} are available, enough for {fits} tokens.",
            f"Lower max_model_len to {fits} or raise kv_cache_memory_bytes."
            if fits
            else "Raise kv_cache_memory_bytes or num_gpu_blocks_override.",
        )
    return CacheSize(usable + 1, block_size, length, per_token)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 100 else f"{num_bytes:,} bytes"
