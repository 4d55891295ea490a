"""A recording says what the scheduler did, tells no text, survives a kill and a full disk, and replays exactly."""

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from conftest import Make
from fake_device import Core, Workload
from octavo import LLM, SamplingParams
from octavo.core.events import Admitted, Evicted, Planned, Preempted
from octavo.errors import InvalidConfig
from octavo.observe.trace import (
    FORMAT,
    MAGIC,
    AnyRecord,
    Commit,
    Finish,
    Header,
    Recorder,
    Settings,
    Trace,
    TraceFile,
    read,
)
from octavo.trace.command import replay, show
from octavo.trace.figures import Cost, blocks_held, figures
from octavo.trace.life import fold
from octavo.trace.replay import Replay

HERE = Path(__file__).parent


def recorded(seed: int) -> tuple[Trace, Counter[str], list[object]]:
    """A random workload: what was recorded of it (without times), what it exercised, and the events themselves."""
    work = Workload(seed, Core())
    records: list[AnyRecord] = []
    recorder = Recorder(records.extend, work.block_size, clock=lambda: 0.0)
    events: list[object] = []
    work.scheduler.subscribers += [recorder, events.append]
    counts = work.run()
    recorder.flush()
    return Trace(Header(FORMAT, Settings.of(work.scheduler, work.engine.depth)), records), counts, events


def difference(one: list[AnyRecord], other: list[AnyRecord]) -> str:
    """Where two recordings part. What a fault makes the pool forget depends on tokens that no block tells."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"record {place}: {a} became {b}"
        if isinstance(a, Finish) and a.reason == "error":
            return ""
    return "" if len(one) == len(other) else f"{len(one)} records became {len(other)}"


def timeless(trace: Trace) -> list[AnyRecord]:
    return [msgspec.structs.replace(r, delay=0) if hasattr(r, "delay") else r for r in trace.records]


@pytest.mark.parametrize("group", range(4))
def test_a_replay_with_the_same_settings_is_the_recording(group: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(group * 50, group * 50 + 50):
        trace, exercised, _ = recorded(seed)
        counts += exercised
        assert difference(trace.records, Replay(trace).trace.records) == "", f"seed {seed}"
    wanted = ("preemptions", "prefix hits", "promise waits", "repeats", "aborts", "resets", "depth 0", "depth 1")
    assert {name: counts[name] for name in wanted if counts[name] < 3} == {}


def test_a_recording_that_ends_early_replays_as_far_as_it_goes() -> None:
    """As a killed process leaves it: up to some commit."""
    for seed in range(25):
        trace, _, _ = recorded(seed)
        commits = [place for place, record in enumerate(trace.records, 1) if isinstance(record, Commit)]
        for share in (3, 2):
            part = Trace(trace.header, trace.records[: commits[len(commits) // share]])
            again = Replay(part).trace.records
            assert difference(part.records, again[: len(part.records)]) == "", f"seed {seed}"


def test_the_tables_are_those_of_the_scheduler() -> None:
    """Block tables, preemptions and evictions of the folded recording, against the events themselves."""
    evictions = preemptions = 0
    for seed in range(60):
        trace, _, events = recorded(seed)
        history = fold(trace)
        lives = {life.id: life for life in history.lives}
        tables: dict[str, list[int]] = {}
        step = 0
        for event in events:
            match event:
                case Admitted():
                    tables[event.request_id] = list(event.blocks)
                case Planned():
                    for name, chunk, share in zip(
                        event.request_ids, event.step.chunks, history.steps[step].shares, strict=True
                    ):
                        tables[name] += chunk.new_blocks
                        stay = next(stay for stay in lives[name].stays if stay.holds(step))
                        assert stay.table(step) == tables[name], f"seed {seed}, step {step}"
                        assert (share.start, share.samples) == (chunk.start, chunk.samples)
                        assert (
                            share.start + chunk.length <= share.end <= share.start + chunk.length + step_repeat(event)
                        )
                    step += 1
                case Evicted():
                    evictions += len(event.blocks)
                case Preempted():
                    preemptions += 1
        found = figures(history, None)
        assert found.steps == step
        preemptions -= found.preemptions
        evictions -= found.blocks_evicted
        assert 0 < max(blocks_held(history)) <= trace.header.settings.num_blocks - 1
    assert (evictions, preemptions) == (0, 0)


def step_repeat(event: Planned) -> int:
    return event.step.repeat - 1


def test_other_settings_run_every_request_to_its_end() -> None:
    for seed in range(20):
        trace, _, _ = recorded(seed)
        own = trace.header.settings
        for changed in ({"max_num_seqs": 1}, {"depth": 3}, {"num_blocks": 2 * own.num_blocks}, {"block_size": 16}):
            again = Replay(trace, msgspec.structs.replace(own, **changed))
            before, after = figures(fold(trace), None), figures(fold(again.trace), None)
            assert after.finished == before.requests and not again.refused
            assert after.most_running <= again.settings.max_num_seqs


def test_a_prompt_too_long_for_the_settings_is_refused_by_name() -> None:
    trace, _, _ = recorded(0)
    longest = max(fold(trace).lives, key=lambda life: life.arrival.num_prompt_tokens)
    settings = msgspec.structs.replace(trace.header.settings, max_model_len=longest.arrival.num_prompt_tokens)
    assert longest.id in [name for name, _ in Replay(trace, settings).refused]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run_of_a_real_model(make_llm: Make, tmp_path: Path, depth: int) -> None:
    path = tmp_path / "run.trace"
    options = {"num_gpu_blocks_override": 24, "max_model_len": 64, "block_size": 4, "scheduling_policy": "priority"}
    llm = make_llm(trace=str(path), depth=depth, max_num_batched_tokens=20, **options)
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 100 + i % 2, 17] for i in range(6)]
    params = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False, priority=[0, 1, 0, 1, 0, 1])
    llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert not read(path).is_complete  # still open, and all there
    before = read(path).records
    llm.close()
    trace = read(path)
    assert trace.is_complete and trace.records == before
    history = fold(trace)
    found = figures(history, Cost(history.steps))
    assert found.preemptions and found.positions_found and found.requests == 13
    assert found.tokens == 12 * 20 + history.lives[-1].num_generated
    took = sum(step.micros for step in history.steps) / 1e6
    assert found.estimated_seconds == pytest.approx(took, rel=0.2)
    assert difference(timeless(trace), Replay(trace).trace.records) == ""


def test_neither_text_nor_tokens_are_recorded(make_llm: Make, tmp_path: Path) -> None:
    """Two runs that differ in nothing but the tokens leave the same records."""
    found = []
    for first in (50, 300):
        path = tmp_path / f"{first}.trace"
        llm = make_llm(trace=str(path), block_size=4)
        llm.generate([list(range(first, first + 9))] * 2, SamplingParams(max_tokens=1), use_tqdm=False)
        llm.close()
        found.append(timeless(read(path)))
    assert found[0] == found[1]


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "killed.trace"
    script = f"""
        import os, sys
        sys.path.insert(0, {str(HERE)!r})
        from fake_device import Core, Workload
        from octavo.observe.trace import Recording, TraceFile
        work = Workload(5, Core())
        recording = Recording(TraceFile({str(path)!r}), work.scheduler, work.engine.depth)
        work.run()
        os.kill(os.getpid(), 9)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment).returncode == -9
    trace = read(path)
    assert not trace.is_complete and all(life.finish for life in fold(trace).lives)


