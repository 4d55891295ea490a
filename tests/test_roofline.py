"""The roofline block: work by hand, peaks from a file, and parts of a step that add up, tiny and on SmolLM2."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import real_models
import tiny_models
from octavo import cli
from octavo.bench import profile_trace, roofline
from octavo.bench.roofline import Roofline
from octavo.config import EngineConfig
from octavo.core.step import Chunk, Step
from octavo.engine import spans
from octavo.engine.engine import Engine
from octavo.engine.spans import Timer, engine_spans, watched
from octavo.model_spec import ModelSpec
from octavo.types import SamplingParams
from octavo.worker import peaks

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application")

CPU = torch.device("cpu")
ATTEMPTS = 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_models.save(tiny_models.oracle(), tmp_path_factory.mktemp("model"))
    with Engine(
        EngineConfig.from_keywords(
            "test",
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            kv_cache_memory_bytes="16M",
            num_threads=1,
            device="cpu",
        )
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Found before a test has a cache of its own."""
    return real_models.real_gguf(real_models.SMOLLM2)


@pytest.fixture
def quick_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Peaks in a cache of the test's own, from a measurement that takes no time; counts the measurements."""
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path))
    measured: list[int] = []

    def measure(device: torch.device, dtype: torch.dtype) -> peaks.Peaks:
        measured.append(1)
        return peaks.Peaks(peaks.identity(device, dtype), ((1000, 2e9), (10**9, 1e9)), 1e12, "2026-01-01 00:00:00")

    monkeypatch.setattr(peaks, "measure", measure)
    return measured


def unattributed(found: dict[str, Any]) -> float:
    """The largest share of a kind of step that no part accounts for. A busy machine may stop a process anywhere, so
    runs are tried again: what is missing in every one of them is missing in the code."""
    kinds = (found["total"], *found["kinds"].values())
    return max(float(part["share"]) for kind in kinds for part in kind["parts"] if part["name"] == "not attributed")


def run(engine: Engine, num_requests: int, seed: int, max_tokens: int = 8, prompt: int = 20) -> None:
    for number in range(num_requests):
        ids = [5 + (seed * 31 + number * 7 + place) % 500 for place in range(prompt)]
        engine.add(engine.check(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)))
    while engine.has_unfinished:
        engine.step()


def test_work_by_hand() -> None:
    spec = ModelSpec.from_config(tiny_models.config_of(tiny_models.oracle()))
    # hidden 64, 4 heads and 2 KV heads of 16, MLP 128, 2 layers, 600 words, untied.
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    chunks = [Chunk(0, 0, 10), Chunk(1, 4, 1)]  # 10 prompt tokens; one token behind 4 others
    (work,) = roofline.step_works(spec, Step(chunks=chunks), 4.0, 4.0)
    assert work.num_tokens == 11
    assert work.weight_bytes == 4 * (2 * layer + 600 * 64)
    assert work.cache_bytes == 2 * (2 * 2 * 16 * 4) * ((10 + 10) + (5 + 1))  # layers, a token's K and V, read + written
    assert work.linear_flops == 2 * (11 * 2 * layer + 2 * 600 * 64)
    assert work.attention_flops == 2 * (4 * 4 * 16) * (55 + 5)  # pairs: 1 + ... + 10, and 5
    done = roofline.judged(work, bandwidth=1e9, flops=1e12)
    assert done.bytes == work.weight_bytes + work.cache_bytes + 4 * 4 * 2 * 600
    assert done.memory_seconds == pytest.approx(done.bytes / 1e9)
    assert done.compute_seconds == pytest.approx(done.flops / 1e12)


def test_repeated_steps_count_as_often_as_they_run() -> None:
    spec = ModelSpec.from_config(tiny_models.config_of(tiny_models.oracle()))
    works = list(roofline.step_works(spec, Step(chunks=[Chunk(0, 9, 1)], repeat=3), 4.0, 4.0))
    assert [work.num_tokens for work in works] == [1, 1, 1]
    pair = 2 * 4 * 4 * 16
    assert [work.attention_flops for work in works] == [pair * 10, pair * 11, pair * 12]


