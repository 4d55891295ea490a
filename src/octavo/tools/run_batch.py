"""`octavo run-batch`: a file of requests in, a file of answers out; begun again it goes on where it was."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from cyclopts import Parameter
from tqdm import tqdm

from octavo import batch_lines, env
from octavo.batch_lines import BadLine, Line
from octavo.config import EngineConfig, options
from octavo.errors import EngineDead, InvalidConfig, OctavoError
from octavo.flags import ENGINE, with_options
from octavo.tools.server_client import NoAnswer, Server

ATTEMPTS = 5  # of a line whose connection fails
LOADING_SECONDS = 3600


@with_options(config=ENGINE)
def run_batch(
    *,
    input_file: Annotated[Path, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[Path, Parameter(name=["--output-file", "-o"])],
    url: str | None = None,
    api_key: str | None = None,
    max_concurrency: int = 256,
    quiet: bool = False,
    config: EngineConfig,
) -> None:
    """Answer every line of a JSONL file in OpenAI's batch form.

    The answers are written as they come, each with its custom_id. Begun again with the same files, only lines
    without an answer are asked. A line that is no request becomes an error line.

    Parameters
    ----------
    input_file
        Lines {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {...}}.
    output_file
        Gets lines {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}.
    url
        A running server that answers; without it an engine is started here and ended afterwards.
    api_key
        The server's key; OCTAVO_API_KEY or OPENAI_API_KEY when not given.
    max_concurrency
        Most requests at work at once.
    quiet
        Show no progress.
    """
    if not 1 <= max_concurrency <= 4096:
        raise InvalidConfig(f"max_concurrency={max_concurrency} is not allowed: it must be 1 to 4096.")
    for path in (input_file, output_file):
        if "://" in str(path) or str(path).startswith(("http:/", "https:/")):
            raise InvalidConfig(f"{path} is no file here.", "Download it first: no address is followed.")
    total = _count_lines(input_file)
    with _output(output_file) as file:
        done = _answered(output_file)
        left = total - sum(1 for _ in _lines(input_file, done, skipped=True))
        if not left:
            print(f"All {total} lines are answered in {output_file}.", file=sys.stderr)
            return
        with contextlib.ExitStack() as stack:
            server = Server(url, api_key) if url else stack.enter_context(_own_server(config))
            if url:
                server.model()  # a wrong address or key is told before anything else
            bar = stack.enter_context(
                tqdm(total=total, initial=total - left, unit="line", dynamic_ncols=True, disable=quiet or None)
            )
            failed = _answer_all(server, _lines(input_file, done), file, max_concurrency, bar)
    print(f"{total} lines, {failed} of the {left} asked now failed; answers in {output_file}.", file=sys.stderr)


def _count_lines(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return sum(1 for _ in batch_lines.raw_lines(file))
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}.") from None


@contextlib.contextmanager
def _output(path: Path) -> Iterator[BinaryIO]:
    """The output, opened to add to it; half a line, left by a kill, is cut off."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror}.") from None
    with file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - (1 << 16))
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                end = begin + place + 1
                break
            end = begin
        file.truncate(end)
        yield file


def _answered(path: Path) -> set[str | int]:
    """The custom ids of the answered lines, and the numbers of those that had none."""
    done: set[str | int] = set()
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                done.add(record["custom_id"] or int(record["error"]["line"]))
            except (ValueError, LookupError, TypeError):
                raise InvalidConfig(
                    f"{path} has a line that is no answer of a batch.", "Give another output file, or remove this one."
                ) from None
    return done


def _lines(path: Path, done: set[str | int], skipped: bool = False) -> Iterator[Line | BadLine]:
    """The lines without an answer, or with `skipped` those that have one."""
    seen: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, raw in batch_lines.raw_lines(file):
            line: Line | BadLine
            try:
                line = batch_lines.parse(number, raw)
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    message = f"Line {number}: custom_id is the same as in line {first}."
                    line = BadLine(number, "duplicate_custom_id", message, "custom_id")
            except BadLine as error:
                line = error
                if error.custom_id and seen.setdefault(error.custom_id, number) != number:
                    line = BadLine(number, error.code, error.message, error.param)
            if ((line.custom_id or number) in done) == skipped:
                yield line


def _answer_all(
    server: Server, lines: Iterator[Line | BadLine], file: BinaryIO, concurrency: int, bar: "tqdm[Any]"
) -> int:
    """Ask for all lines, some at a time; returns how many failed.

    Raises:
        NoAnswer: the server is gone; the lines without an answer stay so.
    """
    asked: queue.Queue[Line | None] = queue.Queue(concurrency)
    writing = threading.Lock()
    faults: list[Exception] = []
    failed = 0

    def write(record: dict[str, Any], good: bool) -> None:
        nonlocal failed
        with writing:
            file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            file.flush()
            failed += not good
            bar.update(1)

    def work() -> None:
        while (line := asked.get()) is not None:
            if faults:
                continue  # only to empty the queue
            try:
                status, headers, body = _ask(server, line)
                name = headers.get("x-request-id", "")
                write(batch_lines.answer(line.custom_id, status, name, body), status == 200)
            except Exception as error:
                faults.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    started = 0
    try:
        for line in lines:
            if faults:
                break
            if isinstance(line, BadLine):
                record = batch_lines.failure(line.custom_id, line.code, line.message)
                record["error"] |= {"param": line.param or None, "line": line.line}
                record["custom_id"] = line.custom_id or None
                write(record, False)
                continue
            if started < concurrency:
                threads[started].start()
                started += 1
            asked.put(line)
    finally:
        for _ in range(started):
            asked.put(None)
        for thread in threads[:started]:
            thread.join()
    if faults:
        raise faults[0]
    return failed


def _ask(server: Server, line: Line) -> tuple[int, dict[str, str], Any]:
    """An answer, good or bad; a full server is asked again until it has room."""
    attempt = 0
    while True:
        try:
            status, headers, body = server.call("POST", line.url, line.body)
        except NoAnswer:
            attempt += 1
            if attempt == ATTEMPTS:
                raise
            time.sleep(2.0**attempt / 10)
            continue
        if status not in (429, 503):
            return status, headers, body
        if "retry-after" not in headers:  # it is not full: it is ending, or dead
            raise NoAnswer(f"{server.url} answers no more: {json.dumps(body)[:300]}")
        wait = headers["retry-after"]
        time.sleep(min(30.0, float(wait)) if wait.isdigit() else 1.0)


@contextlib.contextmanager
def _own_server(config: EngineConfig) -> Iterator[Server]:
    """A server of our own at a private socket, so that answers are those of `octavo serve` to the letter."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        place, settings = Path(folder) / "http", Path(folder) / "options.yaml"
        values = {}
        for option in options():
            value = getattr(getattr(config, option.group), option.name)
            if value != option.default:
                values[option.name] = value
        settings.write_text(json.dumps(values))
        command = [sys.executable, "-P", "-m", "octavo", "serve", "--config", str(settings), "--uds", str(place)]
        command += ["--shutdown-timeout", "0", "--data-dir", folder]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env.for_child(sys.path))
        server = Server(f"unix:{place}")
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_until_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + LOADING_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineDead("The engine did not start.", "Its last message above says why.")
        with contextlib.suppress(OctavoError):
            if server.call("GET", "/health")[0] == 200:
                return
        time.sleep(0.1)
    raise EngineDead(f"The engine was not ready after {LOADING_SECONDS} s.")
