"""`octavo serve` as operators see it: probes from the start, signals, deaths, places to listen."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from octavo import env
from octavo.server.options import ServerOptions
from server_process import TINY_FLAGS, ServerProcess, running_server

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
FLAGS = (*TINY_FLAGS, "--served-model-name=tiny", "--skip-tokenizer-init")


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tiny_folder, *FLAGS, folder=tmp_path) as process:
        yield process


class Streams:
    """Streamed completions, each read in a thread; `texts` and `faults` say how they ended."""

    def __init__(self, url: str, count: int) -> None:
        self.ends: list[str] = []
        self.begun = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._read, args=(url, n)) for n in range(count)]
        for thread in self.threads:
            thread.start()
        for _ in range(count):
            assert self.begun.acquire(timeout=20)

    def _read(self, url: str, number: int) -> None:
        lines: list[str] = []
        body = BODY | {"stream": True, "prompt": [number + 3, 6, 7]}
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as response,
        ):
            for line in response.iter_lines():
                if line and not lines:
                    self.begun.release()
                lines += [line] if line else []
        self.ends.append("\n".join(lines[-3:]))

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(20)
        return self.ends


@pytest.mark.case("OPS-03")
def test_probes_from_the_start_to_a_killed_engine(tiny_folder: Path, tmp_path: Path) -> None:
    with running_server(tiny_folder, *FLAGS, folder=tmp_path, wait=False) as server:
        server.wait_until("/livez")
        assert httpx.get(server.url + "/health").status_code in (503, 200)
        server.wait_until("/health")
        streams = Streams(server.url, 4)
        begin = time.monotonic()
        assert httpx.get(server.url + "/health").status_code == 200 and time.monotonic() - begin < 0.5
        server.child("octavo.engine.process").kill()
        begin = time.monotonic()
        ends = streams.join()
        assert time.monotonic() - begin < 2
        assert all('"error"' in end for end in ends), ends
        assert server.wait() == 1
        last = server.log.splitlines()[-1]
        assert "The engine process was killed by SIGKILL." in last and "dmesg | grep -i oom" in last


@pytest.mark.case("OPS-04")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(server: ServerProcess, number: int) -> None:
    children = server.children()
    streams = Streams(server.url, 4)
    server.terminate(number)
    deadline = time.monotonic() + 3
    while (status := httpx.post(server.url + "/v1/completions", json=BODY, timeout=10).status_code) == 200:
        assert time.monotonic() < deadline
    assert status == 503
    ends = streams.join()
    assert all("[DONE]" in end and '"error"' not in end for end in ends), ends
    assert server.wait() == 0
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.case("OPS-04")
@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_a_signal_during_the_load_leaves_nothing(tiny_folder: Path, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """The engine process is still importing and loading when it comes; nothing of the server stays anywhere."""
    shared_before = set(Path("/dev/shm").iterdir())
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as name,  # a short path, which sockets fit into
        running_server(tiny_folder, *FLAGS, folder=tmp_path, wait=False, environment={"TMPDIR": name}) as server,
    ):
        temporary = Path(name)
        deadline = time.monotonic() + 60
        while len(children := server.children()) < 2:  # the temporary folder is there, and nothing answers yet
            assert time.monotonic() < deadline and server.process.poll() is None
            time.sleep(0.005)
        assert any(temporary.iterdir())
        begin = time.monotonic()
        for number in numbers:
            server.terminate(number)
            time.sleep(0.05)
        assert server.wait() == 0
        assert time.monotonic() - begin < 15
        _, alive = psutil.wait_procs(children, 5)
        assert not alive
        assert not any(temporary.iterdir())
        pids = [str(child.pid) for child in children]
        left = {path.name for path in Path("/dev/shm").iterdir()} - {path.name for path in shared_before}
        assert not [name for name in left if "octavo" in name or any(pid in name for pid in pids)]
        with socket.create_server(("127.0.0.1", server.port)):  # the port is free
            pass
        assert "Traceback" not in server.log, server.log


@pytest.mark.case("OPS-04")
def test_a_request_without_an_end_is_served_until_the_drain_is_over(tiny_folder: Path, tmp_path: Path) -> None:
    """As many lines about it as it takes; then an error event, never an answer that only looks whole."""
    flags = [flag for flag in FLAGS if not flag.startswith("--shutdown-timeout")]
    with running_server(tiny_folder, *flags, "--shutdown-timeout=1", folder=tmp_path) as server:
        body = {"prompt": [[n + 3, 6, 7] for n in range(48)], "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.terminate()
            rest = [line for line in lines if line]
        assert server.wait() == 0
        assert "Draining: 1 requests at work" in server.log or "[DONE]" in rest[-1]
        finished = sum('"finish_reason":"length"' in line for line in rest)
        assert finished == 48 or '"error"' in rest[-2], rest[-2:]
        assert "Shutting down: requests at work have 1 s; a second signal ends them" in server.log


def test_an_idle_connection_is_kept_as_long_as_told(tiny_folder: Path, tmp_path: Path) -> None:
    """A client's next request must not meet a connection that the server closes at that moment."""
    assert ServerOptions().timeout_keep_alive > 60  # what proxies keep theirs for
    with running_server(tiny_folder, *FLAGS, "--timeout-keep-alive=1", folder=tmp_path) as server:
        request = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            for _ in range(2):
                connection.sendall(request)
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            begin = time.monotonic()
            assert connection.recv(65536) == b""
            assert time.monotonic() - begin > 0.5


@pytest.mark.case("OPS-04")
def test_a_second_signal_ends_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    with running_server(tiny_folder, *FLAGS, folder=tmp_path) as server:
        streams = Streams(server.url, 2)
        server.terminate()
        server.terminate(signal.SIGINT)
        begin = time.monotonic()
        server.wait(8)
        assert time.monotonic() - begin < 5
        streams.join()


@pytest.mark.case("OPS-04")
def test_nothing_outlives_a_killed_supervisor(server: ServerProcess) -> None:
    children = server.children()
    assert len(children) == 2
    server.process.kill()
    _, alive = psutil.wait_procs(children, 8)
    assert not alive


@pytest.mark.case("ENV-04")
def test_a_taken_port_is_one_clear_line(server: ServerProcess, tiny_folder: Path) -> None:
    begin = time.monotonic()
    other = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(tiny_folder), "--host=127.0.0.1", f"--port={server.port}"],
        capture_output=True,
        text=True,
        env=env.for_child(sys.path),
        timeout=30,
    )
    assert other.returncode == 1 and time.monotonic() - begin < 10
    assert f"port {server.port} of 127.0.0.1" in other.stderr.splitlines()[-1]


def test_several_api_processes_answer_for_one_engine(tiny_folder: Path, tmp_path: Path) -> None:
    with running_server(tiny_folder, *FLAGS, "--api-server-count=2", folder=tmp_path) as server:
        assert len(server.children()) == 3
        body = BODY | {"max_tokens": 8, "return_token_ids": True}
        answers = {
            httpx.post(server.url + "/v1/completions", json=body).text.split('"token_ids"')[1][:60] for _ in range(8)
        }
        assert len(answers) == 1


def test_a_unix_socket(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running_server(tiny_folder, *FLAGS, f"--uds={path}", folder=tmp_path, wait=False):
        deadline = time.monotonic() + 60
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("http://octavo/health").status_code == 200:
                        break
                assert time.monotonic() < deadline
                time.sleep(0.1)
    assert not path.exists()


def test_api_processes_have_no_torch() -> None:
    code = "import sys, octavo.server.process, octavo.server.serve; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env.for_child(sys.path))
    assert done.stdout.strip() == "set()", done.stderr
