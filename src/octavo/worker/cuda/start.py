"""Start on a GPU: weights, kernels, the memory of the largest step, a cache of what is left, captured graphs."""

import logging
from functools import partial

import torch

from octavo.attention.triton import TritonAttention
from octavo.config import EngineConfig, parse_bytes, parse_length
from octavo.core.gpus import OLDEST_CAPABILITY
from octavo.core.memory import (
    DRIVER_BYTES,
    GIB,
    SPARE_BYTES,
    CacheSize,
    gpu_lines,
    num_parameters,
    size_cache,
)
from octavo.errors import InvalidConfig
from octavo.findings.gpu import too_old
from octavo.formats.gguf import GGUFFile
from octavo.hub import ModelFiles
from octavo.model_spec import ModelSpec
from octavo.worker.cuda import warm
from octavo.worker.cuda.runner import Runner
from octavo.worker.ledger import Ledger
from octavo.worker.limits import Limits
from octavo.worker.load import load_model, phase

logger = logging.getLogger("octavo")

FP8 = (8, 9)  # that converts to and from 8-bit floating point
GRAPH_BYTES = 5 << 20  # of a captured graph, beside its activations: measured afterwards and printed


def start_runner(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    gguf: GGUFFile | None,
    seconds: dict[str, float],
    device: torch.device,
    limits: Limits,
) -> tuple[Runner, CacheSize]:
    """Load, compile, size the cache by what is really free, capture.

    Raises:
        InvalidConfig: the GPU is too old, or something does not fit; the message has the numbers and the option.
        InvalidWeights: a damaged or incomplete checkpoint.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.set_device(device.index or 0)
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        raise too_old(capability, OLDEST_CAPABILITY).as_error()
    if why := TritonAttention.refuses(spec):
        raise InvalidConfig(f"This model does not run on a GPU: {why}.", "Use device=cpu.")
    memory = Memory(config.cache.gpu_memory_utilization)
    dtype = _choose_dtype(config.model.dtype, None if gguf else spec.dtype)
    cache_dtype = _choose_cache_dtype(config.cache.kv_cache_dtype, dtype, capability)
    predicted = num_parameters(spec) * dtype.itemsize
    # What cannot fit is refused before it is loaded.
    size = _size(config, spec, cache_dtype, limits.block_size, memory.left() - predicted)
    spec = spec.with_max_model_len(size.max_model_len)
    with phase("load", seconds):
        model = load_model(config, files, spec, gguf, dtype, device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the checkpoint's tensors went through
    lines = gpu_lines(
        spec,
        weight_bytes=predicted,
        element_bytes=dtype.itemsize,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    given = config.cache.kv_cache_memory_bytes or config.cache.num_gpu_blocks_override
    lines["KV cache"] = size.num_bytes if given else max(0, memory.limit - sum(lines.values()))
    ledger = memory.ledger = Ledger("GPU", lines)
    ledger.note("driver", DRIVER_BYTES)  # torch does not count it
    memory.note("weights")
    warm.unwatch()
    runner = Runner(
        model,
        dtype,
        device,
        block_size=size.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_scheduler_steps=config.scheduler.num_scheduler_steps,
        logprobs_mode=config.model.logprobs_mode,
        capability=capability,
        captured=not config.device.enforce_eager,
        deterministic=config.device.deterministic,
        cache_dtype=cache_dtype,
    )
    memory.note("slots and work space")
    with torch.inference_mode():
        keys = list(runner.graph_keys())
        with phase("compile", seconds):
            steps = [runner.largest, *(launches for _, launches in keys)]
            variants = warm.compile_all([runner.extras, *(partial(runner.network.briefly, step) for step in steps)])
        with phase("warm-up", seconds):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            runner.extras()
            runner.largest()
            torch.cuda.synchronize()
            activations = torch.cuda.max_memory_allocated() - before
            torch.cuda.empty_cache()
        memory.note("libraries")
        graphs = GRAPH_BYTES * len(keys) + activations // 4 if runner.captured else 0
        with phase("cache", seconds):
            left = memory.left() - activations - graphs - SPARE_BYTES
            size = _size(config, spec, cache_dtype, limits.block_size, left)
            runner.allocate(size.num_blocks)
            torch.cuda.synchronize()
        memory.note("KV cache")
        with phase("capture", seconds):
            for key, launches in keys:
                prepare = partial(runner.network.briefly, launches)
                if runner.captured:
                    runner.graphs.capture(key, launches, prepare)
                else:
                    prepare()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        memory.note("captured graphs")
        runner.largest()  # its activations stay with torch's allocator: later steps allocate nothing
        torch.cuda.synchronize()
        memory.note("activations of the largest step")
    memory.report()
    ledger.write(config.cache.memory_report, {"model": str(config.model.model), "gpu": torch.cuda.get_device_name()})
    logger.info(
        "Compiled %d kernels in %.1f s; captured %d graphs in %.1f s",
        variants,
        seconds["compile"],
        len(runner.graphs.graphs),
        seconds["capture"],
    )
    warm.watch()
    return runner, size


class Memory:
    """What this process takes of the GPU, step by step, and what its share leaves."""

    ledger: Ledger

    def __init__(self, share: float) -> None:
        torch.cuda.empty_cache()
        self.free, self.total = torch.cuda.mem_get_info()
        self.limit = int(share * self.total)
        self.used = DRIVER_BYTES  # the share is each engine's own, also where a process has several

    def left(self) -> int:
        """Bytes that this process may still take."""
        free, _ = torch.cuda.mem_get_info()
        return min(self.limit - self.used, free)

    def note(self, what: str) -> None:
        """Put down what was taken since the last time."""
        free, _ = torch.cuda.mem_get_info()
        self.ledger.note(what, self.free - free)
        self.used += self.free - free
        self.free = free

    def report(self) -> None:
        self.ledger.note("kept free", self.limit - self.used)
        self.ledger.report()
        logger.info(
            "GPU memory: %.2f GiB taken of %.2f allowed, %.2f in all",
            self.used / GIB,
            self.limit / GIB,
            self.total / GIB,
        )


def _choose_dtype(wanted: str, checkpoint: str | None) -> torch.dtype:
    """As asked, else the checkpoint's; bfloat16 for GGUF."""
    name = wanted if wanted != "auto" else checkpoint or "bfloat16"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidConfig(f"dtype={name!r} is not allowed: it must be bfloat16, float16 or float32.")
    return dtype


