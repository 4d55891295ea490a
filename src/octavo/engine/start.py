"""What an engine is made of, from its configuration: files, spec, tokenizer, executor, default sampling."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.config import EngineConfig
from octavo.core.blocks import BlockPool
from octavo.core.memory import CacheSize
from octavo.core.scheduler import Scheduler
from octavo.engine.constraints import Constraints
from octavo.engine.loop import Executor, Loop
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.executor.inline import Inline
from octavo.findings.explain import explained
from octavo.formats.gguf import GGUFFile
from octavo.grammar.grammars import Grammars
from octavo.grammar.guidance import Guidance
from octavo.hub import ModelFiles, find_model
from octavo.model_spec import ModelSpec, architecture_of
from octavo.observe.trace import Recording, TraceFile
from octavo.registry import check_architecture
from octavo.text.chat import main_template
from octavo.text.tokenizer import Tokenizer, eos_token_ids, read_json
from octavo.text.tools.formats import Formats
from octavo.types import SamplingParams
from octavo.worker.limits import Limits, choose_limits
from octavo.worker.start import choose_device, start_runner

logger = logging.getLogger("octavo")


@dataclass(slots=True)
class Parts:
    files: ModelFiles
    tokenizer_files: ModelFiles | None  # None without a tokenizer
    spec: ModelSpec
    tokenizer: Tokenizer | None
    executor: Executor
    pool: BlockPool
    cache_size: CacheSize
    limits: Limits
    eos_token_ids: frozenset[int]
    default_params: SamplingParams
    formats: Formats
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each phase of the start
    trace_file: TraceFile | None = None


FoundTokenizer = Callable[[ModelFiles], None]


def start(
    config: EngineConfig, phases: dict[str, float] | None = None, found_tokenizer: FoundTokenizer | None = None
) -> Parts:
    """Read, load and size everything. The seconds of each phase go into `phases` as it ends.

    `found_tokenizer` is told where the tokenizer lies as soon as that is known, if there is one.

    Raises:
        ModelNotFound, InvalidConfig, InvalidWeights: each says what is wrong and what to do; what PyTorch and the
            system raise is told so too.
    """
    with explained():
        return _start(config, {} if phases is None else phases, found_tokenizer)


def _start(config: EngineConfig, seconds: dict[str, float], found_tokenizer: FoundTokenizer | None) -> Parts:
    begin = time.perf_counter()
    trace_file = TraceFile(config.scheduler.trace) if config.scheduler.trace is not None else None
    files = find_model(
        config.model.model,
        revision=config.model.revision,
        download_dir=config.model.download_dir,
        weights=config.model.load_format != "dummy",
    )
    gguf = GGUFFile(files.gguf) if files.gguf else None
    hf_config = gguf.hf_config() if gguf else read_json(files.folder / "config.json")
    check_architecture(architecture_of(hf_config))
    spec = ModelSpec.from_config(hf_config)
    tokenizer_files = _tokenizer_files(config, files)
    if tokenizer_files and found_tokenizer:
        found_tokenizer(tokenizer_files)
    tokenizer = Tokenizer.from_files(tokenizer_files) if tokenizer_files else None
    formats = Formats.of(
        main_template(tokenizer) if tokenizer else "", config.model.tool_call_parser, config.model.reasoning_parser
    )
    seconds["prepare"] = time.perf_counter() - begin
    device = choose_device(config)
    limits = choose_limits(config, device, spec)
    runner, size = start_runner(config, files, spec, gguf, seconds, device, limits)
    generation = {} if gguf else read_json(files.folder / "generation_config.json")
    parts = Parts(
        spec=spec,
        tokenizer=tokenizer,
        executor=Inline(runner),
        pool=BlockPool(size.num_blocks, size.block_size),
        cache_size=size,
        limits=limits,
        eos_token_ids=eos_token_ids(hf_config, generation, tokenizer),
        default_params=SamplingParams() if config.model.generation_config == "vllm" else default_params(generation),
        formats=formats,
        phases=seconds,
        files=files,
        tokenizer_files=tokenizer_files,
        trace_file=trace_file,
    )
    logger.info("init engine took %.2f seconds", time.perf_counter() - begin)
    return parts


def make_loop(config: EngineConfig, parts: Parts) -> Loop:
    """A scheduler on the parts' pool, and the loop that drives their executor with it."""
    scheduler = Scheduler(
        parts.pool,
        max_num_seqs=parts.limits.max_num_seqs,
        max_num_batched_tokens=parts.limits.max_num_batched_tokens,
        max_model_len=parts.cache_size.max_model_len,
        num_scheduler_steps=config.scheduler.num_scheduler_steps,
        policy=config.scheduler.scheduling_policy,
    )
    loop = Loop(scheduler, parts.executor, parts.limits.depth, make_constraints(parts))
    if parts.trace_file is not None:
        loop.recording = Recording(parts.trace_file, scheduler, loop.depth, config.model.model or "")
    return loop


def make_constraints(parts: Parts) -> Constraints | None:
    """Structured output, where there is a tokenizer: its vocabulary is read at first use."""
    if parts.tokenizer is None:
        return None
    vocab_size = parts.spec.vocab_size
    return Constraints(Grammars(Guidance(parts.tokenizer, vocab_size, sorted(parts.eos_token_ids))), vocab_size)


def _tokenizer_files(config: EngineConfig, files: ModelFiles) -> ModelFiles | None:
    if config.model.skip_tokenizer_init:
        return None
    other = config.model.tokenizer
    return find_model(other, download_dir=config.model.download_dir, weights=False) if other else files


_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_params(generation: dict[str, Any]) -> SamplingParams:
    """Sampling for requests that give none: what the model's generation_config.json says.

    `do_sample: false` means greedy, as in transformers.

    Raises:
        InvalidConfig: a value that SamplingParams refuses.
    """
    found = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        found = {"temperature": 0.0} | {k: v for k, v in found.items() if k == "repetition_penalty"}
    if isinstance(generation.get("max_new_tokens"), int):
        found["max_tokens"] = generation["max_new_tokens"]
    try:
        params = SamplingParams(**found)
    except InvalidRequest as error:
        raise InvalidConfig(
            f"generation_config.json: {error.message}", "Mend the file, or start with generation_config='vllm'."
        ) from None
    if found:
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.info("Default sampling from generation_config.json: %s (generation_config='vllm' ignores it)", shown)
    return params
