"""Reads a recorded trace (Chrome's JSON): what each operator took, by part of the step; when the device was busy."""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.step import PARTS
from octavo.errors import InvalidConfig

STEP = "step"
HOST, DEVICE = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
OWN = "(Python, and kernels that PyTorch does not see)"
MICROSECOND = 1e-6


class Segment(NamedTuple):
    """A stretch of time, in seconds; `name` is a part on the host, or what a device did."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """An operator within a part: seconds without those of the operators that it called."""

    part: str
    name: str
    calls: int
    seconds: float
    on_device: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """`host` are stretches of the steps, each of the innermost part; `device` those in which kernels ran."""

    num_steps: int
    step_seconds: float
    rows: list[Row]
    host: list[Segment]
    device: list[Segment]

    def seconds(self, *, on_device: bool) -> dict[str, float]:
        """Of each part, with all of its operators."""
        found = dict.fromkeys((*PARTS, STEP), 0.0)
        for row in self.rows:
            if row.on_device == on_device:
                found[row.part] += row.seconds
        return {part: seconds for part, seconds in found.items() if seconds}


def read(path: Path) -> Trace:
    """
    Raises:
        InvalidConfig: no trace, or one without steps.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{path} is no trace: {error}.") from None
    return digest(events)


def digest(events: Iterable[dict[str, Any]]) -> Trace:
    """The trace of events as Chrome's format has them; times in microseconds."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    on_device = []
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in HOST:
            threads[event.get("tid")].append(event)
        elif event.get("cat") in DEVICE:
            on_device.append(event)
    sums: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0, 0.0])
    host: list[Segment] = []
    launched: dict[Any, str] = {}  # part by correlation: a kernel knows the call that launched it
    num_steps, step_seconds = 0, 0.0
    for thread in threads.values():
        if not any(_is_range(event, (STEP,)) for event in thread):
            continue
        for event, part, own in _own_times(thread, host):
            if _is_range(event, (STEP,)):
                num_steps += 1
                step_seconds += event["dur"] * MICROSECOND
            if part is None:
                continue
            if correlation := event.get("args", {}).get("correlation"):
                launched[correlation] = part
            name = OWN if _is_range(event, (*PARTS, STEP)) else str(event["name"])
            sums[part, name, False][0] += name != OWN
            sums[part, name, False][1] += own * MICROSECOND
    if not num_steps:
        raise InvalidConfig("The trace has no step in it: nothing was computed while it was recorded.")
    device = []
    for event in on_device:
        part = launched.get(event.get("args", {}).get("correlation"), "forward")
        total = sums[part, str(event["name"]), True]
        total[0] += 1
        total[1] += event["dur"] * MICROSECOND
        begin = event["ts"] * MICROSECOND
        kind = "communication" if "nccl" in event["name"].lower() else part
        device.append(Segment(begin, begin + event["dur"] * MICROSECOND, kind))
    rows = [
        Row(part, name, int(calls), seconds, on) for (part, name, on), (calls, seconds) in sums.items() if seconds > 0
    ]
    rows.sort(key=lambda row: -row.seconds)
    return Trace(num_steps, step_seconds, rows, sorted(host), sorted(device))


def _is_range(event: dict[str, Any], names: tuple[str, ...]) -> bool:
    return event.get("cat") == "user_annotation" and event["name"] in names


def _own_times(
    thread: list[dict[str, Any]], segments: list[Segment]
) -> Iterable[tuple[dict[str, Any], str | None, float]]:
    """Each event of a thread, the part it lies in, and its microseconds without those of events within it.

    Stretches of the innermost parts go into `segments`.
    """
    thread.sort(key=lambda event: (event["ts"], -event["dur"]))
    open_events: list[list[Any]] = []  # event, part, microseconds of what lies within it
    found = []
    moment = 0.0

    def pass_to(until: float) -> None:
        """The time since the last mark belongs to the innermost part."""
        nonlocal moment
        if open_events and open_events[-1][1] is not None and until > moment:
            segments.append(Segment(moment * MICROSECOND, until * MICROSECOND, open_events[-1][1]))
        moment = max(moment, until)

    def close() -> None:
        event, part, inner = open_events.pop()
        found.append((event, part, max(0.0, event["dur"] - inner)))

    for event in thread:
        while open_events and open_events[-1][0]["ts"] + open_events[-1][0]["dur"] <= event["ts"]:
            pass_to(open_events[-1][0]["ts"] + open_events[-1][0]["dur"])
            close()
        pass_to(event["ts"])
        if open_events:
            open_events[-1][2] += event["dur"]
        part = event["name"] if _is_range(event, (*PARTS, STEP)) else (open_events[-1][1] if open_events else None)
        open_events.append([event, part, 0.0])
    while open_events:
        pass_to(open_events[-1][0]["ts"] + open_events[-1][0]["dur"])
        close()
    return found


def device_shares(trace: Trace) -> dict[str, float]:
    """Seconds of the steps by what they went to, for a device that runs beside the host.

    While a kernel runs it is the device (forward), sampling or communication. While none runs, the host is at fault:
    a stretch belongs to the part it was in; in forward and sample those are the gaps between launches.
    """
    found: dict[str, float] = defaultdict(float)
    kinds = {"sample": "sampling", "communication": "communication"}
    gaps = {"forward": "launch gaps", "sample": "launch gaps"}
    running: list[tuple[float, str]] = []  # ends and names; several streams may run at once
    waiting = iter(trace.device)
    upcoming = next(waiting, None)
    for begin, end, part in trace.host:
        moment = begin
        while moment < end:
            while upcoming and upcoming.begin <= moment:
                heapq.heappush(running, (upcoming.end, upcoming.name))
                upcoming = next(waiting, None)
            while running and running[0][0] <= moment:
                heapq.heappop(running)
            until = min(end, upcoming.begin if upcoming else end, running[0][0] if running else end)
            name = kinds.get(running[0][1], "device") if running else gaps.get(part, part)
            found[name] += until - moment
            moment = until
    return dict(found)
