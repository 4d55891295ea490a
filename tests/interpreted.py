"""The CUDA engine without a GPU: its runner on CPU tensors, its kernels in Triton's interpreter, nothing captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from octavo.config import EngineConfig, parse_length
from octavo.core.memory import CacheSize, size_cache
from octavo.engine import start as engine_start
from octavo.formats.gguf import GGUFFile
from octavo.hub import ModelFiles
from octavo.model_spec import ModelSpec
from octavo.quant.choice import Choice
from octavo.quant.dense import Dense
from octavo.worker.cuda.runner import Runner
from octavo.worker.limits import Limits
from octavo.worker.load import load_model

CACHE_BYTES = 1 << 20


@contextmanager
def on_interpreter(fused_rows: int) -> Iterator[None]:
    """Engines started inside run float32 this way; `fused_rows`: batches up to this take the fused products."""

    def start(
        config: EngineConfig,
        files: ModelFiles,
        spec: ModelSpec,
        gguf: GGUFFile | None,
        seconds: dict[str, float],
        device: torch.device,
        limits: Limits,
    ) -> tuple[Runner, CacheSize]:
        fp8 = config.cache.kv_cache_dtype == "fp8"
        size = size_cache(
            spec,
            element_bytes=1 if fp8 else 4,
            block_size=limits.block_size,
            wanted_len=parse_length(config.model.max_model_len),
            available_bytes=CACHE_BYTES,
            num_blocks=config.cache.num_gpu_blocks_override,
        )
        spec = spec.with_max_model_len(size.max_model_len)
        with mock.patch.object(Choice, "method", return_value=Dense()):
            model = load_model(config, files, spec, gguf, torch.float32, device)
        runner = Runner(
            model,
            torch.float32,
            device,
            block_size=size.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_scheduler_steps=config.scheduler.num_scheduler_steps,
            logprobs_mode=config.model.logprobs_mode,
            capability=(8, 0),
            captured=False,
            fused_rows=fused_rows,
            deterministic=config.device.deterministic,
            cache_dtype=torch.float8_e4m3fn if fp8 else None,
        )
        runner.allocate(size.num_blocks)
        return runner, size

    with mock.patch.object(engine_start, "start_runner", start):
        yield
