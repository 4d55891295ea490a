"""How far a run is from what the machine can do, and where the rest of its steps went."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from octavo.bench.profile_trace import device_shares, read
from octavo.bench.results import WIDTH
from octavo.core.cost import Work, step_work
from octavo.core.events import Committed, Event, Planned
from octavo.core.step import PARTS, Step
from octavo.engine.engine import Engine
from octavo.engine.profile import Profile
from octavo.engine.spans import Timer, engine_spans, watched
from octavo.layers.linear import Linear
from octavo.model_spec import ModelSpec
from octavo.worker.peaks import peaks
from octavo.worker.start import choose_device

GROUPS = {"forward": "device", "sample": "sampling", "step": "not attributed"}
"""Parts by what a report calls them; the others are the host's."""
LINES = ("device", "sampling", "communication", "launch gaps", "wait", *(n for n in PARTS if n not in GROUPS))


class Done(NamedTuple):
    """A step's work, as counted, and the seconds that the machine's peaks need for it."""

    tokens: int
    bytes: float
    flops: float
    memory_seconds: float
    compute_seconds: float


@dataclass(slots=True)
class Kind:
    """Steps of one kind: what was done in each, and how their time was spent."""

    done: list[Done] = field(default_factory=list)
    timed: list[dict[str, float]] = field(default_factory=list)

    def as_json(self, profiled: dict[str, float] | None = None) -> dict[str, Any]:
        """Sums; a step's limit is the longer of reading and computing, as if each hid the other."""
        tokens, moved, flops, reading, computing = (sum(column) for column in zip(*self.done, strict=True))
        seconds = sum(sum(step.values()) for step in self.timed)
        limit = sum(max(done.memory_seconds, done.compute_seconds) for done in self.done)
        return {
            "steps": len(self.done),
            "tokens": tokens,
            "seconds": seconds,
            "bytes": moved,
            "flops": flops,
            "limit_seconds": limit,
            "limited_by": "bandwidth" if reading >= computing else "compute",
            "achieved_share": limit / seconds,
            "bytes_per_second": moved / seconds,
            "flops_per_second": flops / seconds,
            "parts": self._parts(profiled, 1e3 * seconds / len(self.done)),
        }

    def _parts(self, profiled: dict[str, float] | None, step_ms: float) -> list[dict[str, Any]]:
        seconds = dict.fromkeys((*LINES, "not attributed"), 0.0)
        for timed in self.timed if profiled is None else [profiled]:
            for name, value in timed.items():
                seconds[GROUPS.get(name, name)] += value
        total = sum(seconds.values())
        return [
            {"name": name, "share": value / total, "ms": step_ms * value / total} for name, value in seconds.items()
        ]


class Roofline:
    """Watches the steps of an engine while the context is open, which may be several times; `result` judges them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.timer = engine, Timer()
        runner: Any = getattr(engine.loop.executor, "runner", None)
        model = getattr(runner, "model", None)
        self.device = choose_device(engine.config)
        dtype = model.spec.dtype if model is not None else engine.spec.dtype
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.weight_bytes = element_bytes(model) if model is not None else float(self.dtype.itemsize)
        self.cache_bytes = engine.cache_size.bytes_per_token / kv_elements(engine.spec)
        self._steps: list[tuple[int, Step]] = []  # and the turn of the loop that waits for them
        # On a CPU a step is computed where it is launched; a GPU's is waited for where it is committed.
        self._event = Planned if self.device.type == "cpu" else Committed
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self.engine.scheduler.subscribers.append(self._hear)
        self._open.enter_context(watched(engine_spans(self.engine), self.timer.around))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.engine.scheduler.subscribers.remove(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, self._event):
            self._steps.append((len(self.timer.steps), event.step))

    def result(self, again: Callable[[], object] | None = None) -> dict[str, Any]:
        """Bytes, FLOPs and seconds of all steps and of both kinds; what a step went to, in shares that add up to one.

        `again` runs the load once more, or a part of it: on a GPU kernels run beside the host, so a profile of that
        run says where the time went; its shares are applied to the steps as they were timed.
        """
        reached = peaks(self.device, self.dtype)
        works = [(turn, step, list(self._works(step))) for turn, step in self._steps]
        bandwidth = reached.bandwidth(
            max((work.weight_bytes + work.cache_bytes for _, _, found in works for work in found), default=0.0)
        )
        kinds = {"prefill": Kind(), "decode": Kind()}
        timed = list(self.timer.steps)
        for turn, step, found in works:
            kind = kinds["decode" if all(chunk.length == 1 and chunk.samples for chunk in step.chunks) else "prefill"]
            kind.done += [judged(work, bandwidth, reached.flops) for work in found]
            kind.timed.append(timed[turn])
            timed[turn] = {}
        kinds["decode"].timed += timed  # turns that only took in the last tokens
        whole = Kind([done for kind in kinds.values() for done in kind.done], list(self.timer.steps))
        profiled = self._profiled(again) if self.device.type == "cuda" and again is not None else None
        found_kinds = {name: kind.as_json() for name, kind in kinds.items() if kind.done}
        if profiled is not None:
            found_kinds = {name: kind | {"parts": []} for name, kind in found_kinds.items()}
        return {
            "machine": reached.machine
            | {"bandwidths": [list(pair) for pair in reached.bandwidths], "measured_at": reached.measured_at},
            "bandwidth": bandwidth,
            "flops": reached.flops,
            "weight_element_bytes": self.weight_bytes,
            "cache_element_bytes": self.cache_bytes,
            "total": whole.as_json(profiled),
            "kinds": found_kinds,
            "parts_from": "timers in every step" if profiled is None else "a profile of a shorter run",
        }

    def _works(self, step: Step) -> Iterator[Work]:
        return step_works(self.engine.spec, step, self.weight_bytes, self.cache_bytes)

    def _profiled(self, again: Callable[[], object]) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            profile = Profile(engine_spans(self.engine), folder)
            profile.start()
            try:
                again()
            finally:
                path = profile.stop()
            return device_shares(read(Path(path)))


def element_bytes(model: torch.nn.Module) -> float:
    """Bytes that a weight of the linear layers takes as it is stored, scales included."""
    stored = count = 0
    for module in model.modules():
        if isinstance(module, Linear):
            tensors = [*module.parameters(recurse=False), *(v for v in vars(module).values() if torch.is_tensor(v))]
            size = sum(tensor.nbytes for tensor in tensors if tensor.dim() > 1)
            if size:  # else somebody else keeps it
                stored += size
                count += module.in_features * module.out_features
    return stored / count


def kv_elements(spec: ModelSpec) -> int:
    """Numbers that the cache holds of one token."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim


