"""Finds the real models that some tests run on, in Octavo's cache, and skips the test where one is absent."""

import os
from pathlib import Path

import pytest

SMOLLM2 = "smollm2"
GEMMA3 = "gemma3-270m"


def real_gguf(name: str) -> Path:
    """The GGUF file of a pulled model; the first one of a split checkpoint."""
    root = Path(os.environ.get("OCTAVO_CACHE_ROOT") or Path.home() / ".cache" / "octavo")
    files = sorted((root / "models" / name).glob("*.gguf"))
    if not files:
        pytest.skip(f"needs the real model {name} ({root / 'models' / name} has no GGUF file): octavo pull {name}")
    return files[0]
