"""`octavo plan`: does a model fit, how fast will it be, on which GPU, with which flags; nothing is loaded."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from octavo.config import parse_length
from octavo.core.cost import Machine
from octavo.core.gpus import GPUS, MEASURED, Datasheet, machine
from octavo.core.memory import GIB, num_parameters
from octavo.core.plan import Memory, Point, Serving, Wanted, best, memory, points
from octavo.errors import InvalidConfig
from octavo.formats.gguf import GGUFFile
from octavo.formats.safetensors import read_header
from octavo.hub import find_model
from octavo.model_spec import ModelSpec
from octavo.text.tokenizer import read_json
from octavo.tools.plan_plot import plot as draw

ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.56}
"""int4: half a byte and 4 bits of scale and zero for each group of 64."""
RUNS_ON_GPU = ("bf16",)
CACHE_BYTES = {"auto": 2.0, "fp8": 1.0}
LARGE_GIB = 70  # as in worker/limits: from here a thousand sequences at once
DEFAULT_GPU = "H200"
UTILIZATION = 0.92  # as DeviceConfig and the cache options have it


def plan(
    model: str | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
    tp: Annotated[int, Parameter(name=["--tp", "--tensor-parallel-size"])] = 1,
    max_model_len: str | None = None,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: float = UTILIZATION,
    kv_cache_dtype: str = "auto",
    quantization: str = "bf16",
    input_len: int = 1024,
    output_len: int = 256,
    concurrency: int | None = None,
    ttft_ms: float = 300.0,
    tpot_ms: float = 30.0,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    plot: Path | None = None,
) -> None:
    """What a model needs and how fast it will be, before anything is loaded.

    Reads a configuration and the headers of weight files; needs no GPU and no weights. Figures for the H200 were
    measured with Octavo; those of other GPUs are datasheet arithmetic with the shares reached there.

    Parameters
    ----------
    model
        Folder, config.json, GGUF file, pulled model or Hub id.
    gpu
        A GPU of the built-in table; H200 when neither it nor its figures are given.
    gpu_memory
        GiB of the GPU, for one that is not in the table; with --bandwidth and --flops.
    bandwidth
        GB/s of the GPU's memory by its datasheet.
    flops
        TFLOP/s of dense bfloat16 products by its datasheet.
    tp
        GPUs that share each layer. What passes between them is not counted.
    max_model_len
        Longest sequence, such as 4096 or 32k; the model's own when none is given.
    max_num_seqs
        Most requests that run at once; 1,024 on a GPU of 70 GiB and more, else 256.
    gpu_memory_utilization
        Share of the GPU's memory that the engine may take.
    kv_cache_dtype
        auto (16 bits) or fp8.
    quantization
        Of the weights: bf16, fp8, int8 or int4.
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer.
    concurrency
        Requests at once; without it the highest number that meets the times.
    ttft_ms
        Wanted time to first token in milliseconds.
    tpot_ms
        Wanted time per output token in milliseconds.
    as_json
        Print everything as JSON.
    plot
        Write tokens/s and times over concurrency to this SVG file.
    """
    spec, weight_bytes = read(model)
    _check("quantization", quantization, ELEMENT_BYTES)
    _check("kv_cache_dtype", kv_cache_dtype, CACHE_BYTES)
    for name, value in (("tp", tp), ("input_len", input_len), ("output_len", output_len), ("concurrency", concurrency)):
        if value is not None and value < 1:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be 1 or more.")
    if not 0 < gpu_memory_utilization <= 1:
        raise InvalidConfig(f"gpu_memory_utilization={gpu_memory_utilization} is not allowed: above 0, at most 1.")
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise InvalidConfig(f"tp={tp} does not divide the model's {spec.num_kv_heads} KV heads.")
    device = _machine(gpu, gpu_memory, bandwidth, flops)
    given = parse_length(max_model_len)
    length = given or spec.max_model_len
    if length > spec.max_model_len:
        raise InvalidConfig(f"max_model_len={length} is longer than the model's {spec.max_model_len} tokens.")
    if input_len + output_len > length:
        raise InvalidConfig(
            f"input_len={input_len} and output_len={output_len} are more than the {length} tokens of a sequence."
        )
    wanted = Wanted(input_len, output_len, concurrency, _seconds(ttft_ms), _seconds(tpot_ms))
    serving = Serving(
        weight_element_bytes=ELEMENT_BYTES[quantization],
        cache_element_bytes=CACHE_BYTES[kv_cache_dtype],
        max_model_len=given or input_len + output_len,
        max_num_seqs=_slots(max_num_seqs, device),
        max_num_batched_tokens=16384,
        utilization=gpu_memory_utilization,
        num_gpus=tp,
        weight_bytes=weight_bytes if quantization == "bf16" else None,
    )
    room = memory(spec, serving, device.memory_bytes)
    if given is None and room.fits:  # as a start does it: the model's own length, lowered to what fits
        serving = dataclasses.replace(serving, max_model_len=min(spec.max_model_len, room.kv_tokens))
    found = points(spec, device, serving, wanted)
    choice = best(found, wanted)
    fitting = [_on(name, sheet, spec, serving, wanted, max_num_seqs) for name, sheet in GPUS.items()]
    flags = _flags(model, serving, given, max_num_seqs, kv_cache_dtype, quantization)
    if plot:
        draw(plot, found, f"{model or 'model'} on {device.name}, {input_len} in, {output_len} out")
    if as_json:
        _print_json(spec, device, serving, wanted, room, found, choice, fitting, flags)
        return
    console = Console()
    _print_memory(console, spec, device, serving, room)
    if room.fits:
        _print_points(console, found, choice, wanted)
    else:
        _print_missing(console, spec, device, serving, room)
    _print_gpus(console, fitting)
    if quantization not in RUNS_ON_GPU:
        console.print(f"\nOctavo has no {quantization} weights on GPUs yet: this is arithmetic for when it does.")
    if tp > 1:
        console.print("\nOctavo runs a model on one GPU so far: this is arithmetic, without what passes between GPUs.")
    if choice and quantization in RUNS_ON_GPU and tp == 1:
        console.print(f"\nStart with:  {flags}", highlight=False, soft_wrap=True)


def read(model: str | None) -> tuple[ModelSpec, int | None]:
    """The model's spec, and the bytes of its weights where their files are there."""
    path = Path(model).expanduser() if model else None
    if path and path.suffix == ".json" and path.is_file():
        return ModelSpec.from_config(read_json(path)), None
    if path and (path / "config.json").is_file():
        config, folder, gguf = read_json(path / "config.json"), path, None
    else:
        files = find_model(model, weights=False)
        folder, gguf = files.folder, GGUFFile(files.gguf) if files.gguf else None
        config = gguf.hf_config() if gguf else read_json(folder / "config.json")
    spec = ModelSpec.from_config(config)
    if gguf:  # a GGUF file is widened to 16 bits on a GPU
        return spec, 2 * sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    elements = sum(math.prod(tensor.shape) for header in headers for tensor in header.values())
    return spec, 2 * elements or None


