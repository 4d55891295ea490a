"""`octavo bench batch` and `length` on a tiny model, and the parts of a request under a scripted clock."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from octavo import cli
from octavo.bench import offline
from octavo.bench.phases import PARTS, Phases, means
from octavo.bench.workload import Item
from octavo.config import EngineConfig
from octavo.engine.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")

TINY = ("--dtype=float32", "--max-model-len=256", "--kv-cache-memory-bytes=16M", "--num-threads=1", "--device=cpu")
MS = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.f_bpe(tiny_models.save(tiny_models.oracle(), tmp_path_factory.mktemp("model")))


class Clock:
    """Stands still but where a part of the engine is called: that takes the time that it is given here."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, patch: pytest.MonkeyPatch, owner: Any, method: str, cost: Callable[..., float]) -> None:
        called = getattr(owner, method)

        def inside(*args: Any, **keywords: Any) -> Any:
            self.now += cost(*args)
            return called(*args, **keywords)

        patch.setattr(owner, method, inside)


@pytest.fixture
def slow_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Clock]]:
    """Milliseconds: 5 to tokenize, 1 to plan, 30 for a prompt, 10 for a token, 4 to sample, 2 to make text."""
    small: Any = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": "16M", "num_threads": 1}
    more: Any = {"device": "cpu", "depth": 0, "max_num_seqs": 1}
    with Engine(EngineConfig.from_keywords("test", model=str(folder), **small, **more)) as engine:
        clock = Clock()
        for owner, method, cost in (
            (engine.tokenizer, "encode", 5 * MS),
            (engine.scheduler, "plan", 1 * MS),
            (engine.loop.executor, "sample", 4 * MS),
            (engine.outputs, "process", 2 * MS),
        ):
            clock.slow(monkeypatch, owner, method, lambda *_, cost=cost: cost)
        clock.slow(
            monkeypatch,
            engine.loop.executor,
            "launch",
            lambda step: 30 * MS if any(chunk.length > 1 for chunk in step.chunks) else 10 * MS,
        )
        yield engine, clock


def test_parts_of_a_request_under_a_scripted_clock(slow_engine: tuple[Engine, Clock]) -> None:
    engine, clock = slow_engine
    watch = Phases(engine, clock)
    with watch:
        found = offline.run(engine, [Item("one two three", 3), Item("four five six", 2)], clock=clock)
    first, second = watch.split(found)
    # One runs after the other (max_num_seqs=1), so the second waits for the first one's three steps of 37, 17 and 17.
    assert first == pytest.approx(
        {"tokenization": 5 * MS, "queue": 1 * MS, "prefill": 30 * MS, "first_token": 4 * MS}
        | {"decode": 2 * 15 * MS, "detokenization": 3 * 2 * MS, "whole": 76 * MS}
    )
    assert second["queue"] == pytest.approx((35 + 15 + 15 + 1) * MS)
    assert second["decode"] == pytest.approx(15 * MS) and second["detokenization"] == pytest.approx(5 * 2 * MS)
    for split in (first, second):
        assert sum(split[part] for part in PARTS) == pytest.approx(split["whole"])
    mean = means([first, second], found.timings)
    assert mean["mean_decode_token_ms"] == pytest.approx(15) and mean["mean_tokenization_ms"] == pytest.approx(5)


def test_a_gpu_s_prompt_ends_with_its_token(slow_engine: tuple[Engine, Clock]) -> None:
    """A launch says nothing there: the step is over when its tokens are taken in."""
    engine, clock = slow_engine
    watch = Phases(engine, clock)
    watch._launch_computes = False
    with watch:
        found = offline.run(engine, [Item("one two three", 3), Item("four five six", 2)], clock=clock)
    for split in watch.split(found):
        assert split["prefill"] == pytest.approx(34 * MS) and split["first_token"] == pytest.approx(0.0)
        assert sum(split[part] for part in PARTS) == pytest.approx(split["whole"])


def test_a_text_has_the_tokens_that_were_asked_for(slow_engine: tuple[Engine, Clock]) -> None:
    engine, _ = slow_engine
    assert engine.tokenizer is not None
    found = offline.texts(engine, [Item([20 + (7 * n + k) % 200 for n in range(24)], 4) for k in range(10)])
    assert len({item.prompt for item in found}) == 10
    lengths = [len(engine.tokenizer.encode(item.prompt)) for item in found if isinstance(item.prompt, str)]
    assert len(lengths) == 10 and sum(length == 24 for length in lengths) >= 8, lengths


def bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", *words])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main()
    return out.getvalue()


@pytest.mark.parametrize("command", ["batch", "length"])
@pytest.mark.case("BEN-04")
def test_the_tables(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    flags = {
        "batch": ["--batch-sizes", "1,3", "--output-len", "4"],
        "length": ["--output-lens", "4,6", "--batch-size", "2"],
    }[command]
    path = tmp_path / "r.json"
    files = ["--output-json", str(path), "--output-html", str(tmp_path / "r.html")]
    printed = bench(monkeypatch, command, str(folder), *flags, "--num-iters", "2", "--input-len", "9", *files, *TINY)
    found = json.loads(path.read_text())
    first, second = found["rows"]
    assert found["kind"] == command and "Where the time of a request went" in printed and " Roofline " in printed
    if command == "batch":
        assert (first["batch_size"], second["batch_size"]) == (1, 3)
        assert (first["output_tokens"], second["output_tokens"]) == (4, 12)
    else:
        assert (first["output_len"], second["output_len"]) == (4, 6)
        assert (first["output_tokens"], second["output_tokens"]) == (8, 12)
    for row in found["rows"]:
        assert row["output_throughput"] == pytest.approx(row["output_tokens"] / row["batch_seconds"])
        assert row["cold_batch_seconds"] > 0 and len(row["samples"]["output_throughput"]) == 2
        assert sum(row[f"mean_{part}_ms"] for part in PARTS) == pytest.approx(row["mean_whole_ms"])
        assert row["mean_whole_ms"] == pytest.approx(row["mean_e2el_ms"] + row["mean_tokenization_ms"])
    assert found["roofline"]["kinds"]["decode"]["steps"] >= 2 * (3 if command == "batch" else 5)
    page = (tmp_path / "r.html").read_text()
    assert 'data-key="mean_detokenization_ms"' in page and "How far from the limit" in page


def test_what_cannot_be_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["batch", "--batch-sizes", "1,x"], "batch_sizes=1,x is not allowed"),
        (["batch", "--num-iters", "0"], "num_iters=0 is not allowed"),
        (["length", "--max-outputlen", "4"], "Did you mean --max-output-len?"),
        (["length", "--output-lens", "300", *TINY], "300 of an answer are 332: more than max_model_len=256"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["octavo", "bench", *words, "--model", str(folder)])
            cli.main()
        said = capsys.readouterr().err + str(ended.value.code)
        assert message in said, said
