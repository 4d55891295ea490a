"""A minute of the mixed load that `make soak` plays for twenty."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from soak import Report, soak


@pytest.mark.real_model
def test_a_minute_of_everything_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--max-model-len=2048", "--num-threads=1", "--shutdown-timeout=20")
    report = soak("smollm2", 60, tmp_path, clients=12, warm_up=30, cache="48M", flags=flags)
    assert report.faults == [], (report.faults, (tmp_path / "server.log").read_text()[-3000:])
    kinds = {outcome.split(":")[0] for outcome in report.outcomes}
    assert kinds == {"stream", "whole", "samples", "leaver", "hurried", "bad"}


def test_faults_are_told() -> None:
    """Each of the four, and none where there is none."""
    flat = [(float(at), {"engine": 1000}) for at in range(100)]
    assert Report(memory=flat, seconds=100, blocks_left=0, exit_status=0).faults == []
    grown = [(at, {"engine": 1000 + int(at)}) for at, _ in flat]
    found = Report(unexpected=["500"], memory=grown, seconds=100, blocks_left=3, exit_status=1).faults
    assert [what.split()[0] for what in found] == ["unexpected:", "3", "memory", "the"]
