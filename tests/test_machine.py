"""What the machine gives: the container's limit counts, not the host's memory."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.errors import InvalidConfig
from octavo.worker import machine

GIB = 2**30


@pytest.mark.case("MEM-04")
def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16777216 kB\n",
        "/sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{GIB // 2}\n",
    }

    def read(path: Path, *_: object, **__: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.available_memory() == 3 * GIB // 2
    assert machine.cpu_cache_bytes() == int(0.4 * (3 * GIB // 2))
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.available_memory() == 16 * GIB
    assert machine.cpu_cache_bytes() == 4 * GIB
    del files["/sys/fs/cgroup/memory.max"]
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = str(3 * GIB)
    files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = str(GIB)
    assert machine.available_memory() == 2 * GIB


@pytest.mark.case("MEM-04")
def test_a_limit_on_the_address_space_counts() -> None:
    code = (
        "import resource\n"
        "from octavo.worker import machine\n"
        "resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))\n"
        "print(machine.available_memory())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < int(out) < 12 * GIB


def test_a_type_is_chosen_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, fast in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda supported=supported: supported)
        assert machine.choose_dtype("auto", None) == fast
        assert machine.choose_dtype("auto", "bfloat16") == fast
        assert machine.choose_dtype("auto", "float16") == fast
        assert machine.choose_dtype("auto", "float32") == torch.float32
        assert machine.choose_dtype("float16", "float32") == torch.float16
    with pytest.raises(InvalidConfig, match="float128"):
        machine.choose_dtype("float128", None)


def test_there_is_at_least_one_core() -> None:
    assert machine.physical_cores() >= 1
    assert machine.resident_memory() > 2**20