def step_works(spec: ModelSpec, step: Step, weight_bytes: float, cache_bytes: float) -> Iterator[Work]:
    """The work of a step, once for each of its repeats."""
    sampled = sum(chunk.samples for chunk in step.chunks)
    for ahead in range(step.repeat):
        yield step_work(
            spec,
            [(chunk.length, chunk.start + chunk.length + ahead) for chunk in step.chunks],
            sampled=sampled,
            weight_element_bytes=weight_bytes,
            cache_element_bytes=cache_bytes,
        )


def judged(work: Work, bandwidth: float, flops: float) -> Done:
    """Against a machine that reads `bandwidth` bytes/s and computes `flops` FLOP/s."""
    moved = work.weight_bytes + work.cache_bytes + work.logit_bytes
    computed = work.linear_flops + work.attention_flops
    return Done(work.num_tokens, moved, computed, moved / bandwidth, computed / flops)


def show(result: dict[str, Any]) -> None:
    """The block under a benchmark's figures."""
    machine, kinds = result["machine"], result["kinds"]
    print(f"{' Roofline ':=^{WIDTH}}")
    print(f"{machine['name']}{threads_of(machine)}, {machine['dtype']}, measured {machine['measured_at']}:")
    print(f"reads {result['bandwidth'] / 1e9:,.1f} GB/s, computes {result['flops'] / 1e9:,.0f} GFLOP/s")
    columns = list(kinds.items())
    print(f"{'':<26}" + "".join(f"{name:>21}" for name, _ in columns))
    for label, value in (
        ("Steps", lambda kind: f"{kind['steps']:,}"),
        ("Tokens a step", lambda kind: f"{kind['tokens'] / kind['steps']:,.1f}"),
        ("MB moved a step", lambda kind: f"{kind['bytes'] / kind['steps'] / 1e6:,.1f}"),
        ("GFLOP a step", lambda kind: f"{kind['flops'] / kind['steps'] / 1e9:,.2f}"),
        ("Limit a step (ms)", lambda kind: f"{1e3 * kind['limit_seconds'] / kind['steps']:,.3f}"),
        ("Measured a step (ms)", lambda kind: f"{1e3 * kind['seconds'] / kind['steps']:,.3f}"),
        ("Limited by", lambda kind: kind["limited_by"]),
        ("Reached of the limit", lambda kind: f"{kind['achieved_share']:.1%}"),
    ):
        print(f"{label:<26}" + "".join(f"{value(kind):>21}" for _, kind in columns))
    parted = {name: kind["parts"] for name, kind in columns if kind["parts"]} or {"all": result["total"]["parts"]}
    print(f"{' Where a step went ':-^{WIDTH}}")
    for lines in zip(*parted.values(), strict=True):
        cells = "".join(f"{part['ms']:>11.3f} ms {part['share']:>6.1%}" for part in lines)
        print(f"{label_of(lines[0]['name']):<26}{cells}")
    print("=" * WIDTH)


def threads_of(machine: dict[str, Any]) -> str:
    count = machine.get("threads")
    return f", {count} thread{'s' * (count != 1)}" if count else ""


def label_of(name: str) -> str:
    """How a part of a step is called before people."""
    return {
        "device": "device (the model)",
        "plan": "host: plan",
        "prepare": "host: inputs",
        "commit": "host: commit",
        "outputs": "host: outputs",
        "wait": "host: waiting for results",
    }.get(name, name)
