"""`octavo bench startup`: time to ready and to the first token, each start in a new process, by phase."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import env
from octavo.bench import report, results
from octavo.bench.measures import percentile
from octavo.bench.sweep import given_options
from octavo.config import EngineConfig
from octavo.errors import InvalidConfig, OctavoError
from octavo.flags import ENGINE, with_options
from octavo.hub import find_model

PERCENTS = (10, 25, 50, 75, 90, 99)
CACHES = {
    "cold": "no compiled kernels or converted tokenizers, weights not in memory",
    "warm": "all of these are there from an earlier start",
}


@with_options(positional="model", config=ENGINE)
def startup(
    *,
    num_iters_cold: int = 3,
    num_iters_warmup: int = 1,
    num_iters_warm: int = 3,
    input_len: int = 32,
    output_json: Path | None = None,
    output_html: Path | None = None,
    config: EngineConfig,
) -> None:
    """Time until an engine is ready and until its first token, each start in a new process.

    A cold start finds an empty cache (kernels are compiled, tokenizers converted), and its weights are dropped from the
    system's file cache before; what else the system holds in memory (Python, torch) stays there. A warm one finds all.

    Parameters
    ----------
    num_iters_cold
        Cold starts.
    num_iters_warmup
        Starts between them that count in nothing and fill the caches.
    num_iters_warm
        Warm starts.
    input_len
        Tokens of the prompt of the first token.
    output_json
        File for the result.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    """
    given = {"num_iters_cold": num_iters_cold, "num_iters_warmup": num_iters_warmup, "num_iters_warm": num_iters_warm}
    for name, value in given.items():
        if value < 0:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be from 0.")
    if not num_iters_cold + num_iters_warm:
        raise InvalidConfig("num_iters_cold=0 and num_iters_warm=0 leave nothing to measure.")
    if input_len < 1:
        raise InvalidConfig(f"input_len={input_len} is not allowed: it must be from 1.")
    options = {"engine": located(config), "input_len": input_len}
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with results.progress(num_iters_cold + num_iters_warmup + num_iters_warm, "Starts") as bar:
        for kind, count in (("cold", num_iters_cold), ("warmup", num_iters_warmup), ("warm", num_iters_warm)):
            for _ in range(count):
                found = one_start(options, cold=kind == "cold")
                starts.get(kind, []).append(found)
                bar.update(1)
    result = summary(starts) | {
        **given,
        "input_len": input_len,
        "caches": CACHES,
        "date": results.now(),
        "model_id": config.model.model,
        "configuration": next(one for kind in starts.values() for one in kind)["configuration"],
        **results.environment(),
    }
    show(result)
    if output_json:
        results.write_json(output_json, result)
    if output_html:
        report.write(output_html, result)


def located(config: EngineConfig) -> dict[str, Any]:
    """The engine's options with folders for names: a cold start has another cache, where no pulled model is.

    Raises:
        ModelNotFound: there is no such model.
    """
    options = given_options(config)
    files = find_model(config.model.model, revision=config.model.revision, download_dir=config.model.download_dir)
    options |= {"model": str(files.gguf or files.folder)}
    options.pop("revision", None)
    if config.model.tokenizer:
        options["tokenizer"] = str(find_model(config.model.tokenizer, weights=False).folder)
    return options


def one_start(options: Mapping[str, Any], cold: bool) -> dict[str, Any]:
    """Seconds of each phase of a start in a new process, in their order, `startup` and `first_token` in all.

    Raises:
        OctavoError: it failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-startup-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(options))
        environment = env.for_child(sys.path)
        if cold:
            environment |= {"OCTAVO_CACHE_ROOT": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
            drop_from_memory(Path(options["engine"]["model"]))
        words = [sys.executable, "-m", "octavo.bench.start_child", str(folder / "options.json"), str(folder / "found")]
        begin = time.monotonic()
        child = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if child.returncode:
            lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
            raise OctavoError(f"A start failed: {lines[-1]}")
        found: dict[str, Any] = json.loads((folder / "found").read_text())
    phases = {"interpreter": found["begun"] - begin, "imports": found["imported"] - found["begun"], **found["phases"]}
    phases["rest of the start"] = found["ready"] - begin - sum(phases.values())
    phases["first token"] = found["answered"] - found["ready"]
    return {
        "phases": phases,
        "startup": found["ready"] - begin,
        "first_token": found["answered"] - begin,
        "configuration": found["configuration"],
    }


def drop_from_memory(model: Path) -> None:
    """Let the system forget what it holds of the weights; pages that another process uses stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in sorted(model.iterdir()) if model.is_dir() else [model]:
        if path.suffix in (".safetensors", ".gguf"):
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def summary(starts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A row a phase and kind of start, and the times in all."""
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"kind": "startup", "num_varied": 2}
    for kind, measured in starts.items():
        if not measured:
            continue
        for phase in dict.fromkeys(phase for one in measured for phase in one["phases"]):
            seconds = [one["phases"].get(phase, 0.0) for one in measured]
            mean = statistics.fmean(seconds)
            rows.append({"caches": kind, "phase": phase, "seconds": mean} | {"samples": {"seconds": seconds}})
        for name, key in (("startup", "startup"), ("first_token", "first_token")):
            times = [one[key] for one in measured]
            found[f"avg_{kind}_{name}_time"] = statistics.fmean(times)
            found[f"{kind}_{name}_times"] = times
            found[f"{kind}_{name}_percentiles"] = {str(p): percentile(times, p) for p in PERCENTS}
    return found | {"rows": rows}


def show(result: Mapping[str, Any]) -> None:
    """A block for cold and one for warm starts."""
    print(f"{' STARTUP TIME BENCHMARK RESULTS ':=^{results.WIDTH}}")
    for kind in ("cold", "warm"):
        if f"avg_{kind}_startup_time" not in result:
            continue
        print(f"{kind.upper()}: {result['caches'][kind]}")
        rows = [row for row in result["rows"] if row["caches"] == kind]
        heads = ["Seconds", "Mean", "Least", "Most"]
        lines: list[list[Any]] = []
        for row in rows:
            lines.append([row["phase"], *_spread(row["samples"]["seconds"])])
        lines.append(["Startup", *_spread(result[f"{kind}_startup_times"])])
        lines.append(["Startup and first token", *_spread(result[f"{kind}_first_token_times"])])
        results.table(heads, lines)
        print(f"Avg startup time: {result[f'avg_{kind}_startup_time']:.2f} seconds")
        for percent in ("50", "90", "99"):
            print(f"{percent}% percentile: {result[f'{kind}_startup_percentiles'][percent]:.2f} seconds")
        print("=" * results.WIDTH)


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values), min(values), max(values)]
