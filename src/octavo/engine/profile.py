"""Records what the engine process computes, for /start_profile and /stop_profile."""

import tempfile
import time
from pathlib import Path

import torch

from octavo.errors import InvalidRequest


class Profile:
    """At most one recording at a time; traces are named by us and lie in one folder, whatever a client says."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder) if folder else Path(tempfile.gettempdir()) / "octavo-profiles"
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> str:
        """Returns the folder.

        Raises:
            InvalidRequest: one is being recorded.
        """
        if self._profiler is not None:
            raise InvalidRequest("A profile is being recorded already.", "Stop it first.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        return str(self.folder)

    def stop(self) -> str:
        """Returns the path of the trace.

        Raises:
            InvalidRequest: none is being recorded.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise InvalidRequest("No profile is being recorded.", "Start one first.")
        profiler.stop()
        path = self.folder / f"octavo-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json"
        profiler.export_chrome_trace(str(path))
        return str(path)
