"""What a model needs and how fast it will be on a machine, from arithmetic alone."""

import dataclasses
import math
from dataclasses import dataclass

from octavo.core.cost import Machine, StepTime, parameters, step_time, step_work
from octavo.core.memory import GIB, gpu_lines, kv_bytes_per_token, num_parameters
from octavo.model_spec import ModelSpec

HOST_FACTOR, HOST_SYSTEM_BYTES = 1.5, 16 * GIB
CORES_A_GPU = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """The work to plan for. Lengths in tokens, times in seconds; `concurrency` None finds it."""

    input_len: int
    output_len: int
    concurrency: int | None = None
    ttft: float = math.inf
    tpot: float = math.inf


@dataclass(frozen=True, slots=True)
class Serving:
    """How the model would be served: bytes of an element, limits, GPUs that share each layer."""

    weight_element_bytes: float
    cache_element_bytes: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float = 0.92
    num_gpus: int = 1
    weight_bytes: int | None = None  # as the files' headers say; None: counted from the configuration


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each GPU, and what is left for K and V over all of them."""

    lines: dict[str, int]
    allowed: int
    kv_bytes_per_token: float
    kv_tokens: int
    missing: int  # bytes of a GPU that one sequence of max_model_len lacks, or 0
    host_bytes: int
    cores: int

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class Point:
    """Predictions at one number of requests that run at once."""

    concurrency: int
    ttft: float
    tpot: float
    output_tokens_per_second: float
    requests_per_second: float
    limit: str
    step: StepTime


def memory(spec: ModelSpec, serving: Serving, memory_bytes: int) -> Memory:
    """What each GPU holds. Weights and K and V are divided among GPUs, the rest is on each of them.

    Host memory: weights once and a half while they are loaded (a shard beside the tensors made of it), nothing for
    spilled K and V, which Octavo does not spill, and 16 GiB for the system and Python.
    """
    weights = serving.weight_bytes or int(num_parameters(spec) * serving.weight_element_bytes)
    lines = gpu_lines(
        spec,
        weight_bytes=weights // serving.num_gpus,
        element_bytes=2,
        max_num_seqs=serving.max_num_seqs,
        max_num_batched_tokens=serving.max_num_batched_tokens,
    )
    allowed = int(memory_bytes * serving.utilization)
    per_token = kv_bytes_per_token(spec, 1) * serving.cache_element_bytes
    left = allowed - sum(lines.values())
    one = serving.max_model_len * per_token / serving.num_gpus
    return Memory(
        lines=lines,
        allowed=allowed,
        kv_bytes_per_token=per_token,
        kv_tokens=max(0, int(left * serving.num_gpus / per_token)),
        missing=max(0, int(one - left)),
        host_bytes=int(HOST_FACTOR * weights) + HOST_SYSTEM_BYTES,
        cores=CORES_A_GPU * serving.num_gpus,
    )


def point(spec: ModelSpec, machine: Machine, serving: Serving, wanted: Wanted, concurrency: int, fits: int) -> Point:
    """Steady state with `concurrency` requests, of which `fits` have room in the cache at once.

    A running request's decode steps are mixed with the prompts of those that come: over one request's life of
    output_len steps every other running request's prompt is computed once. Time to first token: the wait for a
    place, half a step, and the prompt itself. Each GPU does its share of a layer's reads and products; what passes
    between GPUs is not counted.
    """
    running = max(1, min(concurrency, fits, serving.max_num_seqs))
    context = wanted.input_len + wanted.output_len // 2
    decode = _step(spec, machine, serving, [(1, context)] * running, running)
    prompt = 0.0
    done = 0
    while done < wanted.input_len:
        length = min(wanted.input_len - done, serving.max_num_batched_tokens)
        done += length
        prompt += _step(spec, machine, serving, [(length, done)], int(done == wanted.input_len)).seconds
    steps = max(1, wanted.output_len - 1)
    # A prompt that shares its step with others' does not read the weights again.
    shared = prompt if running == 1 else max(prompt - _step(spec, machine, serving, [(1, 1)], 0).seconds, 0.0)
    tpot = decode.seconds + (running - 1) * shared / steps
    life = prompt + machine.first_seconds + steps * tpot
    waits = max(0, concurrency - running) / running * life / 2
    ttft = prompt + machine.first_seconds + waits + (decode.seconds / 2 if running > 1 else 0.0)
    rate = running / life
    limit = decode.limit
    if running > 1 and (running - 1) * shared / steps > decode.seconds:
        limit = "compute (prompts)"
    if fits < min(concurrency, serving.max_num_seqs):
        limit = "KV capacity"
    return Point(concurrency, ttft, tpot, rate * wanted.output_len, rate, limit, decode)


def points(spec: ModelSpec, machine: Machine, serving: Serving, wanted: Wanted) -> list[Point]:
    """Predictions for 1, 2, 4, ... requests at once, up to what the slots take; with the wanted number among them."""
    room = memory(spec, serving, machine.memory_bytes)
    if not room.fits:
        return []
    fits = max(1, room.kv_tokens // (wanted.input_len + wanted.output_len))
    numbers = {2**i for i in range(serving.max_num_seqs.bit_length()) if 2**i <= serving.max_num_seqs}
    numbers |= {wanted.concurrency} if wanted.concurrency else set()
    return [point(spec, machine, serving, wanted, number, fits) for number in sorted(numbers)]


def best(found: list[Point], wanted: Wanted) -> Point | None:
    """The wanted concurrency, else the highest that meets the times; None where nothing does."""
    good = [point for point in found if point.ttft <= wanted.ttft and point.tpot <= wanted.tpot]
    if wanted.concurrency:
        good = [point for point in good if point.concurrency == wanted.concurrency]
    return max(good, key=lambda point: point.concurrency, default=None)


def _step(spec: ModelSpec, machine: Machine, serving: Serving, chunks: list[tuple[int, int]], sampled: int) -> StepTime:
    size = serving.weight_element_bytes
    if serving.weight_bytes:
        size = serving.weight_bytes / parameters(spec).total
    work = step_work(
        spec, chunks, sampled=sampled, weight_element_bytes=size, cache_element_bytes=serving.cache_element_bytes
    )
    n = serving.num_gpus
    shared = dataclasses.replace(
        work,
        weight_bytes=work.weight_bytes / n,
        cache_bytes=work.cache_bytes / n,
        logit_bytes=work.logit_bytes / n,
        linear_flops=work.linear_flops / n,
        attention_flops=work.attention_flops / n,
    )
    return step_time(machine, spec, shared)
