"""Sizes of a step and of a KV block: as configured, else what suits the device."""

from dataclasses import dataclass

import torch

from octavo.config import EngineConfig
from octavo.model_spec import ModelSpec

LARGE_GPU = 70 << 30  # bytes of a GPU that runs a thousand sequences at once, as other engines do on it
BULK_HEAD_DIMS = (64, 128, 256)  # whose K and V come as bulk copies of half a block or more


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler and the runner must agree on."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int  # of the engine loop


def choose_limits(config: EngineConfig, device: torch.device, spec: ModelSpec) -> Limits:
    """What the configuration says, and where it does not: small on a CPU, by memory and head size on a GPU."""
    block_size, max_num_seqs, max_num_batched_tokens, depth = 16, 256, 4096, 0
    if device.type == "cuda":
        max_num_batched_tokens, depth = 16384, 1
        block_size = 64 if spec.head_dim in BULK_HEAD_DIMS else 16
        _, memory = torch.cuda.mem_get_info(device)
        max_num_seqs = 1024 if memory >= LARGE_GPU else 256
    return Limits(
        config.cache.block_size or block_size,
        config.scheduler.max_num_seqs or max_num_seqs,
        config.scheduler.max_num_batched_tokens or max_num_batched_tokens,
        depth if config.scheduler.depth is None else config.scheduler.depth,
    )
