"""The recording of `--trace FILE`: what the scheduler and the block pool did, in a few bytes a step.

The file begins with `MAGIC`. Frames follow: four bytes of length (little-endian), then so many bytes of
zlib-compressed msgpack. The first frame is a `Header`, each of the others a list of records (the structs below, as
arrays that begin with their number), in the order in which things happened. An empty frame is the end; where it is
missing, the process was killed and everything up to its last write is there. `octavo/trace/life.py` folds the records.

Requests are numbered as they arrive. `delay` is microseconds since the last record that has one. No text and no token
is recorded. Contents of blocks have *labels* instead: equal labels are equal tokens after equal tokens, so a replay
can make up prompts that share exactly what the recorded ones shared.
"""

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from octavo.core import events
from octavo.core.scheduler import Scheduler
from octavo.errors import InvalidConfig
from octavo.version import __version__

logger = logging.getLogger("octavo")

MAGIC = b"octavo trace\n"
FORMAT = 1
FLUSH_SECONDS = 1.0
FLUSH_RECORDS = 4096
MAX_LABELS = 1_000_000  # remembered; then the older half is forgotten, and equal blocks get other labels


class Settings(Struct, frozen=True, kw_only=True):
    """What decides a schedule besides the requests."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_scheduler_steps: int = 1
    scheduling_policy: str = "fcfs"
    depth: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, depth: int) -> "Settings":
        return cls(
            block_size=scheduler.pool.block_size,
            num_blocks=scheduler.pool.num_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            num_scheduler_steps=scheduler.num_scheduler_steps,
            scheduling_policy=scheduler.policy,
            depth=depth,
        )


class Header(Struct, frozen=True):
    format: int
    settings: Settings
    model: str = ""
    version: str = __version__
    started: float = 0.0  # seconds since 1970


class Record(Struct, array_like=True, gc=False):
    """Something that happened."""


class Arrival(Record, tag=0):
    """`content` labels each full block of the prompt, then what is left of it. `max_tokens` is -1 without a limit.

    `constrained`: its steps are masked.
    """

    delay: int
    number: int
    id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    tenant: str
    namespace: int
    reads_prefix_cache: bool
    content: list[int]
    constrained: bool = False


class Admit(Record, tag=1):
    """The first `num_shared` positions lie in blocks found by content; `num_tokens` are known.

    `content` labels those of the found blocks that are not all prompt: after a preemption.
    """

    number: int
    slot: int
    blocks: list[int]
    num_shared: int
    num_tokens: int
    content: list[int] = []


class Plan(Record, tag=2):
    """A step is launched: without `numbers` for the requests of the step before, without `lengths` a position each.

    `new_blocks` are (place in `numbers`, blocks appended to its table); `copies` are (from, to).
    """

    delay: int
    repeat: int = 1
    numbers: list[int] | None = None
    lengths: list[int] | None = None
    new_blocks: list[tuple[int, list[int]]] = []
    copies: list[tuple[int, int]] = []
    masked: bool = False


class Stall(Record, tag=3):
    """`plan` found nothing to launch."""


class Commit(Record, tag=4):
    """The results of the oldest step in flight are in."""

    delay: int


class Finish(Record, tag=5):
    """`in_commit`: by what the device returned, else from outside. Its blocks are released."""

    number: int
    reason: str
    num_generated: int
    in_commit: bool = False


class Preempt(Record, tag=6):
    """`number` gave its blocks up so that `by` can grow."""

    number: int
    by: int
    num_lost: int


class Seal(Record, tag=7):
    """Positions [start, start + count) became findable. `content` labels the blocks that are not all prompt."""

    number: int
    start: int
    count: int
    content: list[int]


class Evict(Record, tag=8):
    """Findable blocks were taken; the next table that they are in says by whom."""

    blocks: list[int]


class Reset(Record, tag=9):
    """Nothing found before is found again."""


class Clear(Record, tag=10):
    """A fault: everything at work was dropped."""


AnyRecord = Arrival | Admit | Plan | Stall | Commit | Finish | Preempt | Seal | Evict | Reset | Clear


class TraceFile:
    """Frames, a header first. A file that can no longer be written costs one warning; the engine goes on.

    Raises:
        InvalidConfig: the file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._end = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidConfig(f"trace={path!r} cannot be written: {why}.") from None
        self._write(MAGIC)

    def write(self, frame: Header | list[AnyRecord]) -> None:
        if frame and self._file >= 0:
            packed = zlib.compress(self._encoder.encode(frame), 1)
            self._write(len(packed).to_bytes(4, "little") + packed)

    def close(self) -> None:
        """A second call does nothing."""
        if self._file >= 0:
            self._write(b"\0\0\0\0")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._end += len(data)
        except OSError as error:
            logger.warning("The trace ends here, and the engine goes on: %s: %s.", self.path, error.strerror)
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):  # of a pipe, say
                os.ftruncate(file, self._end)  # half a frame is of no use
            os.close(file)