def _machine(gpu: str | None, gib: float | None, bandwidth: float | None, flops: float | None) -> Machine:
    given = [gib, bandwidth, flops]
    if any(value is not None for value in given):
        if gpu is not None:
            raise InvalidConfig("Give either --gpu or --gpu-memory, --bandwidth and --flops.")
        missing = [
            name
            for name, value in zip(("--gpu-memory", "--bandwidth", "--flops"), given, strict=True)
            if value is None or not value > 0
        ]
        if gib is None or bandwidth is None or flops is None or missing:
            raise InvalidConfig(f"A GPU of your own needs {' and '.join(missing)} too, above 0.")
        return machine("this GPU", Datasheet(gib, bandwidth, flops))
    names = {_plain(name): name for name in GPUS}
    name = names.get(_plain(gpu or DEFAULT_GPU))
    if name is None:
        raise InvalidConfig(
            f"--gpu {gpu} is not in the table: {', '.join(GPUS)}.", "Or give --gpu-memory, --bandwidth and --flops."
        )
    return machine(name, GPUS[name])


def _plain(name: str) -> str:
    letters = "".join(c for c in name.upper() if c.isalnum()).removesuffix("GB")
    return letters.replace("NVIDIA", "").replace("GEFORCE", "").replace("RTX", "").replace("SUPER", "S")


