"""Runs the lines of batches through the server's own request path, behind whoever waits for an answer now."""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, MutableMapping
from typing import Any

import msgspec

from octavo import batch_lines
from octavo.batch_lines import BadLine, Line
from octavo.errors import shown
from octavo.server.batch_store import Row, Store

logger = logging.getLogger("octavo")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Application = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

PRIORITY = 1_000_000
"""Added to a line's own priority: later than every interactive request."""
ACTIVE_BATCHES = 16
PLACES = 256  # of an engine whose options leave max_num_seqs to it
LOOK_SECONDS = 0.25  # how often the runner looks for new batches, cancellations and the engine's load
MAX_ERRORS = 100  # of one input file that are reported
EXPIRED = "This request could not be executed before the completion window expired."
CANCELLED = "This request was not executed because the batch was cancelled."


async def call(
    application: Application, path: str, body: bytes, tenant: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[int, dict[str, str], bytes]:
    """POST to the application in this process, as a caller whose tenant is known: status, headers, body."""
    status, answer, found = 500, bytearray(), {}
    sent = False
    never = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await never.wait()  # this caller does not go away; cancelling the call ends it
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, found
        if message["type"] == "http.response.start":
            status = message["status"]
            found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            answer.extend(message.get("body", b""))

    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("batch", 0),
        "client": ("batch", 0), "octavo.tenant": tenant,
        "headers": [
            (b"host", b"batch"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
            *headers,
        ],
    }  # fmt: skip
    await application(scope, receive, send)
    return status, found, bytes(answer)


class Room:
    """How many lines may be in flight now.

    Lines take three quarters of the engine's places while nobody else is there, an eighth beside others, and
    none more while others wait: an interactive request finds a place at once, and no idle engine is left idle.
    """

    def __init__(self, engine: Any, limit: int | None = None) -> None:
        self.engine, self.limit = engine, limit
        self.in_flight = 0
        self._allowed = 0
        self._changed = asyncio.Event()

    async def watch(self) -> None:
        """Follow the engine's load for ever."""
        while True:
            places = int(self.engine.info.options["scheduler"]["max_num_seqs"] or PLACES)
            load = await self.engine.snapshot()
            others = int(load.get("running", 0)) + int(load.get("waiting", 0)) - self.in_flight
            allowed = max(1, places // 8) if others > 0 else max(1, places * 3 // 4)
            if int(load.get("waiting", 0)) > 0 and others > 0:
                allowed = 1  # never none at all: a batch under a load without end still comes to its end
            self._allowed = allowed if self.limit is None else min(allowed, self.limit)
            self._changed.set()
            await asyncio.sleep(LOOK_SECONDS)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        while self.in_flight >= self._allowed:
            self._changed.clear()
            await self._changed.wait()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._changed.set()


class Runner:
    """The one process's part of the batches of the served model; `run` until cancelled."""

    def __init__(self, application: Application, store: Store, engine: Any, limit: int | None = None) -> None:
        self.application, self.store, self.engine = application, store, engine
        self.room = Room(engine, limit)
        self._active: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        while self.engine.state != "ready":
            await asyncio.sleep(LOOK_SECONDS)
        served = self.engine.info.served_names[0]
        while (lock := await asyncio.to_thread(self.store.own, served)) is None:
            await asyncio.sleep(1)  # the owner may end, and somebody must go on
        try:
            await asyncio.to_thread(self.store.sweep)
            await self._run_batches(served)
        finally:
            os.close(lock)

    async def _run_batches(self, served: str) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_load())
            while True:
                if self.engine.state != "ready":
                    # It is ending: lines in flight are let go at once, and the next start answers them.
                    for task in self._active.values():
                        task.cancel()
                else:
                    for batch in await asyncio.to_thread(self.store.unfinished, served, ACTIVE_BATCHES):
                        if batch["id"] not in self._active:
                            self._active[batch["id"]] = group.create_task(self._batch(batch))
                await asyncio.sleep(LOOK_SECONDS)

    async def _watch_load(self) -> None:
        while True:
            try:
                await self.room.watch()
            except Exception as error:  # a dead engine ends the process by other means
                logger.debug("The engine's load is not known: %s", error)
                await asyncio.sleep(1)

    async def _batch(self, batch: Row) -> None:
        """One batch to its end; a fault in it must not end the others."""
        try:
            await self._advance(batch)
        except Exception:
            logger.exception("Batch %s stopped; it is tried again", batch["id"])
            await asyncio.sleep(5)
        finally:
            del self._active[batch["id"]]

    async def _advance(self, batch: Row) -> None:
        if batch["status"] == "validating":
            await self._validate(batch)
        elif batch["status"] == "in_progress":
            await self._answer_lines(batch)
        elif batch["status"] == "finalizing":
            await asyncio.to_thread(self.store.finish, batch, "completed")
        else:  # cancelling, before any line was begun or after a restart
            await self._give_up(batch, "cancelled", "batch_cancelled", CANCELLED)

    async def _validate(self, batch: Row) -> None:
        total, model, errors = await asyncio.to_thread(self._read_through, batch)
        if errors:
            data = msgspec.json.encode({"object": "list", "data": errors}).decode()
            await asyncio.to_thread(self.store.move, batch["id"], "failed", ("validating",), errors=data)
        else:
            columns = {"total": total, "model": model}
            await asyncio.to_thread(self.store.move, batch["id"], "in_progress", ("validating",), **columns)

    def _read_through(self, batch: Row) -> tuple[int, str, list[dict[str, Any]]]:
        """The number of lines, the model they name, and what is wrong with them."""
        seen: dict[str, int] = {}
        errors: list[BadLine] = []
        names = tuple(self.engine.info.served_names)
        model, total = "", 0
        try:
            for number, raw in self._raw_lines(batch):
                total += 1
                try:
                    line = batch_lines.parse(number, raw, batch["endpoint"])
                    name = line.body.get("model")
                    first = seen.setdefault(line.custom_id, number)
                    if first != number:
                        message = f"Line {number}: custom_id is the same as in line {first}."
                        raise BadLine(number, "duplicate_custom_id", message, "custom_id")
                    if name is not None and name not in names:
                        message = f"Line {number}: the model {shown(name)} does not exist."
                        raise BadLine(number, "model_not_found", message, "body.model")
                    model = model or name or names[0]
                except BadLine as error:
                    errors.append(error)
                    if len(errors) >= MAX_ERRORS:
                        break
        except FileNotFoundError:
            errors.append(BadLine(0, "file_not_found", f"The file {batch['input_file_id']} is gone.", "input_file_id"))
        else:
            if not total:
                errors.append(BadLine(0, "empty_file", "The input file has no lines.", "input_file_id"))
        return total, model, [error.described() | {"line": error.line or None} for error in errors]

    def _raw_lines(self, batch: Row) -> Generator[tuple[int, bytes]]:
        with open(self.store.path(batch["input_file_id"]), "rb") as file:
            yield from batch_lines.raw_lines(file)

    async def _answer_lines(self, batch: Row) -> None:
        done = await asyncio.to_thread(self.store.answered, batch["id"])
        lines = self._raw_lines(batch)
        tasks: set[asyncio.Task[None]] = set()
        end = asyncio.create_task(self._watch_end(batch))
        try:
            while not end.done() and (item := await asyncio.to_thread(next, lines, None)) is not None:
                number, raw = item
                if number in done:
                    continue
                place = self.room.place()
                entered = asyncio.create_task(place.__aenter__())
                await asyncio.wait({entered, end}, return_when=asyncio.FIRST_COMPLETED)
                if not entered.done():
                    entered.cancel()
                    await asyncio.wait({entered})
                    if entered.cancelled():
                        break
                line = batch_lines.parse(number, raw, batch["endpoint"])
                task = asyncio.create_task(self._answer_line(batch, line, place))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks and not end.done():
                await asyncio.wait({*tasks, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait({*tasks})
            ending = end.result() if end.done() and not end.cancelled() else ""
            end.cancel()
            with contextlib.suppress(ValueError):  # a thread is reading the next one
                lines.close()
        if ending == "cancelled":
            await self._give_up(batch, "cancelled", "batch_cancelled", CANCELLED)
        elif ending == "expired":
            await self._give_up(batch, "expired", "batch_expired", EXPIRED)
        elif await asyncio.to_thread(self.store.move, batch["id"], "finalizing", ("in_progress",)):
            await asyncio.to_thread(self.store.finish, batch, "completed")

    async def _watch_end(self, batch: Row) -> str:
        """Returns when the batch must stop before its last line."""
        while True:
            if self.store.clock() >= batch["expires_at"]:
                return "expired"
            if (await asyncio.to_thread(self.store.batch, batch["id"]))["status"] == "cancelling":
                return "cancelled"
            await asyncio.sleep(LOOK_SECONDS)

    async def _answer_line(self, batch: Row, line: Line, place: contextlib.AbstractAsyncContextManager[None]) -> None:
        try:
            while (record := await self._try_line(batch, line)) is None:
                await asyncio.sleep(LOOK_SECONDS)
            saving = asyncio.ensure_future(
                asyncio.to_thread(self.store.record, batch["id"], line.number, record, _usage(record))
            )
            try:
                await asyncio.shield(saving)
            except asyncio.CancelledError:
                await saving  # what was answered is kept, and nothing is kept after the batch's end
                raise
        finally:
            await place.__aexit__(None, None, None)

    async def _try_line(self, batch: Row, line: Line) -> Row | None:
        """The record of a line, or None when it must be asked again: nobody answered, or nobody could."""
        own = line.body.get("priority")
        # A priority that is no integer is left for the endpoint to refuse.
        priority = PRIORITY + max(0, own or 0) if own is None or type(own) is int else own
        body = msgspec.json.encode({**line.body, "priority": priority})
        request_id = f"batch-{uuid.uuid4().hex}"
        header = ((b"x-request-id", request_id.encode()),)
        status, headers, answer = await call(self.application, line.url, body, batch["tenant"], header)
        if status in (429, 503):
            with contextlib.suppress(ValueError):
                await asyncio.sleep(min(5.0, float(headers.get("retry-after", "0"))))
            return None
        try:
            content: Any = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            content = answer.decode(errors="replace")
        if self.engine.state != "ready" and (status >= 500 or _was_cut(content)):
            return None  # the server is ending: the next one answers this line
        return batch_lines.answer(line.custom_id, status, headers.get("x-request-id", request_id), content)

    async def _give_up(self, batch: Row, status: str, code: str, message: str) -> None:
        """End a batch whose remaining lines get an error each."""
        done = await asyncio.to_thread(self.store.answered, batch["id"])

        def record_rest() -> None:
            if batch["total"]:  # otherwise cancelled before its lines were looked at
                for number, raw in self._raw_lines(batch):
                    if number not in done:
                        line = batch_lines.parse(number, raw, batch["endpoint"])
                        self.store.record(batch["id"], number, batch_lines.failure(line.custom_id, code, message))
            self.store.finish(batch, status)

        await asyncio.to_thread(record_rest)


def _usage(record: Row) -> tuple[int, int]:
    body = (record["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)


def _was_cut(content: Any) -> bool:
    choices = content.get("choices") if isinstance(content, dict) else None
    return any(choice.get("finish_reason") in ("abort", "error") for choice in choices or ())
