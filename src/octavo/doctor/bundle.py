"""One archive to attach to an issue: findings, versions, environment, options, the server's log; without secrets."""

import importlib.metadata
import io
import json
import zipfile
from collections import deque
from pathlib import Path

from rich.console import Console

from octavo.doctor.checks import Result
from octavo.doctor.facts import Facts
from octavo.doctor.report import as_json, show
from octavo.errors import InvalidConfig
from octavo.findings.redact import Redactor

LOG_LINES, LINE_CHARACTERS = 2000, 2000
OF_INTEREST = (
    "OCTAVO_", "HF_", "HUGGING", "TRANSFORMERS_", "CUDA", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "OMP_",
    "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "RAYON_", "TOKENIZERS_", "PYTHON", "VIRTUAL_ENV", "CONDA_", "LD_", "LANG",
    "LC_", "XDG_CACHE", "TMPDIR", "SLURM_", "KUBERNETES_", "OTEL_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
    "NO_PROXY", "SSL_CERT", "REQUESTS_CA", "OPENAI_", "PATH",
)  # fmt: skip
"""How the names of variables begin that are worth telling, in any case of letters."""


def write(
    path: Path, facts: Facts, results: list[Result], redact: Redactor, log: Path | None, options: Path | None
) -> list[str]:
    """Write the archive; returns the names of the files in it.

    Raises:
        InvalidConfig: the archive cannot be written, or the log or options cannot be read.
    """
    contents = {
        "report.txt": _as_text(facts, results, redact),
        "findings.json": json.dumps(as_json(facts, results, redact), indent=1),
        "packages.txt": redact("".join(f"{line}\n" for line in _packages())),
        "environment.txt": _environment(facts, redact),
    }
    for name, source in (("server.log", log), ("options.yaml", options)):
        if source is not None:
            contents[name] = redact("".join(_last_lines(source)))
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in contents.items():
                archive.writestr(name, text)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror or error}.", "Give another place.") from None
    return list(contents)


def _as_text(facts: Facts, results: list[Result], redact: Redactor) -> str:
    text = io.StringIO()
    show(Console(width=120, file=text), facts, results, redact)
    return text.getvalue()


def _packages() -> list[str]:
    found = {f"{one.name}=={one.version}" for one in importlib.metadata.distributions() if one.name}
    return sorted(found, key=str.lower)


def _environment(facts: Facts, redact: Redactor) -> str:
    chosen = sorted(name for name in facts.environment if name.upper().startswith(OF_INTEREST))
    return "".join(f"{name}={redact.variable(name, facts.environment[name])}\n" for name in chosen)


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line[:LINE_CHARACTERS].rstrip("\n") + "\n" for line in deque(file, LOG_LINES)]
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}.") from None
