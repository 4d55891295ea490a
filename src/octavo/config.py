"""Engine options: frozen dataclasses from which `LLM(...)` keywords, flags and the docs table are read off."""

import ast
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from octavo.errors import InvalidConfig, shown
from octavo.known import Elsewhere, drop_known

GROUPS = ("model", "cache", "scheduler", "device")
TITLES = {"model": "Model", "cache": "KV cache", "scheduler": "Scheduler", "device": "Device"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What to run and how to read it."""

    model: str | None = None
    """Folder, GGUF file, pulled model or Hub id. The pulled demo model when none is given."""
    tokenizer: str | None = None
    """Folder or Hub id of the tokenizer, where it is not the model's own."""
    skip_tokenizer_init: bool = False
    """Run without a tokenizer: token ids in, token ids out."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    download_dir: str | None = None
    """Where Hub downloads go, instead of the Hub's own cache."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """Kind of weight file; dummy makes random weights, for speed runs."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations. auto: the checkpoint's, but float32 on a CPU without bfloat16 units."""
    quantization: Literal["auto", "none", "gguf", "int8"] = "auto"
    """Weights on a CPU. gguf: as the GGUF file has them; int8: rounded to 8 bits; auto and none: widened to dtype."""
    max_model_len: int | str | None = None
    """Longest prompt and output together, in tokens: 4096, 4k, or auto for the most that fits."""
    seed: int = 0
    """Seeds of requests that give none are drawn from this one."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """auto: default sampling comes from the model's generation_config.json; vllm: from SamplingParams alone."""
    max_logprobs: int = 20
    """Most logprobs a request may ask for; -1 lifts the limit."""
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    """Logprobs of the model's own distribution (raw), or after temperature, penalties and filters (processed)."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools, where its chat template does not tell (docs/tools.md); none: not at all."""
    reasoning_parser: str | None = None
    """How the model marks thoughts, where its chat template does not tell (docs/reasoning.md); none: not at all."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = None
    """Tokens in one KV block; 16 on a CPU, 64 on a GPU (16 there with unusual head sizes)."""
    gpu_memory_utilization: float = 0.92
    """Share of the GPU's memory that this engine may use in all."""
    kv_cache_memory_bytes: int | str | None = None
    """Bytes for the KV cache (also 512M, 4G); on a CPU the lesser of 4 GiB and 40 % of what is available."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, instead of sizing by memory."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of K and V in the cache. auto: the model's; fp8 (e4m3): half the memory, a little less exact, GPUs only."""
    memory_report: str | None = None
    """File that each start appends a line of JSON to: bytes of each part, predicted and measured, and the residual."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt beginnings between requests."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What runs together in a step."""

    max_num_seqs: int | None = None
    """Most sequences that run at once; 256, and 1024 on a GPU with 70 GiB or more."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; longer prompts are computed in chunks. 4096 on a CPU, 16384 on a GPU."""
    num_scheduler_steps: int = 1
    """Decode steps for one visit of the scheduler while nobody waits."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: first come, first served; priority: smaller priority numbers first."""
    depth: int | None = None
    """Steps that may be launched and not yet committed when the next one is planned. 1 on a GPU, 0 on a CPU."""
    trace: str | None = None
    """File to record what the scheduler and the block pool do in, for octavo trace (docs/trace.md); no prompt text."""


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes. auto: an NVIDIA GPU where there is one."""
    enforce_eager: bool = False
    """Launch every kernel by itself on a GPU instead of replaying captured graphs: slow, for finding faults."""
    deterministic: bool = False
    """Let the same request give the same numbers, bit for bit, whatever else runs; slower, and on GPUs only."""
    num_threads: int | None = None
    """Threads of a CPU engine; the physical cores this process may use when not given."""
    cpu_bind: str = "auto"
    """CPUs of a CPU engine's threads, one each: 0-3,8. auto: a core each where they take all; none: not pinned."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All engine options; resolved once at start-up, never edited.

    Raises:
        InvalidConfig: a value outside its range; the message names option, value and range.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        for option in options():
            _check_choice(option, getattr(getattr(self, option.group), option.name))
        model, cache, scheduler = self.model, self.cache, self.scheduler
        parse_length(model.max_model_len)
        parse_bytes("kv_cache_memory_bytes", cache.kv_cache_memory_bytes)
        _check("max_logprobs", model.max_logprobs, -1)
        _check("seed", model.seed, -(2**63))
        _check("block_size", cache.block_size, 1, 1024)
        _check("max_num_seqs", scheduler.max_num_seqs, 1, 65536)
        _check("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1)
        _check("num_scheduler_steps", scheduler.num_scheduler_steps, 1, 1024)
        _check("depth", scheduler.depth, 0, 64)
        _check("num_gpu_blocks_override", cache.num_gpu_blocks_override, 1)
        _check("num_threads", self.device.num_threads, 1, 4096)
        share = cache.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:  # nor is a NaN
            raise InvalidConfig(
                f"gpu_memory_utilization={shown(share)} is not allowed: it must be above 0 and at most 1."
            )

    @classmethod
    def from_keywords(cls, owner: str, **keywords: Any) -> Self:
        """The configuration of flat keywords, as `LLM(...)` takes them.

        Raises:
            TypeError: an unknown keyword; the message names the nearest known one.
            ValueError: a keyword of another engine, asking for what Octavo does not have.
        """
        by_name = {option.name: option.group for option in options()}
        given = drop_known(owner, set(by_name), ENGINE_ELSEWHERE, keywords)
        for name, names in SAME_AS.items():
            value = given.get(name)
            value = (value if isinstance(value, str) else shown(value)).removeprefix("torch.")  # of a torch.dtype
            given |= {name: names[value]} if value in names else {}
        kinds = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        parts: dict[str, Any] = {
            group: kinds[group](**{name: value for name, value in given.items() if by_name[name] == group})  # type: ignore[operator]
            for group in GROUPS
        }
        return cls(**parts)


class Option(NamedTuple):
    """One engine option as a user sees it."""

    group: str
    name: str
    type: Any
    default: Any
    help: str


@functools.cache
def options() -> tuple[Option, ...]:
    """Every option with its default and the sentence written under it."""
    kinds = (ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig)
    return tuple(option for group, kind in zip(GROUPS, kinds, strict=True) for option in options_of(kind, group))


def options_of(kind: type, group: str) -> Iterator[Option]:
    """The options that are the fields of a dataclass, each with a sentence written under it."""
    helps = _docstrings(kind)
    for f in dataclasses.fields(kind):
        yield Option(group, f.name, f.type, f.default, helps[f.name])


def _docstrings(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    helps: dict[str, str] = {}
    name = ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            helps[name] = str(statement.value.value)
    return helps


def _check(name: str, value: int | None, low: int, high: int = 2**63 - 1) -> None:
    if value is None and any(o.name == name and o.default is None for o in options()):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfig(f"{name}={shown(value)} is not allowed: it must be an integer from {low} to {high}.")


def _check_choice(option: Option, value: object) -> None:
    choices = getattr(option.type, "__args__", ()) if "Literal" in str(option.type) else ()
    if choices and value not in choices:
        raise InvalidConfig(f"{option.name}={shown(value)} is not allowed: it must be one of {', '.join(choices)}.")
    if isinstance(option.default, bool) and not isinstance(value, bool):
        raise InvalidConfig(f"{option.name}={shown(value)} is not allowed: it must be True or False.")
    if option.type == str | None and not isinstance(value, str | None):
        raise InvalidConfig(f"{option.name}={shown(value)} is not allowed: it must be a string.")


SAME_AS = {
    "dtype": {"half": "float16", "float": "float32", **{t: t for t in ("bfloat16", "float16", "float32")}},
    "load_format": {"hf": "auto"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "None": "auto"},
    "quantization": {"None": "auto"},
}

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def parse_length(value: int | str | None) -> int | None:
    """max_model_len in tokens, None for the most that fits: 4096, "4096", "4k" (4000), "4K" (4096), "auto", -1."""
    if value is None or value in ("auto", -1, "-1"):
        return None
    return _parse_number("max_model_len", value, 2, "a number of tokens from 2 (4096, 4k, 4K) or auto")


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """A number of bytes: 1000000, "512M", "4G" (powers of 1024; small letters are powers of 1000)."""
    return None if value is None else _parse_number(name, value, 1, "a number of bytes from 1 (1000000, 512M, 4G)")


def _parse_number(name: str, value: int | str | float, least: int, allowed: str) -> int:
    text = value.strip() if isinstance(value, str) else shown(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)(?:i?[bB])?", text)
    number = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if isinstance(value, bool) or not math.isfinite(number) or number < least or number != int(number):
        raise InvalidConfig(f"{name}={shown(value)} is not allowed: it must be {allowed}.")
    return int(number)


_SERVER = "it is an option of a server"
_PARALLEL = "this engine runs on one device"
_WATCHING = "it is an option of a server's metrics and traces"
ENGINE_ELSEWHERE = {
    "trust_remote_code": Elsewhere("models are part of Octavo; no code of a checkpoint is run", (None, False, True)),
    "tokenizer_mode": Elsewhere("tokenizers are read from tokenizer.json", (None, "auto", "hf")),
    "tokenizer_revision": Elsewhere("give the tokenizer as a local folder", (None,)),
    "code_revision": Elsewhere("no code of a checkpoint is run", (None,)),
    "hf_token": Elsewhere("set HF_TOKEN in the environment", (None,)),
    "hf_overrides": Elsewhere("edit a copy of config.json", (None, {})),
    "hf_config_path": Elsewhere("put config.json beside the weights", (None,)),
    "config_format": Elsewhere("config.json or GGUF metadata is read", (None, "auto", "hf")),
    "kv_cache_dtype_skip_layers": Elsewhere("the KV cache is not quantized", (None, [])),
    "calculate_kv_scales": Elsewhere("the KV cache is not quantized"),
    "kv_transfer_config": Elsewhere("KV blocks stay in this engine", (None,)),
    "kv_events_config": Elsewhere("subscribe to the scheduler's events instead", (None,)),
    "kv_cache_metrics": Elsewhere("subscribe to the scheduler's events instead"),
    "kv_cache_metrics_sample": Elsewhere("subscribe to the scheduler's events instead", (None, 0.01)),
    "kv_offloading_backend": Elsewhere("there is no second tier of KV memory", (None, "native")),
    "prefix_cache_retention_interval": Elsewhere("every full block is kept until it is evicted", (None, 0)),
    "compilation_config": Elsewhere("nothing is compiled here", (None, {}, 0)),
    "max_seq_len_to_capture": Elsewhere("nothing is captured here", (None, 8192)),
    "enable_chunked_prefill": Elsewhere("prompts are always computed in chunks", (None, True)),
    "long_prefill_token_threshold": Elsewhere("chunks are as long as max_num_batched_tokens allows", (None, 0)),
    "long_prefill_token_threshold_adaptive": Elsewhere("chunks are as long as max_num_batched_tokens allows"),
    "scheduler_reserve_full_isl": Elsewhere("blocks for the whole prompt are always reserved", (None, True)),
    "watermark": Elsewhere("admission keeps half a free block for each running sequence", (None, 0, 0.0)),
    "stream_interval": Elsewhere("every step is reported", (None, 1)),
    "max_num_queued_reqs": Elsewhere(_SERVER, (None,)),
    "max_num_queued_tokens": Elsewhere(_SERVER, (None,)),
    "max_num_active_seqs": Elsewhere("use max_num_seqs", (None,)),
    "async_scheduling": Elsewhere("use depth=0 to wait for every step", (None, True)),
    "swap_space": Elsewhere("preempted sequences are computed again", (None, 0, 4)),
    "cpu_offload_gb": Elsewhere("weights stay where they are computed", (None, 0)),
    "kv_offloading_size": Elsewhere("there is no second tier of KV memory", (None, 0)),
    "tensor_parallel_size": Elsewhere(_PARALLEL, (None, 1)),
    "pipeline_parallel_size": Elsewhere(_PARALLEL, (None, 1)),
    "data_parallel_size": Elsewhere(_PARALLEL, (None, 1)),
    "prefill_context_parallel_size": Elsewhere(_PARALLEL, (None, 1)),
    "decode_context_parallel_size": Elsewhere(_PARALLEL, (None, 1)),
    "nnodes": Elsewhere(_PARALLEL, (None, 1)),
    "node_rank": Elsewhere(_PARALLEL, (None, 0)),
    "master_addr": Elsewhere(_PARALLEL, (None, "127.0.0.1")),
    "master_port": Elsewhere(_PARALLEL, (None, 29501)),
    "enable_eplb": Elsewhere(_PARALLEL),
    "all2all_backend": Elsewhere(_PARALLEL, (None, "allgather_reducescatter")),
    "enable_expert_parallel": Elsewhere(_PARALLEL),
    "distributed_executor_backend": Elsewhere(_PARALLEL, (None, "uni", "mp")),
    "disable_custom_all_reduce": Elsewhere(_PARALLEL, (None, False, True)),
    "enable_lora": Elsewhere("there are no adapters yet"),
    "max_loras": Elsewhere("there are no adapters yet", (None, 1)),
    "max_lora_rank": Elsewhere("there are no adapters yet", (None, 16)),
    "max_cpu_loras": Elsewhere("there are no adapters yet", (None,)),
    "lora_modules": Elsewhere("there are no adapters yet", (None, [])),
    "speculative_config": Elsewhere("there is no speculation yet", (None,)),
    "structured_outputs_config": Elsewhere("there is one backend, llguidance", (None, {})),
    "limit_mm_per_prompt": Elsewhere("models are text only", (None, {})),
    "mm_processor_kwargs": Elsewhere("models are text only", (None, {})),
    "allowed_local_media_path": Elsewhere("models are text only", (None, "")),
    "override_generation_config": Elsewhere("give SamplingParams", (None, {})),
    "logits_processors": Elsewhere("add a file to octavo/sampling", (None, [])),
    "prefix_caching_hash_algo": Elsewhere("blocks are hashed with blake2b", (None, "sha256", "builtin", "xxhash")),
    "disable_log_stats": Elsewhere("progress is shown by the progress bar", (None, False, True)),
    "served_model_name": Elsewhere(_SERVER, (None,)),
    "enable_log_requests": Elsewhere(_SERVER),
    "max_log_len": Elsewhere(_SERVER, (None,)),
    "otlp_traces_endpoint": Elsewhere(_WATCHING, (None,)),
    "collect_detailed_traces": Elsewhere(_WATCHING, (None,)),
    "enable_mfu_metrics": Elsewhere(_WATCHING),
    "enable_layerwise_nvtx_tracing": Elsewhere(_WATCHING),
    "custom_histogram_buckets": Elsewhere(_WATCHING, (None, {})),
    "profiler_config": Elsewhere("use torch.profiler around generate", (None,)),
    "jit_monitor_mode": Elsewhere("a compilation while serving is always logged", (None, "warn")),
    "performance_mode": Elsewhere("there is one mode", (None,)),
    "optimization_level": Elsewhere("there is one level", (None, 0, 1, 2, 3)),
    "enable_auto_tool_choice": Elsewhere("calls are looked for whenever a request has tools", (None, False, True)),
    "chat_template": Elsewhere("give it to LLM.chat", (None,)),
    "chat_template_content_format": Elsewhere("it is found by trying the template", (None, "auto")),
    "runner": Elsewhere("models generate text", (None, "auto", "generate")),
    "task": Elsewhere("models generate text", (None, "auto", "generate")),
    "convert": Elsewhere("models generate text", (None, "auto", "none")),
}