@dataclass(slots=True)
class _Live:
    number: int
    namespace: int
    num_prompt_tokens: int
    labels: list[int]  # of the full blocks


class Recorder:
    """Subscribe an instance: `scheduler.subscribers.append(recorder)`, before anything is added; then `close` it.

    Args:
        write: takes the records of about a second.
        clock: seconds.
    """

    def __init__(
        self,
        write: Callable[[list[AnyRecord]], None],
        block_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._write, self._block_size, self._clock = write, block_size, clock
        self._records: list[AnyRecord] = []
        self._live: dict[str, _Live] = {}
        self._num_arrived = 0
        self._namespaces: dict[str, int] = {}
        self._labels: dict[int, int] = {}
        self._num_labels = 0
        self._label_of: dict[int, int] = {}  # by block, of the full ones that were sealed last
        self._planned: tuple[str, ...] = ()
        self._finishes: list[Finish] = []  # since the last plan
        self._last = self._flushed = clock()
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Added: self._added,
            events.Admitted: self._admitted,
            events.Planned: self._launched,
            events.Stalled: self._stalled,
            events.Committed: self._committed,
            events.Finished: self._finished,
            events.Preempted: self._preempted,
            events.Sealed: self._sealed,
            events.Evicted: lambda event: self._records.append(Evict(list(event.blocks))),
            events.CacheReset: lambda _: self._records.append(Reset()),
            events.Cleared: lambda _: self._records.append(Clear()),
        }

    def __call__(self, event: events.Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def flush(self) -> None:
        self._write(self._records)
        self._records = []
        self._flushed = self._last

    def _delay(self) -> int:
        delay = int((self._clock() - self._last) * 1e6)
        self._last += delay / 1e6
        return delay

    def _added(self, event: events.Added) -> None:
        request, size = event.request, self._block_size
        namespace = self._namespaces.setdefault(request.namespace, len(self._namespaces))
        live = _Live(self._num_arrived, namespace, event.num_prompt_tokens, [])
        self._num_arrived += 1
        content = self._label(-1 - namespace, request.prompt_token_ids)
        live.labels = content[: event.num_prompt_tokens // size]
        self._live[event.request_id] = live
        most = request.params.max_tokens
        self._records.append(
            Arrival(
                self._delay(), live.number, event.request_id, event.num_prompt_tokens, -1 if most is None else most,
                request.priority, request.tenant, namespace, request.reads_prefix_cache, content,
                request.params.structured_outputs is not None,
            )
        )  # fmt: skip

    def _admitted(self, event: events.Admitted) -> None:
        live, size = self._live[event.request_id], self._block_size
        record = Admit(live.number, event.slot, list(event.blocks), event.num_cached_tokens, event.num_tokens)
        if event.num_tokens > live.num_prompt_tokens:  # of its own text, somebody else may have had the same before
            found = event.blocks[: event.num_cached_tokens // size]
            live.labels += [self._label_of[block] for block in found[len(live.labels) :]]
            record.content = live.labels[live.num_prompt_tokens // size : len(found)]
        self._records.append(record)

    def _launched(self, event: events.Planned) -> None:
        """The hot path: once a step, all of its sequences."""
        step, chunks = event.step, event.step.chunks
        record = Plan(self._delay(), step.repeat)
        if event.request_ids != self._planned:
            self._planned = event.request_ids
            record.numbers = [self._live[name].number for name in event.request_ids]
        lengths = [chunk.length for chunk in chunks]
        if sum(lengths) != len(lengths):
            record.lengths = lengths
        record.new_blocks = [(i, list(chunk.new_blocks)) for i, chunk in enumerate(chunks) if chunk.new_blocks]
        record.copies = list(step.copies)
        record.masked = step.masked
        self._records.append(record)
        self._finishes.clear()

    def _stalled(self, _: events.Stalled) -> None:
        self._records.append(Stall())
        self._finishes.clear()

    def _committed(self, _: events.Committed) -> None:
        for finish in self._finishes:
            finish.in_commit = True
        self._finishes.clear()
        self._records.append(Commit(self._delay()))
        if not self._live or self._last - self._flushed >= FLUSH_SECONDS or len(self._records) >= FLUSH_RECORDS:
            self.flush()

    def _finished(self, event: events.Finished) -> None:
        live = self._live.pop(event.request_id)
        finish = Finish(live.number, str(event.reason), event.num_generated_tokens)
        self._records.append(finish)
        self._finishes.append(finish)

    def _preempted(self, event: events.Preempted) -> None:
        number, by = self._live[event.request_id].number, self._live[event.by].number
        self._records.append(Preempt(number, by, event.num_lost_tokens))

    def _sealed(self, event: events.Sealed) -> None:
        live = self._live[event.request_id]
        count = len(event.tokens)
        content: list[int] = []
        if event.start + count > live.num_prompt_tokens:
            first = event.start // self._block_size
            content = self._label(live.labels[first - 1] if first else -1 - live.namespace, event.tokens)
            full = count // self._block_size
            live.labels[first : first + full] = content[:full]
        for i, block in enumerate(event.blocks[: count // self._block_size], event.start // self._block_size):
            self._label_of[block] = live.labels[i]
        self._records.append(Seal(live.number, event.start, count, content))

    def _label(self, parent: int, tokens: tuple[int, ...]) -> list[int]:
        """One label for each block of `tokens`, the last of which may be partly filled."""
        content, labels, size = [], self._labels, self._block_size
        for begin in range(0, len(tokens), size):
            key = hash((parent, tokens[begin : begin + size]))
            label = labels.get(key)
            if label is None:
                label = labels[key] = self._num_labels
                self._num_labels += 1
            content.append(label)
            parent = label
        if len(labels) > MAX_LABELS:
            for key in list(islice(labels, MAX_LABELS // 2)):
                del labels[key]
        return content


class Recording:
    """A recorder that listens to a scheduler, and its file."""

    def __init__(self, file: TraceFile, scheduler: Scheduler, depth: int, model: str = "") -> None:
        self._file = file
        file.write(Header(FORMAT, Settings.of(scheduler, depth), model, started=time.time()))
        self._recorder = Recorder(file.write, scheduler.pool.block_size)
        scheduler.subscribers.append(self._recorder)

    def close(self) -> None:
        self._recorder.flush()
        self._file.close()


@dataclass(slots=True)
class Trace:
    header: Header
    records: list[AnyRecord]
    is_complete: bool = True  # closed in good order


def read(path: str | Path) -> Trace:
    """A recording, as far as it goes.

    Raises:
        InvalidConfig: it cannot be read, is no trace, is damaged, or was written by a newer Octavo.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}.") from None
    if not data:
        raise InvalidConfig(f"{path} is empty.")
    if not data.startswith(MAGIC):
        raise InvalidConfig(f"{path} is no trace of Octavo's scheduler.", "Record one with --trace FILE.")
    frames, is_complete = _frames(data[len(MAGIC) :])
    if not frames:
        raise InvalidConfig(f"{path} is cut off before its first record.")
    try:
        version = msgspec.msgpack.decode(zlib.decompress(frames[0]))["format"]
        if version != FORMAT:
            raise InvalidConfig(
                f"{path} has format {version!r}; this Octavo ({__version__}) reads format {FORMAT}.",
                "Read it with the Octavo that wrote it.",
            )
        header = msgspec.msgpack.decode(zlib.decompress(frames[0]), type=Header)
        decoder = msgspec.msgpack.Decoder(list[AnyRecord])
        records = [record for frame in frames[1:] for record in decoder.decode(zlib.decompress(frame))]
    except (zlib.error, msgspec.MsgspecError, TypeError, KeyError) as error:
        raise InvalidConfig(f"{path} is damaged: {error}.") from None
    return Trace(header, records, is_complete)


def _frames(data: bytes) -> tuple[list[bytes], bool]:
    """The whole frames, and whether the end is among them."""
    frames: list[bytes] = []
    at = 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        if not length:
            return frames, True
        if at + 4 + length > len(data):
            break
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return frames, False