def _choose_cache_dtype(wanted: str, dtype: torch.dtype, capability: tuple[int, int]) -> torch.dtype:
    if wanted == "auto":
        return dtype
    if capability < FP8:
        raise InvalidConfig(
            f"kv_cache_dtype=fp8 needs a GPU of compute capability 8.9 or newer; this one has "
            f"{capability[0]}.{capability[1]}.",
            "Leave kv_cache_dtype at auto.",
        )
    return torch.float8_e4m3fn


def _size(
    config: EngineConfig, spec: ModelSpec, cache_dtype: torch.dtype, block_size: int, available: int
) -> CacheSize:
    given = parse_bytes("kv_cache_memory_bytes", config.cache.kv_cache_memory_bytes)
    try:
        return size_cache(
            spec,
            element_bytes=cache_dtype.itemsize,
            block_size=block_size,
            wanted_len=parse_length(config.model.max_model_len),
            available_bytes=max(0, available if given is None else given),
            num_blocks=config.cache.num_gpu_blocks_override,
        )
    except InvalidConfig as error:
        if given is not None or config.cache.num_gpu_blocks_override is not None:
            raise
        share = config.cache.gpu_memory_utilization
        raise InvalidConfig(
            f"{error} With gpu_memory_utilization={share} the weights and work space leave "
            f"{max(0, available) / GIB:.2f} GiB for the KV cache.",
            "Raise gpu_memory_utilization, or lower max_model_len, max_num_seqs or max_num_batched_tokens.",
        ) from None