def test_the_parts_of_a_step_add_up(engine: Engine, quick_peaks: list[int]) -> None:
    run(engine, 4, seed=1)
    for attempt in range(ATTEMPTS):
        watching = Roofline(engine)
        for seed in (10 * attempt + 12, 10 * attempt + 13):
            with watching:
                run(engine, 4, seed=seed)
        run(engine, 4, seed=10 * attempt + 14)  # not watched
        found = watching.result()
        if unattributed(found) < 0.05:
            break
    total, kinds = found["total"], found["kinds"]
    assert found["weight_element_bytes"] == pytest.approx(4.0, rel=0.01)  # the head is padded
    assert found["cache_element_bytes"] == 4.0
    assert kinds["prefill"]["tokens"] == 2 * 4 * 20 and kinds["decode"]["tokens"] == 2 * 4 * 7
    assert total["steps"] == kinds["prefill"]["steps"] + kinds["decode"]["steps"]
    assert total["seconds"] == pytest.approx(kinds["prefill"]["seconds"] + kinds["decode"]["seconds"])
    for kind in (total, *kinds.values()):
        shares = {part["name"]: part["share"] for part in kind["parts"]}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert sum(part["ms"] for part in kind["parts"]) == pytest.approx(1e3 * kind["seconds"] / kind["steps"])
        assert shares["not attributed"] < 0.05, shares
        assert shares["device"] > 0 and shares["sampling"] > 0 and shares["plan"] > 0
    assert total["bytes_per_second"] == pytest.approx(total["bytes"] / total["seconds"])
    assert len(quick_peaks) == 1


def test_nothing_of_the_watching_stays(engine: Engine) -> None:
    found = engine_spans(engine)
    before = [vars(span.owner).get(span.method) for span in found]
    with watched(found, Timer().around):
        assert all(span.method in vars(span.owner) for span in found)
    assert [vars(span.owner).get(span.method) for span in found] == before
    with pytest.raises(ZeroDivisionError), watched(found, Timer().around):
        _ = 1 / 0
    assert [vars(span.owner).get(span.method) for span in found] == before


def test_the_timer_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(spans, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = Timer()
    with timer.around("step"), timer.around("prepare"), timer.around("forward"):  # begin at 0, 1 and 3
        pass  # end at 6, 10 and 15
    assert timer.steps == [{"forward": 3.0, "prepare": 6.0, "step": 6.0}]


def test_peaks_are_measured_once(quick_peaks: list[int], tmp_path: Path) -> None:
    first = peaks.peaks(CPU, torch.float32)
    assert peaks.peaks(CPU, torch.float32) == first and len(quick_peaks) == 1
    assert first.bandwidth(500) == 2e9 and first.bandwidth(5000) == 1e9 and first.bandwidth(1e12) == 1e9
    peaks.peaks(CPU, torch.bfloat16)  # another type, another file
    assert len(quick_peaks) == 2
    peaks.peaks(CPU, torch.float32, again=True)
    assert len(quick_peaks) == 3 and len(list((tmp_path / "machines").iterdir())) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"flops": "many"}', "other machine", "no bandwidth"])
def test_a_broken_file_of_peaks_is_measured_again(quick_peaks: list[int], tmp_path: Path, content: str) -> None:
    first = peaks.peaks(CPU, torch.float32)
    (path,) = (tmp_path / "machines").iterdir()
    whole = json.loads(path.read_text())
    if content == "other machine":
        content = json.dumps(whole | {"machine": whole["machine"] | {"torch": "0.1"}})
    elif content == "no bandwidth":
        content = json.dumps(whole | {"bandwidths": []})
    path.write_text(content)
    assert peaks.peaks(CPU, torch.float32) == first and len(quick_peaks) == 2
    assert json.loads(path.read_text()) == whole
    assert peaks.peaks(CPU, torch.float32) == first and len(quick_peaks) == 2


def test_the_measurement_itself() -> None:
    found = peaks.measure(CPU, torch.float32)
    assert [size for size, _ in found.bandwidths] == sorted(size for size, _ in found.bandwidths)
    assert all(1e8 < rate < 1e13 for _, rate in found.bandwidths) and 1e8 < found.flops < 1e15


