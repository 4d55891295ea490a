"""Folders for tokenizers that were converted once: one for each state of a GGUF file."""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from octavo import env
from octavo.text import gguf_tokenizer

logger = logging.getLogger("octavo")


def folder_of(path: Path) -> Path:
    """Where the tokenizer of this GGUF file is kept; a changed file, or a changed conversion, has another folder."""
    state = path.stat()
    digest = hashlib.sha256(Path(gguf_tokenizer.__file__).read_bytes())
    digest.update(f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}".encode(errors="surrogateescape"))
    return env.cache_root() / "tokenizers" / digest.hexdigest()[:32]


def store(folder: Path, files: Mapping[str, str]) -> None:
    """Write files of these names and contents into `folder`, which appears whole or not at all.

    Where nothing can be written (a read-only home) it says so and goes on: it only saves time.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as new:
            for name, content in files.items():
                (Path(new) / name).write_text(content, encoding="utf-8")
            with contextlib.suppress(OSError):  # another process was first
                os.rename(new, folder)
                os.mkdir(new)  # what the context manager expects to remove
    except OSError as error:
        logger.warning("The tokenizer is converted at every start: %s cannot be written (%s).", folder, error)
