"""The CPU benchmark: the same prompts for every engine, ratios to the best peer of the same round."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import cpu
import cpu_engines


@pytest.mark.parametrize(
    ("column", "requests", "into", "out"),
    [("b1", 1, 32, 128), ("b8", 8, 256, 1024), ("ragged", 64, 10524, 8314), ("ttft2048", 1, 2048, 1)],
)
def test_the_work_is_the_same_for_everybody(column: str, requests: int, into: int, out: int) -> None:
    prompts, lengths = cpu_engines.work(column, 3)
    assert (prompts, lengths) == cpu_engines.work(column, 3)
    assert prompts != cpu_engines.work(column, 4)[0], "a prefix cache would find them"
    assert (len(prompts), sum(map(len, prompts)), sum(lengths)) == (requests, into, out)


def sample(engine: str, column: str, round_: int, value: float) -> dict:
    return {"run": "now", "engine": engine, "column": column, "round": round_, "value": value}


def test_ratios_are_of_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [
        sample(engine, column, round_, value * speed)
        for round_, speed in enumerate((1, 10, 1))  # a machine that is ten times as fast in one round
        for engine, column, value in (
            ("octavo", "b1", 80),
            ("openvino", "b1", 40),
            ("transformers", "b1", 20),
            ("octavo", "ttft512", 300),
            ("openvino", "ttft512", 600),
            ("octavo-gguf", "b8", 7),
        )
    ]
    samples.append(sample("openvino", "b1", 3, 1000))  # a round without Octavo counts for nothing
    spoiled = [sample("octavo", "b1", 4, 1), sample("openvino", "b1", 4, 900), sample("vllm", "b8", 4, 50)]
    samples += [one | {"others": 0.9} for one in spoiled]  # as little does one beside a busy process
    assert cpu.ratio(samples, "octavo", "b1") == "2.00x"
    assert cpu.ratio(samples, "octavo", "ttft512") == "2.00x", "less is better"
    assert cpu.ratio(samples, "octavo-gguf", "b8") == "-", "nobody to compare with"
    cpu.report(samples)
    table = capsys.readouterr().out
    assert "| octavo | 80.0 (80.0 - 800.0, 3) | - | 300 (300 - 3,000, 3) |" in table
    assert "| octavo / best peer | 2.00x | - | 2.00x |" in table
    assert "| vllm | - | 50.0 (50.0 - 50.0, 1)! | - |" in table


def test_an_engine_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What an engine prints is no answer; one that dies ends the benchmark with its last words."""
    helper = Path(__file__).parent / "printing_engine.py"
    monkeypatch.setattr(cpu.Path, "with_name", lambda *_: helper)
    engine = cpu.Engine("fake", sys.executable, Path("model"), 1)
    found = engine.ask("b8", 0)
    assert found["tokens"] == 1024 and found["seconds"] >= 0
    assert engine.ask("b1", 0, warm=True)["tokens"] == 4
    assert engine.close() > 2**20
    with pytest.raises(SystemExit, match="fake ended with 3"):
        cpu.Engine("fake", sys.executable, Path("missing"), 1)
    assert "no such model" in capfd.readouterr().err