def test_the_command_measures_again(
    quick_peaks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bench(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", "machine", "--device", "cpu", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    threads = torch.get_num_threads()
    for count in (1, 2):
        words = ("--num-threads", "1", "--dtype", "float32", "--output-json", str(tmp_path / "r.json"))
        assert not bench(*words) and len(quick_peaks) == count
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "1 thread," in printed and "GFLOP/s" in printed and "float32" in printed
    assert json.loads((tmp_path / "r.json").read_text())["flops"] == 1e12
    assert "num_threads=0 is not allowed" in str(bench("--num-threads", "0"))


def test_where_time_goes_beside_a_device() -> None:
    """A made-up trace of a GPU: kernels for 60 of 100 microseconds, the rest is the host's."""

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    trace = profile_trace.digest(
        [
            event("user_annotation", "step", 0, 100),
            event("user_annotation", "plan", 0, 10),
            event("user_annotation", "prepare", 10, 40),
            event("user_annotation", "forward", 20, 30),
            event("cuda_runtime", "cudaGraphLaunch", 22, 4, correlation=7),
            event("user_annotation", "sample", 50, 10),
            event("cuda_runtime", "cudaLaunchKernel", 51, 4, correlation=8),
            event("user_annotation", "wait", 60, 30),
            event("kernel", "gemm", 25, 35, tid=9, correlation=7),  # until 60
            event("kernel", "ncclAllReduce", 62, 10, tid=9, correlation=7),
            event("kernel", "argmax", 72, 15, tid=9, correlation=8),  # until 87
            event("kernel", "argmax", 80, 5, tid=10, correlation=8),  # on a second stream, at the same time
        ]
    )
    found = {name: round(1e6 * seconds, 3) for name, seconds in profile_trace.device_shares(trace).items()}
    assert found == {
        "plan": 10,
        "prepare": 10,
        "launch gaps": 5,  # 20 to 25
        "device": 35,
        "communication": 10,
        "sampling": 15,
        "wait": 2 + 3,
        "step": 10,
    }
    rows = {(row.part, row.name): row for row in trace.rows if row.on_device}
    assert rows["sample", "argmax"].calls == 2 and rows["forward", "gemm"].seconds == pytest.approx(35e-6)


def test_the_way_of_a_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would go through, with this CPU as the device: steps by their commit, shares from a profile."""
    gpu = peaks.Peaks({"name": "A GPU", "dtype": "float32"}, ((1, 1e12),), 1e14, "2026-01-01 00:00:00")
    monkeypatch.setattr(roofline, "choose_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(roofline, "peaks", lambda device, dtype: gpu)
    with Roofline(engine) as watching:
        run(engine, 4, seed=5)
    found = watching.result(lambda: run(engine, 2, seed=6))
    assert found["parts_from"] == "a profile of a shorter run" and not found["kinds"]["decode"]["parts"]
    shares = {part["name"]: part["share"] for part in found["total"]["parts"]}
    assert sum(shares.values()) == pytest.approx(1.0) and shares["launch gaps"] > 0  # no kernel ran
    assert found["kinds"]["prefill"]["tokens"] == 4 * 20 and found["kinds"]["decode"]["tokens"] == 4 * 7
    roofline.show(found)


@pytest.mark.real_model
def test_smollm2(smollm2: Path, quick_peaks: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    options = {"num_threads": 1, "max_model_len": 512, "kv_cache_memory_bytes": "64M", "device": "cpu"}
    with Engine(EngineConfig.from_keywords("test", model=str(smollm2), **options)) as engine:
        run(engine, 2, seed=1, max_tokens=2)
        for seed in range(2, 2 + ATTEMPTS):
            with Roofline(engine) as watching:
                run(engine, 2, seed=seed, prompt=40)
            found = watching.result()
            if unattributed(found) < 0.05:
                break
    parts = {part["name"]: part["share"] for part in found["total"]["parts"]}
    assert parts["not attributed"] < 0.05 and parts["device"] > 0.5, parts
    assert found["kinds"]["decode"]["bytes"] / found["kinds"]["decode"]["steps"] > 100e6
    roofline.show(found)
    printed = capsys.readouterr().out
    assert "Reached of the limit" in printed and "host: plan" in printed
