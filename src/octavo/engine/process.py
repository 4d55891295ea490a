"""The engine process: scheduler and device behind a ZMQ socket. `python -m octavo.engine.process FOLDER`.

It reads FOLDER/engine.json, serves on FOLDER/engine.sock, and ends when its standard input does: that is held
open by the supervisor, so an engine never outlives it. Why it ended is in FOLDER/cause.
"""

import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo import log
from octavo.core.admission import Admission
from octavo.engine import protocol, start
from octavo.engine.profile import Profile
from octavo.engine.protocol import EngineInfo, EngineStart
from octavo.engine.spans import loop_spans
from octavo.errors import OctavoError, Overloaded
from octavo.findings.explain import cause
from octavo.hub import ModelFiles
from octavo.observe.metrics import Metrics
from octavo.observe.request_log import RequestLog
from octavo.observe.traces import Traces
from octavo.types import Delta
from octavo.worker import compilations

logger = logging.getLogger("octavo")

BEAT_SECONDS = 0.5
LOOK_SECONDS = 0.1  # between looks at a step that runs; what reads only is answered while a longer one does
READING = ("metrics", "snapshot")  # calls that change nothing
LAST_WORDS_SECONDS = 1.0
STOP_SECONDS = 3.0  # for the step that runs when the supervisor asks for the end


