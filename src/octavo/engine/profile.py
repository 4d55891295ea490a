"""Records what this process computes, with the parts of a step as ranges: traces for Perfetto and chrome://tracing."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from octavo import env
from octavo.engine.spans import watched
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.worker.base import Span

MOST_STEPS = 1000  # a recording that nobody stops must not fill the memory


class Profile:
    """At most one recording at a time; traces are named by us and lie in one folder, whatever a client says."""

    def __init__(self, spans: Sequence[Span], folder: str | Path = "", most_steps: int = MOST_STEPS) -> None:
        self.folder = Path(folder) if folder else Path(tempfile.gettempdir()) / "octavo-profiles"
        self.spans, self.most_steps = list(spans), most_steps
        self.num_steps = 0  # of the recording
        self._profiler: torch.profiler.profile | None = None
        self._watching = ExitStack()
        self._recording = False

    def start(self) -> str:
        """Returns the folder. After `most_steps` steps nothing more is recorded, and `stop` writes those.

        Raises:
            InvalidRequest: one is being recorded.
            InvalidConfig: the folder cannot be made.
        """
        if self._profiler is not None:
            raise InvalidRequest("A profile is being recorded already.", "Stop it first.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"Profiles cannot be written to {self.folder}: {error}.") from None
        self.num_steps = 0
        env.quiet_profiler()
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._recording = True
        self._watching.enter_context(watched(self.spans, self._around))
        return str(self.folder)

    def stop(self) -> str:
        """Returns the path of the trace.

        Raises:
            InvalidRequest: none is being recorded.
            InvalidConfig: the trace cannot be written; it is lost.
        """
        if self._profiler is None:
            raise InvalidRequest("No profile is being recorded.", "Start one first.")
        self._end()
        profiler, self._profiler = self._profiler, None
        path = self.folder / f"octavo-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json"
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise InvalidConfig(f"The profile cannot be written to {path}: {error}.") from None
        return str(path)

    def _end(self) -> None:
        if self._recording and self._profiler is not None:
            self._recording = False
            self._watching.close()
            self._profiler.stop()

    def _around(self, name: str) -> AbstractContextManager[Any]:
        if name == "step":
            if self.num_steps == self.most_steps:
                self._end()
                return nullcontext()
            self.num_steps += 1
        return torch.profiler.record_function(name)