def test_every_cut_of_a_file_is_read_or_refused(tmp_path: Path) -> None:
    path, cut = tmp_path / "whole.trace", tmp_path / "cut.trace"
    trace, _, _ = recorded(3)
    file = TraceFile(str(path))
    file.write(trace.header)
    for begin in range(0, len(trace.records), 20):
        file.write(trace.records[begin : begin + 20])
    file.close()
    data = path.read_bytes()
    assert read(path) == trace
    numbers = set()
    for size in range(1, len(data)):
        cut.write_bytes(data[:size])
        try:
            found = read(cut)
        except InvalidConfig as error:
            assert str(cut) in str(error)
            continue
        assert not found.is_complete and found.records == trace.records[: len(found.records)]
        numbers.add(len(found.records))
    assert len(numbers) == len(trace.records) // 20 + 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"GIF89a\x01\x00", "is no trace"),
        (MAGIC[:-3], "is no trace"),
        (MAGIC, "is cut off before its first record"),
        (MAGIC + b"\x04\0\0\0junk", "is damaged"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match=said):
        show(path)
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        replay(tmp_path / "none")


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    trace, _, _ = recorded(0)
    file = TraceFile(str(tmp_path / "new.trace"))
    file.write(msgspec.structs.replace(trace.header, format=FORMAT + 1))
    file.close()
    with pytest.raises(InvalidConfig, match=f"has format {FORMAT + 1}; this Octavo .* reads format {FORMAT}"):
        read(tmp_path / "new.trace")


def test_a_file_that_cannot_be_made_is_told_before_the_model_loads(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="trace=.* cannot be written: No such file or directory"):
        LLM("there/is/no/model", trace=str(tmp_path / "none" / "run.trace"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_one_warning(make_llm: Make, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(trace="/dev/full")
    for _ in range(3):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.close()
    told = [record.message for record in caplog.records if "trace" in record.message]
    assert told == ["The trace ends here, and the engine goes on: /dev/full: No space left on device."]


def test_show_tells_one_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, _, _ = next(found for found in map(recorded, range(100)) if found[1]["preemptions"] > 2)
    path = tmp_path / "run.trace"
    file = TraceFile(str(path))
    file.write(trace.header)
    file.write(trace.records)
    file.close()
    show(path)
    assert "requests" in capsys.readouterr().out
    life = next(life for life in fold(trace).lives if life.num_preemptions)
    show(path, life.id)
    told = capsys.readouterr().out
    plain = re.sub(r"\[\d+\]", "", told)
    for stay in life.stays:
        assert "| " + " ".join(map(str, stay.table(stay.ends[-1][0]))) in plain
    assert "preempted" in told and "admitted again" in told and life.finish and life.finish.reason in told
    replay(path)
    assert "The replay is the recording" in capsys.readouterr().out
    with pytest.raises(ValueError, match="There is no request 'nobody'"):
        show(path, "nobody")


def test_many_labels_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: equal blocks get other labels after very many others."""
    from octavo.core.events import Added
    from octavo.observe import trace

    monkeypatch.setattr(trace, "MAX_LABELS", 100)
    recorder = Recorder(lambda _: None, 1)
    for i in range(50):
        request = SimpleNamespace(
            prompt_token_ids=tuple(range(i, i + 20)), namespace="", tenant="", priority=0, reads_prefix_cache=True,
            params=SamplingParams(),
        )  # fmt: skip
        recorder(Added(str(i), 20, request))  # type: ignore[arg-type]
        assert len(recorder._labels) <= 120
