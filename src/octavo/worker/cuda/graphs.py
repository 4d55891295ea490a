"""Captured parts of a step: replayed where there is a capture, launched one by one elsewhere."""

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch

Launches = Callable[[], None]
FEW_SEQUENCES = 8  # so many or fewer in a mixed step are all treated as prompts: one kind of attention, not two


def batch_sizes(largest: int) -> list[int]:
    """Row counts to capture, in fine steps: a padding row costs nothing in attention and little elsewhere."""
    fine = [1, 2, 4, *range(8, min(largest, 512), 8), *range(512, largest, 32)]
    return [size for size in fine if size < largest] + [largest]


def coarse_sizes(largest: int) -> list[int]:
    """Fewer sizes, for what is rarer."""
    return [size for size in (1, 4, 16, 32, 64, 128, 192, 256, 512, 1024) if size < largest] + [largest]


def token_counts(largest: int) -> list[int]:
    """Rows of mixed steps to capture; longer ones keep the device busy for longer than their launches take."""
    counts = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
    return [count for count in counts if count <= largest]


def sequence_counts(largest: int) -> list[int]:
    """Sequences of mixed steps to capture: attention has idle programs for each that is not there."""
    return [count for count in (FEW_SEQUENCES, 256) if count < largest] + [largest]


def round_up(size: int, sizes: list[int]) -> int | None:
    """The smallest of the sorted `sizes` that is enough."""
    return next((found for found in sizes if found >= size), None)


class Graphs:
    """CUDA graphs by key; all of them share one pool of memory, as only one runs at a time."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None

    def run(self, key: Hashable, launches: Launches) -> None:
        graph = self.graphs.get(key)
        if graph is None:
            launches()
        else:
            graph.replay()

    def capture(self, key: Hashable, launches: Launches, prepare: Launches) -> None:
        """Capture, once `prepare` has launched what loads kernels and makes work space."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            prepare()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            collecting = gc.isenabled()
            gc.disable()  # a tensor freed by the collector meanwhile would end the capture
            try:
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                launches()
                graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        self.graphs[key] = graph
