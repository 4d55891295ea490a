"""Errors of a start end with their cause and mend; secrets do not survive in what is shown to others."""

import errno
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Make
from octavo import env
from octavo.config import EngineConfig
from octavo.engine import start as start_engine
from octavo.errors import InvalidConfig
from octavo.findings.explain import TEXTS, cause, explain
from octavo.findings.redact import Redactor, is_secret
from octavo.findings.software import endpoint_is_no_url, proxy_is_no_url
from octavo.worker import start as worker


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


FOREIGN: list[tuple[BaseException, str, str]] = [
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "of the GPU is used up", "octavo plan"),
    (RuntimeError("CUDA error: out of memory"), "of the GPU is used up", "octavo plan"),
    (
        RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update"),
        "too old for this PyTorch: it has CUDA 12.2",
        "pip install torch",
    ),
    (RuntimeError("CUDA driver version is insufficient for CUDA runtime version"), "too old", "Update the driver"),
    (RuntimeError("Found no NVIDIA driver on your system. Please check"), "No NVIDIA driver", "nvidia-smi"),
    (AssertionError("Torch not compiled with CUDA enabled"), "for CPUs only", "pip install"),
    (RuntimeError("CUDA error: no kernel image is available for execution"), "no kernels for this GPU", "pip install"),
    (RuntimeError("NCCL error in: x.cpp:12, unhandled system error"), "cannot talk", "NCCL_DEBUG=INFO"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] can't allocate memory"), "memory is", "Lower"),
    (MemoryError(), "The machine's memory is used up", "--kv-cache-memory-bytes"),
    (RuntimeError("unable to open shared memory object </torch_1> in read-write mode"), "/dev/shm", "--shm-size"),
    (OSError(errno.EMFILE, "Too many open files"), "limit of open files is used up", "ulimit -n 4096"),
    (OSError(errno.ENOSPC, "No space left on device", "/c/x"), "no space left in /c/x", "OCTAVO_CACHE_ROOT"),
    (PermissionError(errno.EACCES, "Permission denied", "/c/x"), "/c/x cannot be read or written", "OCTAVO_CACHE_ROOT"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "No further thread", "ulimit -u"),
    (RuntimeError("can't start new thread"), "No further thread", "ulimit -u"),
    (ImportError("libcudart.so.13: cannot open shared object file"), "PyTorch cannot", "--force-reinstall"),
    (ModuleNotFoundError("No module named 'triton'", name="triton"), "Triton cannot be imported", "install triton"),
    (ModuleNotFoundError("No module named 'zmq'", name="zmq"), "package pyzmq is missing", "pip install pyzmq"),
    (ValueError("numpy.dtype size changed, may indicate binary incompatibility"), "NumPy", "pip install"),
    (ImportError("Error importing numpy: you should not try to import numpy from"), "NumPy cannot", "pip install"),
    (ImportError("libfoo.so.3: cannot open shared object file"), "cannot be loaded: libfoo.so.3", "pip install"),
    (RuntimeError("Failed to find C compiler. Please specify via CC"), "no C compiler", "apt-get install gcc"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "mends"), FOREIGN, ids=lambda value: str(value)[:30])
def test_what_libraries_raise_is_told_with_its_mend(error: BaseException, says: str, mends: str) -> None:
    line = cause(error)
    assert says in line and mends in line
    assert "\n" not in line
    wrapped = ImportError("Cannot import module 'octavo.x'")
    wrapped.__cause__ = error
    assert cause(wrapped) == line


def test_every_pattern_is_met_by_an_example() -> None:
    met = {
        index
        for index, (pattern, _) in enumerate(TEXTS)
        for error, _, _ in [*FOREIGN, *((RuntimeError(text), "", "") for text in OTHERS)]
        if re.search(pattern, str(error))
    }
    assert met == set(range(len(TEXTS)))


