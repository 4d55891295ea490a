"""`octavo doctor`: a healthy machine, then one fault at a time; each gives its one line and nothing else."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octavo import env
from octavo.doctor import checks
from octavo.doctor.facts import Clock, Cores, Facts, Folder, Gpu, Libraries, Limits, Model, Nvidia, Part, Port, Python
from octavo.doctor.report import EXIT_STATUS, show
from octavo.findings.redact import Redactor

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
H200 = Gpu("NVIDIA H200", 140 * GIB, GIB // 2, (9, 0))
GPU_MACHINE = Facts(
    octavo="0.1.0",
    system="Linux x86_64",
    python=Python((3, 12, 3), 64, "/usr/bin/python3"),
    libraries=Libraries(
        torch="2.13.0", torch_cuda="13.0", torch_gpus=2, arches=("sm_80", "sm_90", "sm_100", "compute_120"),
        nccl="2.28.9", bfloat16=True, numpy="2.3.5", triton="3.7.0", neighbours={"scikit-learn": "", "scipy": ""},
    ),
    nvidia=Nvidia("580.95.05", "13.0", (H200, H200), links=(True,) * 18),
    programs={"cc": "/usr/bin/cc", "g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja"},
    cores=Cores(64, 64, 32),
    limits=Limits(open_files=65536, processes=100_000, shared_memory=64 * GIB, available_memory=400 * GIB),
    folders=(Folder("Octavo's cache", "/c", "OCTAVO_CACHE_ROOT", 90 * GIB), Folder("Temporary", "/tmp", "TMPDIR", GIB)),
    port=Port("port 8000 of 0.0.0.0"),
    clock=Clock(1.8e9, 1.79e9, "tsc"),
    model=Model("m", Part("a"), Part("b"), Part("c"), LLAMA_8B, 16 * GIB),
)  # fmt: skip
CPU_MACHINE = replace(
    GPU_MACHINE, nvidia=Nvidia(), libraries=replace(GPU_MACHINE.libraries, torch_cuda="", torch_gpus=0, arches=())
)


def lines(facts: Facts, *quiet: str) -> dict[str, tuple[str, str]]:
    """Level and text of what is not in order, by check; `quiet` are levels that are left out."""
    results = {r.check: (r.finding.level, r.finding.found) for r in checks.run(facts)}
    return {check: line for check, line in results.items() if line[0] not in ("ok", *quiet)}


def libraries(**changed: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, libraries=replace(facts.libraries, **changed))


def gpus(*given: Gpu, **changed: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, nvidia=replace(facts.nvidia, gpus=given or facts.nvidia.gpus, **changed))


def limits(**changed: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, limits=replace(facts.limits, **changed))


def variable(name: str, value: str) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, environment={name: value})


def changed(**fields: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, **fields)


def model(**fields: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, model=replace(facts.model or Model(), **fields))


# What is changed, the check that must speak, its level, and what it must say.
GPU_FAULTS: dict[str, tuple[Callable[[Facts], Facts], str, str, str]] = {
    "old python": (changed(python=Python((3, 10, 1))), "Python", "error", "This is Python 3.10.1"),
    "32 bits": (changed(python=Python((3, 12, 1), 32)), "Python", "error", "32 bits"),
    "old package": (
        changed(packages=("numpy 1.26.4 is installed, and numpy>=2.0 is needed",)), "Packages", "error", "numpy 1.26.4",
    ),
    "numpy broken": (libraries(numpy_fault="ImportError: libopenblas"), "NumPy", "error", "libopenblas"),
    "scikit-learn of another numpy": (
        libraries(neighbours={"scikit-learn": "ValueError: numpy.dtype size changed", "scipy": ""}),
        "NumPy", "warning", "scikit-learn does not fit the installed NumPy",
    ),
    "driver and library differ": (
        gpus(fault="Failed to initialize NVML: Driver/library version mismatch"),
        "NVIDIA driver", "error", "Driver/library version mismatch",
    ),
    "driver too old": (gpus(cuda="12.4"), "CUDA", "error", "built for CUDA 13.0, driver 580.95.05 has CUDA 12.4"),
    "torch for CPUs": (libraries(torch_cuda=""), "CUDA", "error", "2.13.0 is for CPUs only"),
    "GPUs hidden": (
        lambda facts: variable("CUDA_VISIBLE_DEVICES", "")(libraries(torch_gpus=0)(facts)),
        "CUDA", "warning", "CUDA_VISIBLE_DEVICES=''",
    ),
    "torch sees none": (libraries(torch_gpus=0), "CUDA", "error", "torch finds no NVIDIA GPU"),
    "GPU too old": (
        gpus(replace(H200, name="Tesla V100", capability=(7, 0))),
        "GPU kernels", "error", "Tesla V100 has compute",
    ),
    "GPU newer than torch": (
        lambda facts: gpus(replace(H200, capability=(12, 0)))(libraries(arches=("sm_80", "sm_90"))(facts)),
        "GPU kernels", "error", "sm_120",
    ),
    "numpy and with it torch": (
        libraries(numpy_fault="ImportError: x", torch_fault="ImportError: x"), "NumPy", "error", "NumPy cannot",
    ),
    "torch broken": (
        libraries(torch_fault="OSError: libcudart", triton_fault="no torch"), "PyTorch", "error", "libcudart",
    ),
    "no triton": (libraries(triton_fault="ModuleNotFoundError: No module named 'triton'"), "Triton", "error", "No"),
    "GPU in use": (
        gpus(replace(H200, used=35 * GIB), holders=("python (pid 4711)",)),
        "GPU memory", "warning", "35.0 GiB of 140.0 GiB of GPU 0 are in use by python (pid 4711)",
    ),
    "NVLink down": (gpus(links=(True,) * 16 + (False,) * 2), "GPU links", "warning", "2 of 18 NVLinks"),
    "no NCCL": (libraries(nccl=""), "GPU links", "error", "no NCCL"),
    "NCCL without peers": (variable("NCCL_P2P_DISABLE", "1"), "GPU links", "warning", "NCCL_P2P_DISABLE=1"),
    "no C compiler": (changed(programs={}), "Compiler", "error", "no C compiler"),
    "no headers": (changed(python=Python((3, 12, 3), headers=False)), "Compiler", "error", "Python.h"),
    "few cores": (changed(cores=Cores(12, 64, 6)), "CPU cores", "warning", "12 CPU cores for 2 GPUs"),
    "small share of the cores": (changed(cores=Cores(64, 64, 32, quota=4.0)), "CPU cores", "warning", "4 CPU cores"),
    "small shared memory": (limits(shared_memory=64 << 20), "Shared memory", "warning", "64 MiB"),
    "few open files": (limits(open_files=1024), "Open files", "warning", "At most 1,024 files"),
    "few processes": (limits(processes=100), "Processes", "warning", "At most 100"),
    "clock in the past": (changed(clock=Clock(0.0, 1.79e9)), "Clock", "error", "1970-01-01"),
    "slow clock": (changed(clock=Clock(1.8e9, 1.79e9, "hpet")), "Clock", "warning", "from hpet"),
    "blocking launches": (variable("CUDA_LAUNCH_BLOCKING", "1"), "Settings", "warning", "CUDA_LAUNCH_BLOCKING=1"),
    "interpreted kernels": (variable("TRITON_INTERPRET", "1"), "Settings", "warning", "TRITON_INTERPRET=1"),
    "proxy without scheme": (variable("HTTPS_PROXY", "proxy:3128"), "Hugging Face", "error", "HTTPS_PROXY=proxy:3128"),
    "misspelt variable": (
        variable("OCTAVO_CACHEROOT", "/x"), "Settings", "warning", "Did you mean OCTAVO_CACHE_ROOT?",
    ),
    "broken token": (variable("HF_TOKEN", "hf_ab cd"), "Hugging Face", "error", "HF_TOKEN has blanks"),
    "model too large": (model(weight_bytes=200 * GIB), "Model's memory", "error", "too much"),
    "host too small for it": (limits(available_memory=20 * GIB), "Model's memory", "warning", "20.0 GiB"),
}  # fmt: skip
CPU_FAULTS: dict[str, tuple[Callable[[Facts], Facts], str, str, str]] = {
    "no torch": (libraries(torch_fault="ImportError: libtorch.so"), "PyTorch", "error", "libtorch.so"),
    "no g++": (changed(programs={"ninja": "/usr/bin/ninja"}), "Compiler", "warning", "no g++"),
    "many threads": (variable("OMP_NUM_THREADS", "128"), "CPU threads", "warning", "OMP_NUM_THREADS=128"),
    "threads in words": (variable("OMP_NUM_THREADS", "all"), "CPU threads", "warning", "OMP_NUM_THREADS=all"),
    "container's share": (changed(cores=Cores(64, 64, 32, quota=0.5)), "CPU threads", "warning", "0.5 of one CPU"),
    "weights above memory": (limits(available_memory=10 * GIB), "Model's memory", "error", "weights take 14.96 GiB"),
    "disk nearly full": (
        changed(folders=(Folder("Octavo's cache", "/c", "OCTAVO_CACHE_ROOT", 10 << 20),)), "Disk", "warning", "10 MiB",
    ),
    "read-only cache": (
        changed(folders=(Folder("Octavo's cache", "/c", "OCTAVO_CACHE_ROOT", 0, "Read-only file system"),)),
        "Disk", "error", "Read-only file system",
    ),
    "no memory": (lambda f: limits(available_memory=GIB)(replace(f, model=None)), "Memory", "warning", "1.0 GiB"),
}  # fmt: skip


def test_a_healthy_machine_has_nothing_to_say() -> None:
    for facts in (GPU_MACHINE, CPU_MACHINE, replace(GPU_MACHINE, model=None)):
        assert lines(facts) == {}
        assert EXIT_STATUS[checks.worst(checks.run(facts))] == 0


@pytest.mark.parametrize(
    ("machine", "fault"),
    [(machine, fault) for machine in (GPU_FAULTS, CPU_FAULTS) for fault in machine],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_has_its_one_line(machine: dict[str, Any], fault: str) -> None:
    change, check, level, says = machine[fault]
    facts = change(GPU_MACHINE if machine is GPU_FAULTS else CPU_MACHINE)
    found = lines(facts, "skipped")
    assert list(found) == [check]
    # Only what breaks the ground under other checks leaves some of them out.
    assert len(lines(facts)) == 1 or check in ("PyTorch", "NumPy")
    assert found[check][0] == level
    assert says in found[check][1]
    finding = next(r.finding for r in checks.run(facts) if r.check == check)
    assert finding.why.endswith(".") and finding.mend, finding
    assert EXIT_STATUS[checks.worst(checks.run(facts))] == {"warning": 1, "error": 2}[level]


@pytest.mark.parametrize("field", sorted({name for check in checks.CHECKS for name in check.needs} - {"model"}))
def test_what_cannot_be_found_out_is_one_warning_and_no_traceback(field: str) -> None:
    empty = replace(Facts(), **{field: getattr(Facts(), field)})
    facts = replace(CPU_MACHINE, **{field: getattr(empty, field)}, failed={field: "it hung"})
    found = lines(facts)
    assert [level for level, _ in found.values()].count("warning") == 1
    assert all(level in ("warning", "skipped") for level, _ in found.values())
    assert "it hung" in next(text for level, text in found.values() if level == "warning")


def test_every_check_has_its_row_on_the_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "doctor.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows[rows.index("Python") :] == [check.name for check in checks.CHECKS]
    assert f"{len(checks.CHECKS)} checks" in (Path(__file__).parent.parent / "CHANGELOG.md").read_text()


def test_all_variables_of_ours_are_known() -> None:
    folder = Path(env.__file__).parent
    names = {name for path in folder.rglob("*.py") for name in re.findall(r'"(OCTAVO_[A-Z_]*[A-Z])"', path.read_text())}
    assert names == set(env.OWN)


def test_a_later_gpu_runs_older_machine_code_of_its_generation_and_any_older_ptx() -> None:
    for arches, capability, good in (
        (("sm_80",), (8, 6), True), (("sm_86",), (8, 0), False), (("sm_80",), (9, 0), False),
        (("compute_80",), (12, 0), True), (("compute_90a",), (8, 9), False), (("sm_90a",), (9, 0), True),
    ):  # fmt: skip
        facts = gpus(replace(H200, capability=capability))(libraries(arches=arches)(GPU_MACHINE))
        assert ("GPU kernels" not in lines(facts)) == good, (arches, capability)


@pytest.mark.parametrize("width", [80, 120])
def test_the_worst_stands_last_and_colours_are_for_terminals(width: int) -> None:
    facts = replace(GPU_MACHINE, port=Port("port 1", "Cannot listen on port 1: busy.", "Stop it."))
    facts = variable("OMP_NUM_THREADS", "999")(facts)
    text = io.StringIO()
    show(Console(width=width, file=text), facts, checks.run(facts), Redactor())
    shown = [line.rstrip() for line in text.getvalue().splitlines()]
    assert "\x1b" not in text.getvalue()
    assert all(len(line) <= width for line in shown)
    levels = [line.split()[0] for line in shown if line.startswith(("ok", "warning", "error"))]
    assert levels == sorted(levels, key=["ok", "warning", "error"].index)
    assert shown[-1] == "1 error, 1 warning; 24 of 26 checks are in order."
    coloured = io.StringIO()
    show(Console(width=width, file=coloured, force_terminal=True), facts, checks.run(facts), Redactor())
    assert "\x1b[1;31merror" in coloured.getvalue()