def _slots(given: int | None, device: Machine) -> int:
    return given or (1024 if device.memory_bytes >= LARGE_GIB * GIB else 256)


def _check(name: str, value: str, allowed: dict[str, float]) -> None:
    if value not in allowed:
        raise InvalidConfig(f"{name}={value!r} is not allowed: it must be one of {', '.join(allowed)}.")


def _seconds(milliseconds: float) -> float:
    if not milliseconds > 0:
        raise InvalidConfig(f"A time of {milliseconds} ms is not allowed: it must be above 0.")
    return milliseconds / 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class OnGPU:
    """How a GPU of the table would do: the best point that meets the times, or why there is none."""

    name: str
    point: Point | None
    why: str


def _on(name: str, sheet: Datasheet, spec: ModelSpec, serving: Serving, wanted: Wanted, slots: int | None) -> OnGPU:
    device = machine(name, sheet)
    serving = dataclasses.replace(serving, max_num_seqs=_slots(slots, device))
    room = memory(spec, serving, device.memory_bytes)
    if not room.fits:
        return OnGPU(name, None, f"does not fit: {room.missing / GIB:.1f} GiB short")
    found = points(spec, device, serving, wanted)
    choice = best(found, wanted)
    if choice:
        return OnGPU(name, choice, "")
    first = found[0] if wanted.concurrency is None else _at(found, wanted.concurrency)
    return OnGPU(name, None, f"TTFT {first.ttft * 1e3:,.0f} ms, TPOT {first.tpot * 1e3:.1f} ms: {first.limit}")


def _at(found: list[Point], concurrency: int) -> Point:
    return next(one for one in found if one.concurrency == concurrency)


def _flags(
    model: str | None, serving: Serving, length: int | None, slots: int | None, cache: str, quantization: str
) -> str:
    parts = ["octavo serve", *([model] if model else [])]
    parts += [f"--max-model-len {length}"] if length else []
    parts += [f"--max-num-seqs {slots}"] if slots else []
    parts += [f"--gpu-memory-utilization {serving.utilization}"] if serving.utilization != UTILIZATION else []
    parts += [f"--tensor-parallel-size {serving.num_gpus}"] if serving.num_gpus > 1 else []
    parts += [f"--kv-cache-dtype {cache}"] if cache != "auto" else []
    parts += [f"--quantization {quantization}"] if quantization != "bf16" else []
    return " ".join(parts)


