"""`octavo profile`: what some steps of a model, or of a running server, went to; a trace and a table by operator."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.bench import offline, profile_trace
from octavo.bench.profile_trace import OWN, STEP, Row, Trace
from octavo.bench.workload import Workload, items
from octavo.config import EngineConfig
from octavo.core.step import PARTS
from octavo.engine.engine import Engine
from octavo.engine.profile import MOST_STEPS, Profile
from octavo.engine.spans import engine_spans, watched
from octavo.errors import InvalidConfig, OctavoError
from octavo.flags import ENGINE, with_options
from octavo.tools.server_client import Refused, Server
from octavo.types import SamplingParams

LEAST_SHARE = 0.001  # of the steps; smaller operators are summed up


@with_options(positional="model", config=ENGINE)
def profile(
    *,
    num_steps: int = 32,
    batch_size: int = 1,
    input_len: int = 128,
    output_len: int | None = None,
    output: Path = Path("octavo-profile"),
    top: int = 8,
    nvtx: bool = False,
    url: str | None = None,
    admin_api_key: str | None = None,
    seconds: float = 10.0,
    config: EngineConfig,
) -> None:
    """Record steps of a model in this process, or with --url what a running server computes.

    Writes a trace for ui.perfetto.dev or chrome://tracing, in which plan, prepare, forward, sample, commit and outputs
    are ranges, and prints what each operator took. Recording slows a step down: octavo bench says how long it takes.

    Parameters
    ----------
    num_steps
        Steps to record; the first has the prompts in it.
    batch_size
        Requests at once.
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer; as many as there are steps when not given. After the last one new prompts begin.
    output
        Folder for the trace.
    top
        Operators shown of each part.
    nvtx
        Mark the ranges for Nsight Systems on an NVIDIA GPU, in place of a trace; run it under the nsys command that is
        printed.
    url
        Record on this server instead; the trace lies there, in its --profile-dir.
    admin_api_key
        The server's --admin-api-key.
    seconds
        How long to record on the server.
    """
    for name, value in (
        ("num_steps", num_steps),
        ("batch_size", batch_size),
        ("input_len", input_len),
        ("output_len", output_len),
        ("top", top),
    ):
        if value is not None and value < 1:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be from 1.")
    if num_steps > MOST_STEPS:
        raise InvalidConfig(f"num_steps={num_steps} is not allowed: a recording has at most {MOST_STEPS} steps.")
    if not seconds > 0:
        raise InvalidConfig(f"seconds={seconds} is not allowed: it must be above 0.")
    if url is not None:
        _of_server(url, admin_api_key, seconds, top)
        return
    if nvtx and not torch.cuda.is_available():
        raise InvalidConfig("--nvtx needs an NVIDIA GPU, and torch finds none.", "Without it a trace is written.")
    with Engine(config) as engine:
        driver = _Driver(engine, batch_size, input_len, output_len or num_steps)
        driver.steps(num_steps)  # warm
        driver.drop()
        if nvtx:
            with _marked(engine):
                driver.steps(num_steps)
            print(f"{num_steps} steps were marked.")
            return
        recording = Profile(engine_spans(engine), output)
        recording.start()
        try:
            driver.steps(num_steps)
        finally:
            path = Path(recording.stop())
        driver.drop()
    show(profile_trace.read(path), top)
    print(f"\nTrace: {path}  (open it at https://ui.perfetto.dev)")
    print(f"With Nsight Systems, on an NVIDIA GPU:\n  {nsight(output)}")


class _Driver:
    """Keeps an engine at work with batches of equal random requests; no two batches share a prompt."""

    def __init__(self, engine: Engine, batch_size: int, input_len: int, output_len: int) -> None:
        self.engine, self.batch_size, self.seed = engine, batch_size, 0
        self.input_len, self.output_len = input_len, output_len

    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.engine.num_unfinished:
                self._add()
            self.engine.step()

    def drop(self) -> None:
        """Forget what still runs."""
        self.engine.clear()

    def _add(self) -> None:
        engine, self.seed = self.engine, self.seed + 1
        work = Workload(
            num_prompts=self.batch_size, input_len=self.input_len, output_len=self.output_len, seed=self.seed
        )
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=self.output_len, detokenize=engine.tokenizer is not None
        )
        for item in items(work, offline.LOWEST_ID, offline.highest_id(engine), lambda text: 0):
            engine.add(engine.check(item.prompt, params))


@contextmanager
def _marked(engine: Engine) -> Iterator[None]:
    """Ranges for Nsight Systems, which records between these two calls."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    runtime.cudaProfilerStart()
    try:
        with watched(engine_spans(engine), torch.cuda.nvtx.range):
            yield
        torch.cuda.synchronize()
    finally:
        runtime.cudaProfilerStop()