OTHERS = (
    "No CUDA GPUs are available", "fatal error: Python.h: No such file or directory", "Too many open files",
    "No space left on device", "certificate verify failed: certificate is not yet valid",
)  # fmt: skip


def test_ours_stay_as_they_are_and_the_unforeseen_names_the_doctor() -> None:
    ours = InvalidConfig("Cause.", "Mend.")
    assert explain(ours) is None and cause(ours) == "Cause. Mend."
    line = cause(ZeroDivisionError("division by zero"))
    assert line.startswith("ZeroDivisionError: division by zero.")
    assert "octavo doctor --bundle" in line


# Real starts

NO_CUDART = "libcudart.so.13: cannot open shared object file: No such file or directory"


def start(*args: str, preface: str = "", **environment: str) -> str:
    """The last line that a failing start shows."""
    command = [sys.executable, "-m", "octavo", *args]
    if preface:
        command = ["bash", "-c", f'{preface}; exec "$@"', "bash", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=env.for_child(sys.path) | environment, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def serve(folder: Path, data: Path, *args: str, **options: Any) -> str:
    where = ("--host=127.0.0.1", "--port=0", f"--data-dir={data}", "--num-threads=1", "--max-model-len=128")
    return start("serve", str(folder), *where, *(args or ("--skip-tokenizer-init",)), **options)


def broken_torch(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({NO_CUDART!r})")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def test_a_server_without_pytorch_ends_with_the_cause(tiny_folder: Path, tmp_path: Path) -> None:
    line = serve(tiny_folder, tmp_path, **broken_torch(tmp_path))
    assert line == f"octavo: PyTorch cannot be imported: {NO_CUDART}. Run: pip install --force-reinstall torch"


def test_a_command_without_pytorch_ends_with_the_cause(tiny_folder: Path, tmp_path: Path) -> None:
    line = start("generate", "x", "--model", str(tiny_folder), **broken_torch(tmp_path))
    assert line.startswith("octavo: PyTorch cannot be imported: libcudart.so.13")


def test_too_few_open_files(tiny_folder: Path, tmp_path: Path) -> None:
    line = serve(tiny_folder, tmp_path, preface="ulimit -n 14")
    assert line == "octavo: The limit of open files is used up. Run: ulimit -n 4096 (in a service: LimitNOFILE=4096)."


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("--ssl-certfile=/nope.pem", "--skip-tokenizer-init"),
            "ssl_certfile=/nope.pem cannot be used: No such",
        ),
        (("--tokenizer=/nope",), "there is nothing at /nope. Check its spelling"),
        (("--load-format=auto",), "There is no tokenizer.json in"),
    ],
)
def test_the_last_line_of_a_server_is_the_cause(
    tiny_folder: Path, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    assert says in serve(tiny_folder, tmp_path, *args)


def test_an_engine_in_this_process_tells_the_cause_too(make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(start_engine, "start_runner", full)
    with pytest.raises(InvalidConfig, match="The memory of the GPU is used up .* `octavo plan MODEL`") as caught:
        make_llm()
    assert isinstance(caught.value.__cause__, OutOfMemoryError)
    monkeypatch.setattr(start_engine, "start_runner", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_llm()


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_a_gpu_that_is_not_used_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = EngineConfig.from_keywords("test")
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    worker.choose_device(config)
    assert not caplog.records
    monkeypatch.setattr(worker, "NVIDIA_DEVICE", tmp_path)
    assert worker.choose_device(config).type == "cpu"
    assert "The GPU of this machine is not used" in caplog.text and "is for CPUs only" in caplog.text
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", too_old)
    with pytest.raises(InvalidConfig, match="driver is too old for this PyTorch: it has CUDA 12.2. Update the driver"):
        worker.choose_device(EngineConfig.from_keywords("test", device="cuda"))


def too_old() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tiny_folder: Path, tmp_path: Path) -> None:
    line = serve(tiny_folder, tmp_path, "--device=cuda", "--skip-tokenizer-init")
    assert "torch finds no NVIDIA GPU" in line and "`octavo doctor`" in line


# Secrets

HOSTILE = {
    "Authorization: Bearer abc.def": "abc.def",
    "curl -H 'authorization: bearer sk-0123456789' http://x": "sk-0123456789",
    '{"headers": {"X-Api-Key": "k-12345"}}': "k-12345",
    "proxy-authorization = Basic dXNlcjpwdw==": "dXNlcjpwdw",
    "https://user:p%40ss@host/x": "p%40ss",
    "https://token-only@host/x": "token-only",
    "HF_ENDPOINT=user:pw123@mirror": "pw123",
    "GET /v1/models?api_key=abc&x=1": "abc",
    "https://b.example/x?X-Amz-Credential=AK&X-Amz-Signature=f00d": "f00d",
    "octavo serve m --api-key foo1 --port 80": "foo1",
    "octavo serve m --api-key=foo1 --port 80": "foo1",
    "octavo serve m --admin-api-key 'fo o1'": "fo o1",
    "ServerOptions(api_key=('k1-x', 'k2-x'), port=80)": "k2-x",
    "api_key: [one1, two2]": "two2",
    "api_key:\n  - one1\n  - two2\nport: 80": "two2",
    "password=hunter2": "hunter2",
    'DB_PASSWD: "quoted value"': "quoted value",
    "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI": "wJalrXUtnFEMI",
    "a stray hf_abcdefghij in a line": "hf_abcdefghij",
    "ghp_0123456789abcdef": "ghp_0123456789abcdef",
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln": "eyJzdWIiOiIxIn0",
    "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----": "MIIE",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE cut off": "MIIE",
    "MIIE cut at the front\n-----END PRIVATE KEY-----\nthe next line": "MIIE",
    "the client said: my-own-secret!": "my-own-secret!",
    "Cookie: session=123abc; theme=dark": "123abc",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_secret_is_removed(text: str) -> None:
    redact = Redactor([("SOME_TOKEN", "my-own-secret!")])
    assert HOSTILE[text] not in redact(text)
    assert HOSTILE[text] not in str(redact.tree({"lines": [text]}))


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=4096, --max-tokens 5, num_tokens: 7", "prompt_token_ids: [1, 2]", "tokenizer: smollm2",
        "eos_token: </s>", "the token was refused", "20 tokens/s, 4 keys", "https://host:8000/v1?stream=true",
        "port 8000 of 127.0.0.1", "user@host said: yes", "KV cache size: 39,040 tokens (0.84 GiB, 2,440 blocks of 16)",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor()(text) == text


def test_a_password_in_a_setting_does_not_reach_the_log() -> None:
    assert endpoint_is_no_url("user:pw99@mirror").line == (
        "HF_ENDPOINT=<removed>@mirror is not a URL. Set it to https://<removed>@mirror or unset it."
    )
    assert "pw99" not in proxy_is_no_url("HTTP_PROXY", "user:pw99@proxy:1").line


def test_what_only_looks_like_a_known_fault_is_none() -> None:
    assert explain(FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/shm/model/x")) is None
    assert explain(BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0)) is None


def test_names_of_secrets() -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MYSQL_PWD", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "api_key"):
        assert is_secret(name), name
    for name in ("TOKENIZERS_PARALLELISM", "max_tokens", "num_gpu_blocks", "PATH", "ssl_keyfile", "prompt_token_ids"):
        assert not is_secret(name), name
    words = Redactor([("PWD", "/some/place"), ("DESKTOP_SESSION", "ubuntu"), ("KEYRING_FOLDER", str(Path(__file__)))])
    assert words(f"ubuntu /some/place {Path(__file__).name}") == f"ubuntu /some/place {Path(__file__).name}"
    assert not is_secret("PWD") and is_secret("pwd")
    home = str(Path("~").expanduser())
    assert Redactor()(f"{home}/x") == ("~/x" if len(home) > 1 else f"{home}/x")
