"""The command line and what it must not load: --help without torch, errors in one line, a host without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import tiny_models
import tiny_tokenizers


def octavo(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *args],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "120", **env}, check=False,
    )  # fmt: skip


def modules_after(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return set(out.stdout.split())


@pytest.mark.parametrize(("name", "meant"), [("sreve", "Did you mean serve?"), ("frobnicate", "There are pull, demo,")])
def test_a_mistyped_command_is_refused_without_torch(name: str, meant: str) -> None:
    found = modules_after(
        f"import sys, octavo.cli\nsys.argv = ['octavo', '{name}', 'smollm2']\n"
        "import contextlib\nwith contextlib.suppress(SystemExit): octavo.cli.main()"
    )
    assert "cyclopts" in found
    assert not {"torch", "transformers", "huggingface_hub", "tokenizers"} & found
    refused = octavo(name, "smollm2")
    assert refused.returncode == 2
    assert meant in refused.stderr


def test_a_mistyped_option_is_named_though_a_prompt_may_begin_with_a_hyphen() -> None:
    found = octavo("generate", "--temprature", "0.5", "hello")
    assert found.returncode == 2
    assert "Unknown option: --temprature. Did you mean --temperature?" in found.stderr


@pytest.mark.case("ENV-04")
def test_help_loads_no_torch_and_is_quick() -> None:
    loaded = modules_after(
        "import contextlib, io, octavo.cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): octavo.cli.app(['--help'])"
    )
    assert "cyclopts" in loaded
    assert not {"torch", "transformers", "huggingface_hub", "tokenizers"} & loaded
    begin = time.perf_counter()
    found = octavo("--help", CUDA_VISIBLE_DEVICES="", LC_ALL="C")
    assert found.returncode == 0
    assert all(name in found.stdout for name in ("pull", "demo", "generate"))
    assert time.perf_counter() - begin < 5


def test_text_side_loads_no_torch() -> None:
    loaded = modules_after(
        "import octavo, octavo.hub, octavo.model_spec, octavo.core.scheduler, octavo.text.chat, octavo.engine.inputs, "
        "octavo.engine.outputs, octavo.formats.gguf, octavo.observe.stats"
    )
    assert not {"torch", "triton", "transformers"} & loaded


def test_version_and_unknown_commands() -> None:
    assert octavo("--version").stdout.startswith("octavo 0.")
    found = octavo("generat")
    assert found.returncode != 0
    assert "generate" in found.stdout + found.stderr


def test_command_help_has_every_option() -> None:
    text = octavo("generate", "--help", COLUMNS="200").stdout
    for flag in (
        "--max-model-len",
        "--block-size",
        "--max-num-seqs",
        "--no-enable-prefix-caching",
        "--chat",
        "--dtype",
    ):
        assert flag in text
    assert "Steps that may be launched" in text


@pytest.mark.case("ENV-04")
def test_generate_streams_text(tiny: PreTrainedModel, tmp_path: Path) -> None:
    tiny_models.save(tiny, tmp_path)
    tiny_tokenizers.f_bpe(tmp_path)
    small = ("--kv-cache-memory-bytes", "8M", "--max-model-len", "128", "--dtype", "float32")
    first = octavo("generate", "some words", "--model", str(tmp_path), "--max-tokens", "8", *small)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    again = octavo(
        "generate", "some words", "--model", f"{tmp_path}/", "--max-tokens", "8", *small, HOME="/nonexistent"
    )
    assert again.stdout == first.stdout
    assert octavo("generate", "hi", "--chat", "--model", str(tmp_path), "--max-tokens", "4", *small).returncode == 0


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (("generate", "x", "--model", "/no/such/folder"), "/no/such/folder"),
        (("generate", "x", "--temperature", "5"), "temperature=5.0"),
        (("generate", "x", "--block-size", "0"), "block_size=0"),
        (("generate", "x", "--max-model-len", "long"), "max_model_len='long'"),
    ],
)
def test_a_failure_ends_with_its_cause(args: tuple[str, ...], cause: str) -> None:
    found = octavo(*args)
    assert found.returncode == 1
    assert cause in found.stderr.strip().splitlines()[-1]
    assert "Traceback" not in found.stderr