def _print_memory(console: Console, spec: ModelSpec, device: Machine, serving: Serving, room: Memory) -> None:
    of = f"{serving.num_gpus} x {device.name}" if serving.num_gpus > 1 else device.name
    table = Table(title=f"Memory of {of}", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("GiB", justify="right")
    for name, size in room.lines.items():
        table.add_row(name, f"{size / GIB:.2f}")
    left = room.allowed - sum(room.lines.values())
    table.add_row("KV cache: what is left", f"{left / GIB:.2f}")
    table.add_row(
        f"allowed ({serving.utilization:.0%} of {device.memory_bytes / GIB:.1f})", f"{room.allowed / GIB:.2f}"
    )
    console.print(table)
    console.print(
        f"\n{num_parameters(spec) / 1e9:.2f} billion weights. KV cache: {room.kv_bytes_per_token / 1024:.0f} KiB "
        f"a token, {room.kv_tokens:,} tokens, {room.kv_tokens / serving.max_model_len:.1f} sequences of "
        f"{serving.max_model_len:,}.",
        highlight=False,
    )
    console.print(
        f"Host: {room.host_bytes / GIB:.0f} GiB of memory (1.5 x weights while they load, and 16 GiB for the system; "
        f"K and V are not spilled), {room.cores} CPU cores (8 a GPU: scheduler, API processes, tokenization).\n",
        highlight=False,
    )


def _print_points(console: Console, found: list[Point], choice: Point | None, wanted: Wanted) -> None:
    title = f"Prediction, {wanted.input_len:,} tokens in, {wanted.output_len:,} out"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("at once", "TTFT ms", "TPOT ms", "output tok/s", "requests/s"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    for one in found:
        table.add_row(
            f"{one.concurrency:,}",
            f"{one.ttft * 1e3:,.1f}",
            f"{one.tpot * 1e3:.2f}",
            f"{one.output_tokens_per_second:,.0f}",
            f"{one.requests_per_second:,.2f}",
            one.limit,
            style="bold" if one is choice else "",
        )
    console.print(table)
    says = f"met with up to {choice.concurrency:,} requests at once" if choice else "not met"
    console.print(f"\nTTFT of {wanted.ttft * 1e3:g} ms and TPOT of {wanted.tpot * 1e3:g} ms: {says}.", highlight=False)


def _print_missing(console: Console, spec: ModelSpec, device: Machine, serving: Serving, room: Memory) -> None:
    console.print(
        f"It does not fit: one sequence of {serving.max_model_len:,} tokens lacks {room.missing / GIB:.1f} GiB.",
        style="bold",
        highlight=False,
    )
    for name, size in ELEMENT_BYTES.items():
        tried = dataclasses.replace(serving, weight_element_bytes=size, max_model_len=1, weight_bytes=None)
        tokens = memory(spec, tried, device.memory_bytes).kv_tokens
        says = f"fits, with {tokens:,} tokens of KV cache" if tokens else "does not fit"
        console.print(f"  {name} weights: {says}", highlight=False)
    console.print()


def _print_gpus(console: Console, fitting: list[OnGPU]) -> None:
    table = Table(
        title="\nGPUs (datasheet arithmetic but for the H200)", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("GPU")
    for name in ("at once", "TTFT ms", "TPOT ms", "output tok/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in fitting:
        if one.point is None:
            table.add_row(one.name, "-", "-", "-", "-", one.why, style="dim")
            continue
        at = one.point
        table.add_row(
            one.name,
            f"{at.concurrency:,}",
            f"{at.ttft * 1e3:,.0f}",
            f"{at.tpot * 1e3:.1f}",
            f"{at.output_tokens_per_second:,.0f}",
            at.limit,
        )
    console.print(table)


def _print_json(
    spec: ModelSpec,
    device: Machine,
    serving: Serving,
    wanted: Wanted,
    room: Memory,
    found: list[Point],
    choice: Point | None,
    fitting: list[OnGPU],
    flags: str,
) -> None:
    def row(one: Point) -> dict[str, Any]:
        return dataclasses.asdict(one) | {"step_seconds": one.step.seconds}

    content = {
        "gpu": device.name,
        "figures": "measured" if device.name == MEASURED else "datasheet arithmetic",
        "num_parameters": num_parameters(spec),
        "serving": dataclasses.asdict(serving),
        "wanted": dataclasses.asdict(wanted),
        "memory": dataclasses.asdict(room) | {"fits": room.fits},
        "predictions": [row(one) for one in found],
        "choice": row(choice) if choice else None,
        "gpus": [{"gpu": one.name, "point": row(one.point) if one.point else None, "why": one.why} for one in fitting],
        "command": flags,
    }
    print(json.dumps(content, indent=1))
