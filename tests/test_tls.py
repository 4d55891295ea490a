"""HTTPS with a certificate made by the test; files that cannot be used are one clear line before anything loads."""

import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from octavo import env
from server_process import TINY_FLAGS, running_server

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
SUBJECT = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]


def make_certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """Certificate and key of its own for 127.0.0.1."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    subprocess.run(
        [*command, *SUBJECT, *(options or ["-nodes"]), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


@needs_openssl
def test_https_with_a_certificate_of_one_s_own(tiny_folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "good")
    flags = (f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", "--skip-tokenizer-init")
    with running_server(tiny_folder, *TINY_FLAGS, *flags, folder=tmp_path, wait=False) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        url = server.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=context, timeout=20) as client:
            deadline = time.monotonic() + 90
            while True:
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert time.monotonic() < deadline and server.process.poll() is None, server.log
                time.sleep(0.1)
            body = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200 and list(answer.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
            httpx.get(url + "/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url + "/health")
        assert f"is ready at {url}" in server.log


@needs_openssl
@pytest.mark.parametrize("fault", ["none", "no file", "garbage", "another's key", "password", "key alone", "folder"])
def test_files_that_cannot_be_used_are_one_line(tmp_path: Path, fault: str) -> None:
    certificate, key = make_certificate(tmp_path, "good")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nonsense")
    given = {
        "none": (certificate, key),
        "no file": (tmp_path / "missing.crt", key),
        "garbage": (garbage, key),
        "another's key": (certificate, make_certificate(tmp_path, "other")[1]),
        "password": make_certificate(tmp_path, "locked", "-passout", "pass:secret"),
        "key alone": (None, key),
        "folder": (tmp_path, key),
    }[fault]
    flags = [f"--ssl-{name}file={path}" for name, path in zip(("cert", "key"), given, strict=True) if path]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(tmp_path / "no-model"), "--host=127.0.0.1", "--port=0", *flags],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=env.for_child(sys.path),
        timeout=60,
    )
    assert done.returncode == 1
    if fault == "none":  # a good one: the model is the next that is at fault
        assert "ssl_" not in done.stderr and "no-model" in done.stderr
        return
    (line,) = done.stderr.splitlines()
    assert "ssl_certfile" in line or "ssl_keyfile" in line, line
    assert "Traceback" not in line and ("Give " in line)
