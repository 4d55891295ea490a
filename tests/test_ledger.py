"""The start's memory, predicted beside measured: printed, and kept as lines of JSON."""

import json
import logging
from pathlib import Path

import pytest

from conftest import Make
from octavo.core.memory import CPU_PROCESS_BYTES
from octavo.worker.ledger import Ledger


def test_lines_are_printed_with_their_residuals(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger("GPU", {"weights": 1 << 30, "KV cache": 4 << 30, "kept free": 1 << 28})
    ledger.note("weights", (1 << 30) + (1 << 28))
    ledger.note("KV cache", 3 << 30)
    ledger.note("found late", 5)
    with caplog.at_level(logging.INFO, "octavo"):
        ledger.report()
    weights, cache, free, late = caplog.messages
    assert "1.00 GiB predicted" in weights and "1.25 GiB measured (+25.0%)" in weights
    assert "(-25.0%)" in cache
    assert "0.25 GiB predicted" in free and "%" not in free
    assert "found late" in late and "0.00 GiB measured" in late


def test_an_engine_keeps_the_residuals_of_its_start(make_llm: Make, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    for _ in range(2):
        cache_bytes = make_llm(memory_report=str(path)).engine.cache_size.num_bytes
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["model"] == second["model"] == str(tiny_folder)
    lines = {row["line"]: row for row in first["lines"]}
    assert lines["process"]["predicted"] == CPU_PROCESS_BYTES
    assert lines["KV cache"]["predicted"] == lines["KV cache"]["measured"] == cache_bytes
    assert lines["KV cache"]["residual"] == 0
    assert lines["weights"]["predicted"] > 0


def test_a_report_that_cannot_be_written_stops_nothing(
    make_llm: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "no such folder" / "memory.jsonl"
    with caplog.at_level(logging.WARNING, "octavo"):
        assert make_llm(memory_report=str(wrong)).generate([[1, 2, 3]], use_tqdm=False)
    assert f"memory_report={wrong} could not be written" in caplog.text
