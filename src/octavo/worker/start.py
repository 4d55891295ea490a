"""From files to a runner that is ready, on the device that the configuration names; each phase is timed and logged."""

import importlib
import logging
from pathlib import Path

import torch

from octavo.config import EngineConfig, parse_bytes, parse_length
from octavo.core.memory import GIB, CacheSize, cpu_lines, num_parameters, size_cache
from octavo.errors import InvalidConfig
from octavo.findings import gpu
from octavo.findings.explain import explain
from octavo.findings.finding import Finding
from octavo.formats.gguf import GGUFFile
from octavo.hub import ModelFiles
from octavo.model_spec import ModelSpec
from octavo.worker import machine
from octavo.worker.base import Runner
from octavo.worker.ledger import Ledger
from octavo.worker.limits import Limits
from octavo.worker.load import load_model, phase
from octavo.worker.native import cpu_attention
from octavo.worker.runner import CPURunner
from octavo.worker.threads import choose_threads, place

logger = logging.getLogger("octavo")

NVIDIA_DEVICE = Path("/dev/nvidiactl")  # there where a driver is


def choose_device(config: EngineConfig) -> torch.device:
    """What computes.

    Raises:
        InvalidConfig: a GPU is asked for, and torch finds none.
    """
    wanted, available = config.device.device, torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise _no_gpu().as_error()
    if wanted == "auto" and not available and NVIDIA_DEVICE.exists():
        logger.warning("The GPU of this machine is not used; the CPU computes. %s", _no_gpu().line)
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _no_gpu() -> Finding:
    """Why torch finds none."""
    if torch.version.cuda is None:
        is_there = NVIDIA_DEVICE.exists()
        return gpu.torch_for_cpus(torch.__version__) if is_there else gpu.not_seen(gpu.BUILT_FOR_CPUS)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the driver says
        return explain(error) or gpu.not_seen(str(error))
    return gpu.not_seen("")


def start_runner(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    gguf: GGUFFile | None,
    seconds: dict[str, float],
    device: torch.device,
    limits: Limits,
) -> tuple[Runner, CacheSize]:
    """Load the model and size its cache.

    Raises:
        InvalidConfig: what was asked for does not fit; the message has the numbers.
        InvalidWeights: a damaged or incomplete checkpoint.
    """
    if device.type == "cuda":
        # Only here, and not at the top: it needs Triton, which a CPU installation lacks.
        cuda = importlib.import_module("octavo.worker.cuda.start")
        found: tuple[Runner, CacheSize] = cuda.start_runner(config, files, spec, gguf, seconds, device, limits)
    else:
        found = _start_cpu(config, files, spec, gguf, seconds, limits)
    size = found[1]
    logger.info(
        "KV cache size: %s tokens (%.2f GiB, %s blocks of %d), maximum concurrency for %s tokens per request: %.2fx",
        f"{size.num_tokens:,}",
        size.num_bytes / GIB,
        f"{size.num_blocks - 1:,}",
        size.block_size,
        f"{size.max_model_len:,}",
        size.concurrency,
    )
    return found


def _start_cpu(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    gguf: GGUFFile | None,
    seconds: dict[str, float],
    limits: Limits,
) -> tuple[Runner, CacheSize]:
    if config.device.deterministic:
        raise InvalidConfig(
            "deterministic=True needs a GPU: on a CPU the order of additions in a matrix product depends on its rows.",
            "With dtype=float32 a CPU gives the same greedy tokens whatever else runs.",
        )
    if config.cache.kv_cache_dtype != "auto":
        raise InvalidConfig(
            f"kv_cache_dtype={config.cache.kv_cache_dtype} needs a GPU: on a CPU K and V have the model's type.",
            "Leave kv_cache_dtype at auto.",
        )
    with phase("compile", seconds):  # the CPU kernels, where they are not there yet
        place(choose_threads(config.device.num_threads, config.device.cpu_bind))
    dtype = machine.choose_dtype(config.model.dtype, None if gguf else spec.dtype)
    # Before the weights: what cannot fit is refused at once.
    size = _cpu_cache_size(config, spec, dtype, limits.block_size)
    spec = spec.with_max_model_len(size.max_model_len)
    ledger = Ledger("CPU", cpu_lines(num_parameters(spec) * dtype.itemsize, size.num_bytes))
    if config.model.quantization in ("gguf", "int8"):
        del ledger.predicted["weights"]  # which of them are kept in blocks shows when they are loaded
    before = machine.resident_memory()
    ledger.note("process", before)
    with phase("load", seconds):
        model = load_model(config, files, spec, gguf, dtype, torch.device("cpu"))
    ledger.note("weights", machine.resident_memory() - before)
    gib = ledger.measured["weights"] / GIB
    logger.info("Model loading took %.2f GiB memory and %.2f seconds", gib, seconds["load"])
    with phase("cache", seconds):
        runner = CPURunner(
            model,
            cpu_attention(model.spec, size.block_size),
            size,
            dtype,
            max_num_seqs=limits.max_num_seqs,
            logprobs_mode=config.model.logprobs_mode,
        )
    ledger.note("KV cache", sum(side.nbytes for cache in runner.caches for side in cache))
    ledger.report()
    ledger.write(config.cache.memory_report, {"model": str(config.model.model)})
    return runner, size


def _cpu_cache_size(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, block_size: int) -> CacheSize:
    given = parse_bytes("kv_cache_memory_bytes", config.cache.kv_cache_memory_bytes)
    available = machine.cpu_cache_bytes() if given is None else given
    if config.cache.num_gpu_blocks_override is None:
        why = "kv_cache_memory_bytes" if given else "the lesser of 4 GiB and 40 % of the memory available"
        logger.info("Available KV cache memory: %.2f GiB (%s)", available / GIB, why)
    size = size_cache(
        spec,
        element_bytes=dtype.itemsize,
        block_size=block_size,
        wanted_len=parse_length(config.model.max_model_len),
        available_bytes=available,
        num_blocks=config.cache.num_gpu_blocks_override,
    )
    free = machine.available_memory()
    if size.num_bytes > free:
        raise InvalidConfig(
            f"A KV cache of {size.num_bytes / GIB:.2f} GiB was asked for, and {free / GIB:.2f} GiB are available.",
            "Lower kv_cache_memory_bytes or num_gpu_blocks_override.",
        )
    return size
