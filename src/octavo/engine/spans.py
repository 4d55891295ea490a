"""The named parts of a step, for whoever measures: methods of live objects, wrapped only while somebody listens."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from octavo.engine.engine import Engine
from octavo.engine.loop import Loop
from octavo.worker.base import Span

Around = Callable[[str], AbstractContextManager[Any]]
"""Called with a part's name (`core.step.PARTS`), or "step"; what it returns is entered and left around the part."""


@runtime_checkable
class HasSpans(Protocol):
    """An executor whose parts are in this process."""

    def spans(self) -> list[Span]: ...


def loop_spans(loop: Loop) -> list[Span]:
    """The parts of a loop that somebody else turns, in the order in which they lie within each other."""
    executor = loop.executor
    return [
        Span("step", loop, "step"),
        Span("plan", loop.scheduler, "plan"),
        Span("prepare", executor, "launch"),
        Span("sample", executor, "sample"),
        Span("commit", loop.scheduler, "commit"),
        *(executor.spans() if isinstance(executor, HasSpans) else ()),
    ]


def engine_spans(engine: Engine) -> list[Span]:
    """Those of an engine's own turn, whose text is made in the same step."""
    inner = loop_spans(engine.loop)[1:]
    return [Span("step", engine, "step"), *inner, Span("outputs", engine.outputs, "process")]


@contextmanager
def watched(spans: list[Span], around: Around) -> Iterator[None]:
    """Enter `around(name)` at every call of a part, from any place, until the context is left."""
    before = []
    for name, owner, method in spans:
        called = getattr(owner, method)
        before.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, _wrapped(called, name, around))
    try:
        yield
    finally:
        for owner, method, own in reversed(before):
            if own is None:
                delattr(owner, method)
            else:
                setattr(owner, method, own)


def _wrapped(called: Callable[..., Any], name: str, around: Around) -> Callable[..., Any]:
    def inside(*args: Any, **keywords: Any) -> Any:
        with around(name):
            found = called(*args, **keywords)
        return _wrapped(found, "wait", around) if name == "sample" and callable(found) else found

    return inside


class Timer:
    """For each step the seconds of its parts, without those of the parts within them; "step" is what is left."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seconds: dict[str, float] = {}
        self._open: list[_Entered] = []

    def around(self, name: str) -> "_Entered":
        return _Entered(self, name)


class _Entered:
    __slots__ = ("begin", "inner", "name", "timer")

    def __init__(self, timer: Timer, name: str) -> None:
        self.timer, self.name, self.inner = timer, name, 0.0

    def __enter__(self) -> Self:
        self.timer._open.append(self)
        self.begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        whole = time.perf_counter() - self.begin
        timer = self.timer
        timer._open.pop()
        if timer._open:
            timer._open[-1].inner += whole
        seconds = timer._seconds
        seconds[self.name] = seconds.get(self.name, 0.0) + whole - self.inner
        if self.name == "step":
            timer.steps.append(seconds)
            timer._seconds = {}
