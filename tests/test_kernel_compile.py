"""Every Triton kernel compiles without a GPU for those it is meant for, and fits their registers and memory."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes a program may have, by capability
KERNEL_FOLDER = Path(__file__).parents[1] / "src/octavo/kernels"


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """In a process of its own: the other tests have loaded the kernels for the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    script = Path(__file__).with_name("kernel_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, *map(str, SHARED_LIMITS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_kernels_fit(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_LIMITS[kernel["capability"]], kernel
        assert kernel["spilled"] <= 64, kernel


def test_no_kernel_is_forgotten(compiled: list[dict[str, Any]]) -> None:
    launched = {
        line.split("_kernel[")[0].strip() + "_kernel"
        for file in KERNEL_FOLDER.glob("*.py")
        for line in file.read_text().splitlines()
        if "_kernel[(" in line
    }
    assert launched
    assert launched == {kernel["kernel"] for kernel in compiled if kernel["capability"] == 90}
    assert {kernel["capability"] for kernel in compiled} == set(SHARED_LIMITS)