def _of_server(url: str, key: str | None, seconds: float, top: int) -> None:
    server = Server(url, key)
    _control(server, "/start_profile")
    print(f"Recording what {server.url} computes for {seconds:g} s ...", file=sys.stderr)
    try:
        time.sleep(seconds)
    finally:  # also after Ctrl-C
        path = Path(_control(server, "/stop_profile"))
    print(f"Trace on the server: {path}  (open it at https://ui.perfetto.dev)")
    if path.is_file():  # on this machine
        show(profile_trace.read(path), top)


def _control(server: Server, route: str) -> str:
    try:
        return str(server.ask("POST", route)["path"])
    except Refused as error:
        if error.status == 404:
            why = "has no control routes"
        elif error.status == 401:
            why = "refuses the key"
        else:
            raise
        raise OctavoError(
            f"{server.url} {why}.", "Start it with --admin-api-key, and give the same key here."
        ) from None


def nsight(output: Path) -> str:
    """The command that records the same steps with Nsight Systems."""
    words = ["octavo", *sys.argv[1:]] + ([] if "--nvtx" in sys.argv else ["--nvtx"])
    options = "--trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop"
    return f"nsys profile {options} --output={shlex.quote(str(output / 'octavo'))} {shlex.join(words)}"


def show(trace: Trace, top: int) -> None:
    """Operators by part of the step and by share of its time, those on a device in a table of their own."""
    print(f"{trace.num_steps} steps, {1e3 * trace.step_seconds / trace.num_steps:.3f} ms each while recorded")
    for on_device in (False, True):
        parts = trace.seconds(on_device=on_device)
        if not parts:
            continue
        where = "on the device" if on_device else "on the host"
        print(f"\n{where + ', by part of the step':<51} {'calls':>7} {'ms a step':>10} {'share':>7}")
        for part in (*PARTS, STEP):
            if part in parts:
                rows = [row for row in trace.rows if row.part == part and row.on_device == on_device]
                _show_part(trace, part, parts[part], rows, top)
    hidden = sum(row.seconds for row in trace.rows if row.name == OWN and row.part == "forward")
    if hidden > trace.step_seconds / 2 and not trace.seconds(on_device=True):
        print("\nOctavo's C++ kernels run a whole model in one call, which PyTorch does not see;")
        print("OCTAVO_CPU_KERNELS=0 computes with PyTorch's operators, each of which has a line.")


def _show_part(trace: Trace, part: str, seconds: float, rows: list[Row], top: int) -> None:
    def line(name: str, calls: str, seconds: float) -> None:
        print(
            f"{name[:51]:<51} {calls:>7} {1e3 * seconds / trace.num_steps:>10.3f} {seconds / trace.step_seconds:>7.1%}"
        )

    line("between the parts" if part == STEP else part, "", seconds)
    shown = [row for row in rows if row.seconds / trace.step_seconds >= LEAST_SHARE][:top]
    if len(rows) == 1 and not rows[0].calls:
        return
    for row in shown:
        calls = f"{row.calls / trace.num_steps:,.1f}" if row.calls else ""
        line(f"  {row.name}", calls, row.seconds)
    rest = [row for row in rows if row not in shown]
    if rest:
        line(f"  {len(rest)} others", "", sum(row.seconds for row in rest))
