"""Threads of a CPU engine: as many as there are cores to use, each pinned to its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from octavo.errors import InvalidConfig
from octavo.kernels.cpu.library import library
from octavo.worker import machine
from octavo.worker.threads import Threads, choose_threads, listed, parse_cpus
from test_greedy import FAMILIES

AFTER_A_STEP = """
import json, os, sys
from octavo import LLM, SamplingParams
options = json.loads(sys.argv[2])
allowed = options.pop("allowed")
if allowed:
    os.sched_setaffinity(0, allowed)
tasks = lambda: {int(name) for name in os.listdir("/proc/self/task")}
options |= {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
llm = LLM(sys.argv[1], max_model_len=256, kv_cache_memory_bytes="4M", **options)
llm.generate([[5, 6, 7] * 20] * 4, SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
child = os.popen("grep Cpus_allowed_list /proc/self/status").read()
print(json.dumps([sorted(os.sched_getaffinity(task)) for task in sorted(tasks())]))
print(json.dumps(child.split()[-1]))
"""

needs_kernels = pytest.mark.skipif(library() is None, reason="no compiler for the CPU kernels")
two_cores = pytest.mark.skipif(machine.physical_cores() < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.oracle(**FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def affinities(model: Path, allowed: list[int] | None = None, **options: Any) -> tuple[list[list[int]], str]:
    """CPUs that each thread of a process may use after a step, the main one first; and those of a child it starts."""
    command = [sys.executable, "-c", AFTER_A_STEP, str(model), json.dumps({"allowed": allowed} | options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    threads, child = done.stdout.splitlines()[-2:]
    return json.loads(threads), json.loads(child)


@needs_kernels
@two_cores
def test_threads_are_pinned_to_their_cores(model: Path) -> None:
    cores = machine.one_cpu_a_core()
    (main, *others), child = affinities(model)
    alone = [cpus[0] for cpus in others if len(cpus) == 1]
    assert sorted(alone) == sorted(cores[1:]), "one thread on each core, and the caller on the one that is left"
    assert main == machine.allowed_cpus(), "what the caller starts would inherit its place"
    assert child == listed(main)


@needs_kernels
@two_cores
def test_the_system_places_them_where_asked(model: Path) -> None:
    for options in ({"cpu_bind": "none"}, {"num_threads": 1}):
        threads, _ = affinities(model, **options)
        assert all(cpus == machine.allowed_cpus() for cpus in threads)


@needs_kernels
@two_cores
def test_the_process_stays_on_the_cpus_named(model: Path) -> None:
    one, two = machine.one_cpu_a_core()[:2]
    (main, *others), child = affinities(model, cpu_bind=str(two))
    assert main == [two] and child == str(two) and [one] not in others
    (main, *_), _ = affinities(model, allowed=[one])
    assert main == [one], "an affinity from outside is kept, and no thread is more than it has cores"


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [0, 1, 2, 3, 8, 9])
    monkeypatch.setattr(machine, "one_cpu_a_core", lambda: [0, 2, 8])
    monkeypatch.setattr(machine, "_quota", lambda: None)
    everything = (0, 1, 2, 3, 8, 9)
    assert choose_threads(None, "auto") == Threads(3, (0, 2, 8), True)
    assert choose_threads(3, "auto") == Threads(3, (0, 2, 8), True)
    assert choose_threads(2, "auto") == Threads(2, everything, False), "two such engines would share the same cores"
    assert choose_threads(None, "none") == Threads(3, everything, False)
    assert choose_threads(None, "2-3,9") == Threads(3, (2, 3, 9), True)
    assert choose_threads(2, "8,2,3") == Threads(2, (8, 2, 3), True)
    monkeypatch.setattr(machine, "_quota", lambda: 2.5)
    assert choose_threads(None, "auto") == Threads(2, everything, False), "a third thread would spend the share"
    monkeypatch.setattr(machine, "_quota", lambda: 0.5)
    assert choose_threads(None, "auto").count == 1
    with pytest.raises(InvalidConfig, match=r"names CPU 4, and this process may use 0-3,8-9"):
        choose_threads(None, "2-4")
    with pytest.raises(InvalidConfig, match=r"num_threads=3 is more than the 2 CPUs"):
        choose_threads(3, "0,2")


@pytest.mark.parametrize("text", ["", "all", "0-", "-1", "3-1", "0,,1", "0-99999", "1.5", "٣"])
def test_no_list_of_cpus(text: str) -> None:
    with pytest.raises(InvalidConfig, match="auto, none, or CPUs such as"):
        parse_cpus(text)


def test_a_list_of_cpus() -> None:
    assert parse_cpus("0-3,8") == (0, 1, 2, 3, 8)
    assert listed([8, 0, 1, 2, 3]) == "0-3,8"
    with pytest.raises(InvalidConfig, match="names a CPU twice"):
        parse_cpus("0-3,2")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_may_use_less(files: dict[str, str], quota: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, *_: object, **__: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert machine._quota() == quota
    monkeypatch.setattr(machine, "physical_cores", lambda: 3)
    assert machine.usable_cores() == (3 if quota is None else min(3, int(quota)))
