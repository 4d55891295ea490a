"""Finds out the facts: everything at once, each with a time limit, and what fails is told instead of raised."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from octavo import env
from octavo.doctor import nvidia
from octavo.doctor.facts import Clock, Cores, Facts, Folder, Libraries, Limits, Model, Part, Port, Python
from octavo.doctor.probe import ProbeFailed, ask_module
from octavo.errors import InvalidConfig
from octavo.server.listening import listen
from octavo.server.options import ServerOptions
from octavo.version import __version__

LIBRARIES_SECONDS = 60.0  # importing PyTorch from a cold disk takes half of that
MODEL_SECONDS = 60.0
ALL_SECONDS = 90.0
COMPILERS = ("cc", "gcc", "clang", "g++", "ninja")


def gather(model: str | None, host: str, port: int) -> Facts:
    """Everything about this machine and, where one is named, about a model."""
    looks: dict[str, Callable[[], Any]] = {
        "python": _python,
        "packages": unmet_requirements,
        "libraries": _libraries,
        "nvidia": nvidia.look,
        "programs": lambda: {name: shutil.which(name) or "" for name in COMPILERS},
        "cores": cores,
        "limits": limits,
        "environment": env.everything,
        "folders": folders,
        "port": lambda: _port(host, port),
        "clock": _clock,
    }
    if model is not None:
        looks["model"] = lambda: look_at_model(model)
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def look(name: str) -> None:
        try:
            found[name] = looks[name]()
        except ProbeFailed as error:
            failed[name] = str(error)
        except Exception as error:  # a look that fails is a finding, not the end of the others
            failed[name] = f"{type(error).__name__}: {error}"

    # Daemons: a folder on a file system that is gone would hold the process up for ever.
    threads = {name: threading.Thread(target=look, args=(name,), daemon=True) for name in looks}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + ALL_SECONDS
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    for name in looks:
        if name not in found and name not in failed:
            failed[name] = f"no answer in {ALL_SECONDS:g} seconds"
    if model is not None and "model" not in found:
        found["model"] = Model(name=model)
    return Facts(octavo=__version__, system=_system(), failed=failed, **found)


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _python() -> Python:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Python(tuple(sys.version_info[:3]), struct.calcsize("P") * 8, sys.executable, headers.is_file())


def unmet_requirements() -> tuple[str, ...]:
    """What Octavo requires and the installed packages are not."""
    try:
        wanted = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return ()
    unmet = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{requirement.name} is not installed, and {needed} is needed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement.name} {version} is installed, and {needed} is needed")
    return tuple(unmet)


def _libraries() -> Libraries:
    answer = ask_module("octavo.doctor.libraries_probe", [], LIBRARIES_SECONDS)
    return Libraries(**{**answer, "arches": tuple(answer.get("arches", ()))})


def cores() -> Cores:
    """Processors that this process may use: by affinity, and by the time that its control group grants."""
    total = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(total))
    siblings = set()
    for cpu in allowed:
        text = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(text or str(cpu))
    return Cores(len(allowed), total, len(siblings), _quota())


def _quota() -> float | None:
    """CPUs of the control group, version 2 or 1."""
    with contextlib.suppress(ValueError):
        share, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
        if share and share != "max":
            return int(share) / int(period)
        share, period = (_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if share and int(share) > 0:
            return int(share) / int(period)
    return None


def limits() -> Limits:
    """What the system grants this process."""
    shared = Path("/dev/shm")
    return Limits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_least(_limit(resource.RLIMIT_NPROC), _pids()),
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
        available_memory=_available_memory(),
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _pids() -> int | None:
    text = _read("/sys/fs/cgroup/pids.max")
    return int(text) if text.isdigit() else None


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _available_memory() -> int:
    """Bytes: the least of what the host, the control group and the ulimit leave."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        texts = _read(f"/sys/fs/cgroup/{limit}"), _read(f"/sys/fs/cgroup/{used}")
        if all(text.isdigit() for text in texts):
            group.append(max(0, int(texts[0]) - int(texts[1])))
    return _least(free, *group, _limit(resource.RLIMIT_AS)) or 0


def folders() -> tuple[Folder, ...]:
    """Where Octavo and its libraries write."""
    wanted = [
        ("Octavo's cache", env.cache_root(), "OCTAVO_CACHE_ROOT"),
        ("The cache of the hub", env.hub_cache(), "HF_HOME"),
        ("Triton's cache", env.triton_cache(), "TRITON_CACHE_DIR"),
    ]
    found = [_folder(*one) for one in wanted]
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:
        return (*found, Folder("The folder for temporary files", "/tmp", "TMPDIR", 0, error.strerror or str(error)))
    return (*found, _folder("The folder for temporary files", Path(temporary), "TMPDIR"))


def _folder(what: str, path: Path, variable: str) -> Folder:
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
        with tempfile.NamedTemporaryFile(dir=place, prefix=".octavo-doctor-"):
            pass
    except OSError as error:
        return Folder(what, str(path), variable, 0, error.strerror or str(error))
    return Folder(what, str(path), variable, free)


def _port(host: str, port: int) -> Port:
    """As the server would listen."""
    where = f"port {port} of {host}"
    try:
        listen(ServerOptions(host=host, port=port)).close()
    except (InvalidConfig, socket.gaierror) as error:
        message, mend = (error.message, error.hint) if isinstance(error, InvalidConfig) else (str(error), "")
        return Port(where, message, mend)
    return Port(where)


def _clock() -> Clock:
    installed = Path(__file__).stat().st_mtime
    return Clock(time.time(), installed, _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"))


def look_at_model(name: str) -> Model:
    answer = ask_module("octavo.doctor.model_probe", [name], MODEL_SECONDS)
    parts = {part: Part(**answer.pop(part)) for part in ("files", "tokenizer", "template")}
    return Model(name=name, **{**answer, **parts})


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