class Server:
    """One engine, and the API processes that it serves.

    One thread does everything after the start, but while a step runs: then another one, `attend`, reads the
    socket, answers what changes nothing, and keeps the rest. `hands` is held by whoever uses the socket.
    """

    def __init__(self, begin: EngineStart, socket: "zmq.Socket[bytes]") -> None:
        self.begin, self.socket = begin, socket
        self.peers: set[bytes] = set()
        self.stopping = threading.Event()
        self.turn_began = 0.0  # of the step that runs, on the monotonic clock; 0 between steps
        self._routes: dict[str, tuple[bytes, int]] = {}  # of live sequences: the API process, and its key for it
        self._ids: dict[tuple[bytes, int], str] = {}
        self._started: set[str] = set()  # sequences whose first delta is out
        self._last_beat = 0.0
        self.hands = threading.Lock()
        self._kept: deque[tuple[bytes, protocol.FromClient]] = deque()  # what arrived while a step ran
        self._shown = 0.0  # `turn_began` of the step whose stacks are in the log
        self.traces: Traces | None = None
        self._tokenizer = protocol.TokenizerFiles()

    def load(self) -> None:
        """Start the engine, and answer API processes with the phase of the start meanwhile."""
        if self.begin.otlp_traces_endpoint:  # first, since it may be refused
            self.traces = Traces(self.begin.otlp_traces_endpoint)
        loading = threading.Event()
        phases: dict[str, float] = {}
        greeter = threading.Thread(target=self._greet, args=(loading, phases), name="greeter", daemon=True)
        greeter.start()
        try:
            self.parts = start.start(self.begin.config, phases, self._found_tokenizer)
        finally:
            loading.set()
            greeter.join()  # the socket is this thread's from here on
        self.loop = start.make_loop(self.begin.config, self.parts)
        self.scheduler = self.loop.scheduler
        if self.loop.constraints is not None:
            self.loop.constraints.grammars.warm()
        self.admission = Admission(self.begin.max_num_queued_reqs, self.begin.max_num_queued_tokens)
        self.profile = Profile(loop_spans(self.loop), self.begin.profile_dir)
        self.info = self._info()
        self.metrics = Metrics(
            self.scheduler,
            model_name=self.info.served_names[0],
            max_model_len=self.info.max_model_len,
            prefixes=self.begin.metrics_prefixes,
            cache_info=self.info.options["cache"] | {"num_gpu_blocks": self.info.num_blocks},
            phases=self.info.phases,
            compilations=lambda: compilations.counts,
            step_seconds=self.step_seconds,
        )
        if self.traces is not None:
            self.traces.model_name = self.info.served_names[0]
            self.traces.startup(self.info.phases)
            self.metrics.on_finished.append(self.traces)
        if self.begin.log_requests:
            self.metrics.on_finished.append(RequestLog().ended)
        self.scheduler.subscribers.append(self.metrics)
        # What is there now stays: the collector need not walk through it again while sequences wait.
        gc.collect()
        gc.freeze()
        self._tell(protocol.Hello(self.info))

    def run(self) -> None:
        """Serve until `stopping`.

        Raises:
            Exception: whatever made the engine unable to go on.
        """
        self.hands.acquire()
        try:
            while not self.stopping.is_set():
                self._receive()
                if self.loop.has_work:
                    self._send_deltas(self._turn())
                self._beat()
        finally:
            if self.loop.recording is not None:
                self.loop.recording.close()

    def step_seconds(self) -> float:
        """How long the step at work has run; 0 between steps."""
        began = self.turn_began
        return time.monotonic() - began if began else 0.0

    def last_words(self, cause: str) -> None:
        """Tell every API process why this is the end."""
        self._tell(protocol.Dead(cause))

    def dump(self) -> str:
        """The scheduler's state in a line, for messages about what does not move."""
        pool = self.scheduler.pool
        return (
            f"{self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting, {len(self.loop.in_flight)} "
            f"steps in flight, {pool.num_free} of {pool.num_usable} blocks free"
        )

    # Messages

    def _turn(self) -> list[Delta]:
        """A step of the loop; `attend` has the socket meanwhile."""
        self.turn_began = time.monotonic()
        self.hands.release()
        try:
            return self.loop.step()
        finally:
            self.hands.acquire()
            self.turn_began = 0.0

    def attend(self) -> None:
        """A look at the step that runs, if one does: answer what only reads, and tell of one that does not end.

        One that takes longer than `stall_timeout` makes the engine stuck until it ends; every thread's stack goes
        to standard error, once.
        """
        if self.step_seconds() < LOOK_SECONDS:
            return
        with self.hands:
            seconds, began = self.step_seconds(), self.turn_began
            if not began:  # it has ended
                return
            for peer, message in self._arrived():
                if isinstance(message, protocol.Http) or (
                    isinstance(message, protocol.Ask) and message.name in READING
                ):
                    self._take(peer, message)
                else:
                    self._kept.append((peer, message))
            stuck = seconds > self.begin.stall_timeout
            self._beat(f"A step has run for {seconds:.0f} seconds: {self.dump()}." if stuck else "")
            if stuck and began != self._shown:
                self._shown = began
                logger.error("A step has run for %.0f seconds: %s.", seconds, self.dump())
                faulthandler.dump_traceback(all_threads=True)

    def _receive(self) -> None:
        """Take in what has arrived; without work, wait for it."""
        while self._kept:
            self._take(*self._kept.popleft())
        if not self.loop.has_work:
            self.socket.poll(int(BEAT_SECONDS * 1000))
        for peer, message in self._arrived():
            self._take(peer, message)

    def _arrived(self) -> Iterator[tuple[bytes, protocol.FromClient]]:
        while True:
            try:
                peer, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield peer, protocol.decode_from_client(frame)
            except (msgspec.MsgspecError, OctavoError) as error:
                logger.error("A message of an API process is dropped: %s", error)

    def _take(self, peer: bytes, message: protocol.FromClient) -> None:
        match message:
            case protocol.Add():
                self._add(peer, message)
            case protocol.Abort(keys=keys, reason=reason):
                for key in keys:
                    if name := self._ids.get((peer, key)):
                        self._forget(name)
                        self.loop.abort(name, reason)
                        self.metrics.dropped([name])
            case protocol.Join():
                self.peers.add(peer)
                self._send(peer, protocol.Hello(self.info))
            case protocol.Ask(number=number, name=name):
                self._send(peer, self._answer(number, name))
            case protocol.Http():
                self.metrics.http(message.rows)
                if message.memory:
                    self.metrics.process_memory(message.process, message.memory)

    def _add(self, peer: bytes, message: protocol.Add) -> None:
        num_prompt_tokens = len(message.prompt) // array(protocol.TOKEN).itemsize
        tells = self.admission.has_limits or message.requests[0].params.structured_outputs is not None
        settled = partial(self._settled, peer, message.keys, tells)
        try:
            self.admission.check(
                self.scheduler, num_prompt_tokens, self.metrics.finished_per_second(), self.loop.num_compiling
            )
            self.metrics.arrived([r.id for r in message.requests], message.arrival, message.traceparent)
            requests = message.whole()
            for key, request in zip(message.keys, requests, strict=True):
                self._routes[request.id] = (peer, key)
                self._ids[peer, key] = request.id
            self.loop.add(requests, settled)
        except OctavoError as error:
            settled(error)

    def _settled(self, peer: bytes, keys: list[int], tells: bool, error: OctavoError | None) -> None:
        """Tell an API process that its request is queued, if it waits for that, or why it is not."""
        if error is None:
            if tells:
                self._send(peer, protocol.Taken(keys[0]))
            return
        for key in keys:
            if name := self._ids.get((peer, key)):
                self._forget(name)
                self.loop.abort(name)
                self.metrics.dropped([name])
        wait = 1
        if isinstance(error, Overloaded):
            wait = error.retry_after_s
            self.metrics.rejected(error.reason)
        param = getattr(error, "param", "")
        self._send(peer, protocol.Refused(keys[0], str(error), error.status, wait, param))

    def _forget(self, name: str) -> None:
        peer, key = self._routes.pop(name)
        del self._ids[peer, key]
        self._started.discard(name)

    def _send_deltas(self, deltas: list[Delta]) -> None:
        """One message for each API process that a step concerns."""
        if not deltas:
            return
        columns: dict[bytes, tuple[array[int], array[int], list[tuple[int, Delta]]]] = {}
        routes, started = self._routes, self._started
        for delta in deltas:
            name = delta.request_id
            route = routes.get(name)
            if route is None:
                continue
            peer, key = route
            if peer not in columns:
                columns[peer] = (array(protocol.TOKEN), array(protocol.TOKEN), [])
            keys, tokens, others = columns[peer]
            if (
                len(delta.token_ids) == 1
                and delta.finish_reason is None
                and name in started
                and not delta.logprobs
                and not delta.prompt_logprobs
            ):
                keys.append(key)
                tokens.append(delta.token_ids[0])
                continue
            others.append((key, dataclasses.replace(delta, request_id="")))
            started.add(name)
            if delta.finish_reason is not None:
                self._forget(name)
        for peer, (keys, tokens, others) in columns.items():
            self._send(peer, protocol.Step(keys.tobytes(), tokens.tobytes(), others))

    def _send(self, peer: bytes, message: protocol.FromEngine) -> None:
        self.socket.send_multipart((peer, protocol.encode(message)), zmq.NOBLOCK)

    def _tell(self, message: protocol.FromEngine) -> None:
        for peer in self.peers:
            self._send(peer, message)

    def _answer(self, number: int, name: str) -> protocol.Reply:
        calls: dict[str, Callable[[], Any]] = {
            "reset_prefix_cache": self.scheduler.pool.reset_cache,
            "start_profile": self.profile.start,
            "stop_profile": self.profile.stop,
            "metrics": self.metrics.render,
            "snapshot": self.metrics.snapshot,
        }
        try:
            return protocol.Reply(number, calls[name]())
        except (OctavoError, KeyError) as error:
            return protocol.Reply(number, error=str(error))

    # State

    def _beat(self, stuck: str = "") -> None:
        now = time.monotonic()
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self._tell(protocol.Beat(stuck))
            if self.begin.log_stats and (line := self.metrics.log_line()):
                logger.info(line)

    def _info(self) -> EngineInfo:
        parts, begin = self.parts, self.begin
        model = begin.config.model.model or parts.files.folder.name
        return EngineInfo(
            model=model,
            served_names=begin.served_names or (model,),
            vocab_size=parts.spec.vocab_size,
            max_model_len=parts.cache_size.max_model_len,
            block_size=parts.cache_size.block_size,
            num_blocks=parts.cache_size.num_blocks,
            max_num_seqs=parts.limits.max_num_seqs,
            max_num_batched_tokens=parts.limits.max_num_batched_tokens,
            prefix_caching=begin.config.cache.enable_prefix_caching,
            max_logprobs=begin.config.model.max_logprobs,
            seed=begin.config.model.seed,
            eos_token_ids=sorted(parts.eos_token_ids),
            default_params=parts.default_params,
            options=dataclasses.asdict(begin.config),
            phases=parts.phases,
            tokenizer=self._tokenizer,
            has_limits=self.admission.has_limits,
        )

    def _found_tokenizer(self, files: ModelFiles) -> None:
        self._tokenizer = protocol.TokenizerFiles(str(files.folder), str(files.gguf or ""))

    def _greet(self, loading: threading.Event, phases: dict[str, float]) -> None:
        """While the engine starts: note who joins, and say which phases are over."""
        told = protocol.Starting("")
        while not loading.is_set():
            joined = False
            if self.socket.poll(100):
                peer, _ = self.socket.recv_multipart()
                self.peers.add(peer)
                joined = True
            news = protocol.Starting(f"done so far: {', '.join(phases) or 'nothing'}", self._tokenizer)
            if joined or news != told:
                told = news
                self._tell(news)


