"""From files to a runner that is ready: threads, weights, KV cache, backend; each phase is timed and logged."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.attention.torch_ref import TorchAttention
from octavo.config import EngineConfig, parse_bytes, parse_length
from octavo.core.memory import GIB, CacheSize, size_cache
from octavo.errors import InvalidConfig
from octavo.formats.gguf import GGUFFile
from octavo.hub import ModelFiles
from octavo.layers.decoder import CausalLM
from octavo.model_spec import ModelSpec
from octavo.weights.dummy import dummy_tensors
from octavo.weights.gguf import gguf_tensors
from octavo.weights.safetensors import safetensors_tensors
from octavo.worker import machine
from octavo.worker.build import build_model
from octavo.worker.runner import Runner

logger = logging.getLogger("octavo")


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a phase of the start."""
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def start_runner(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, gguf: GGUFFile | None, seconds: dict[str, float]
) -> tuple[Runner, CacheSize]:
    """Load the model and size its cache.

    Raises:
        InvalidConfig: what was asked for does not fit; the message has the numbers.
        InvalidWeights: a damaged or incomplete checkpoint.
    """
    torch.set_num_threads(config.device.num_threads or machine.physical_cores())
    dtype = machine.choose_dtype(config.model.dtype, None if gguf else spec.dtype)
    size = _cache_size(config, spec, dtype)  # before the weights: what cannot fit is refused at once
    spec = spec.with_max_model_len(size.max_model_len)
    before = machine.resident_memory()
    with phase("load", seconds):
        model = _load(config, files, spec, gguf, dtype)
    gib = (machine.resident_memory() - before) / GIB
    logger.info("Model loading took %.2f GiB memory and %.2f seconds", gib, seconds["load"])
    with phase("cache", seconds):
        runner = Runner(
            model,
            TorchAttention(model.spec, size.block_size),
            size,
            dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            logprobs_mode=config.model.logprobs_mode,
        )
    logger.info(
        "KV cache size: %s tokens (%.2f GiB, %s blocks of %d), maximum concurrency for %s tokens per request: %.2fx",
        f"{size.num_tokens:,}",
        size.num_bytes / GIB,
        f"{size.num_blocks - 1:,}",
        size.block_size,
        f"{size.max_model_len:,}",
        size.concurrency,
    )
    return runner, size


def _cache_size(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> CacheSize:
    given = parse_bytes("kv_cache_memory_bytes", config.cache.kv_cache_memory_bytes)
    return size_cache(
        spec,
        element_bytes=dtype.itemsize,
        block_size=config.cache.block_size,
        wanted_len=parse_length(config.model.max_model_len),
        available_bytes=machine.cpu_cache_bytes() if given is None else given,
        num_blocks=config.cache.num_gpu_blocks_override,
    )


def _load(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, gguf: GGUFFile | None, dtype: torch.dtype
) -> CausalLM:
    wanted, device = config.model.load_format, torch.device("cpu")
    if wanted == "dummy":
        return build_model(spec, dtype, device, dummy_tensors(spec, dtype, config.model.seed))
    if wanted != "auto" and (wanted == "gguf") != (gguf is not None):
        found = files.gguf.name if files.gguf else files.folder.name
        raise InvalidConfig(f"load_format={wanted} does not fit {found}.", "Leave load_format at auto.")
    tensors = gguf_tensors(gguf, dtype) if gguf is not None else safetensors_tensors(files.folder)
    return build_model(spec, dtype, device, tensors)