def attend(server: Server) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        server.attend()


def watch_parent(server: Server) -> None:
    """End when standard input does: in good order where the loop still turns, else at once."""
    while os.read(0, 1):
        pass
    server.stopping.set()
    time.sleep(STOP_SECONDS)
    os._exit(1)


def main() -> None:
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor decides what they mean
        signal.signal(number, signal.SIG_IGN)
    begin = msgspec.json.decode((folder / protocol.ENGINE_FILE).read_bytes(), type=EngineStart)
    log.set_up(begin.log_format, "engine")
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.LINGER, int(LAST_WORDS_SECONDS * 1000))
    socket.bind(f"ipc://{folder / protocol.ENGINE_SOCKET}")
    server = Server(begin, socket)
    threading.Thread(target=watch_parent, args=(server,), name="parent", daemon=True).start()
    status = 0
    try:
        server.load()
        threading.Thread(target=attend, args=(server,), name="attendant", daemon=True).start()
        server.run()
    except BaseException as error:
        status = 1
        why = cause(error)
        if not isinstance(error, OctavoError):
            logger.exception("The engine stopped.")
        (folder / protocol.CAUSE_FILE).write_text(why)
        server.last_words(f"The engine stopped: {why}")
    if server.traces is not None:  # a collector that is away must not hold the end up
        last = threading.Thread(target=server.traces.close, daemon=True)
        last.start()
        last.join(LAST_WORDS_SECONDS)
    socket.close()
    context.term()
    os._exit(status)  # threads of the device's libraries need not be waited for


if __name__ == "__main__":
    main()
