"""`octavo bench sweep`: bench serve over combinations of options, resumable; the highest rate that meets objectives."""

import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from octavo.bench import report, results
from octavo.bench.axes import Point, points
from octavo.bench.measures import objectives
from octavo.bench.own_server import OwnServer
from octavo.bench.rates import highest_rate
from octavo.bench.report_tables import flat
from octavo.bench.serve import PRESSURE, TARGET, WORKLOAD, Pressure, Target, details, run_load
from octavo.bench.workload import Workload
from octavo.config import EngineConfig
from octavo.config import options as engine_options
from octavo.errors import InvalidConfig, OctavoError
from octavo.flags import ENGINE, with_options

WARMUPS = 4  # requests to a server that was just started
FIGURES = ("completed", "failed", "request_throughput", "output_throughput", "request_goodput")


@with_options(positional="model", target=TARGET, pressure=PRESSURE, work=WORKLOAD, config=ENGINE)
def sweep(
    *,
    axes: Annotated[tuple[str, ...], Parameter(name="--sweep", consume_multiple=True, negative_iterable=())] = (),
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    find_rate: bool = False,
    attainment: float = 0.95,
    precision: float = 0.05,
    output_dir: Path = Path("sweep"),
    overwrite: bool = False,
    self_check: Literal["warn", "off"] = "warn",
    output_json: Path | None = None,
    output_html: Path | None = None,
    target: Target,
    pressure: Pressure,
    work: Workload,
    config: EngineConfig,
) -> None:
    """Measure a server at every combination of options; begun again, it goes on where it was.

    Without --base-url, --host or --port it starts a server of its own for each combination of engine options, and ends
    it. Every point is one run of octavo bench serve, in a file of its own. Exit status 1: a request failed, or a server
    did not start.

    Parameters
    ----------
    axes
        What is varied, such as request-rate=1,2,4 or max-num-batched-tokens=512,2048: any option of the load, the
        requests or the engine. Several make all combinations. Engine options have a server each, which is started and
        ended here; with --base-url, --host or --port a server is loaded that is running.
    goodput
        Objectives in milliseconds, such as ttft:300 tpot:30 e2el:2000.
    find_rate
        Look for the highest request rate that meets --goodput, at each combination, by bisection.
    attainment
        Share of all requests, failed ones too, that must meet the objectives.
    precision
        How near to the highest rate is near enough, as a share of it.
    output_dir
        Folder for a file a point, and the servers' logs. Begun again with it, a sweep goes on where it was.
    overwrite
        Measure points again that are there.
    self_check
        Find out at each point whether the client was the limit, and mark it.
    output_json
        File for the table; sweep.json in the folder of the points when not given.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    """
    slos = objectives(goodput)
    if find_rate and not slos:
        raise InvalidConfig("--find-rate needs --goodput, such as --goodput ttft:300 tpot:30.")
    for name, value in (("attainment", attainment), ("precision", precision)):
        if not 0 < value <= 1:
            raise InvalidConfig(f"{name}={value} is not allowed: it must be above 0 and at most 1.")
    usual = Target()
    running = bool(target.base_url) or (target.host, target.port) != (usual.host, usual.port)
    found = points(axes, (PRESSURE, TARGET, WORKLOAD), not running)
    if find_rate and any("request_rate" in point.values for point in found):
        raise InvalidConfig("--find-rate looks for the request rate itself: leave request-rate out of --sweep.")
    sweeping = Sweep(target, pressure, work, {} if running else given_options(config), slos, output_dir)
    sweeping.running, sweeping.overwrite, sweeping.self_check = running, overwrite, self_check
    for point in found:
        sweeping.settings(point)  # what cannot be is refused before anything is measured
        sweeping.stored(point)
    result = sweeping.run(found, attainment if find_rate else None, precision)
    result["axes"] = list(axes)
    show(result)
    results.write_json(output_json or output_dir / "sweep.json", result)
    if output_html:
        report.write(output_html, result)
    if any(row["failed"] for row in result["rows"]) or result["errors"]:
        sys.exit(1)


def given_options(config: EngineConfig) -> dict[str, Any]:
    """The engine options that differ from their defaults, flat."""
    values = {name: value for part in dataclasses.asdict(config).values() for name, value in part.items()}
    return {o.name: values[o.name] for o in engine_options() if o.name in values and values[o.name] != o.default}


class Sweep:
    """Measures points that are not there yet. `engine` are the options of the servers that it starts."""

    def __init__(
        self,
        target: Target,
        pressure: Pressure,
        work: Workload,
        engine: Mapping[str, Any],
        slos: Mapping[str, float],
        folder: Path,
    ) -> None:
        self.target, self.pressure, self.work = target, pressure, work
        self.engine, self.slos, self.folder = dict(engine), dict(slos), folder
        self.running = self.overwrite = False
        self.self_check = "off"
        self._server: OwnServer | None = None
        self._measured: set[str] = set()  # names of points that this sweep has measured itself

    def options(self, point: Point) -> dict[str, Any]:
        """Of the server that a point needs."""
        return {} if self.running else self.engine | dict(point.engine)

    def parts(self, point: Point) -> tuple[Target, Pressure, Workload]:
        """
        Raises:
            InvalidConfig: a value that cannot be.
        """
        load = dict(point.load)

        def changed(part: Any) -> Any:
            names = {field.name for field in dataclasses.fields(part)}
            return dataclasses.replace(part, **{name: value for name, value in load.items() if name in names})

        work = changed(self.work)
        if self.running:
            # The server keeps its prefix cache, so every point has prompts of its own.
            work = dataclasses.replace(work, seed=work.seed + zlib.crc32(point.name.encode()))
        return changed(self.target), changed(self.pressure), work

    def settings(self, point: Point) -> dict[str, Any]:
        """All that a point's figures depend on, as its file has it."""
        target, pressure, work = self.parts(point)
        options = self.options(point)
        EngineConfig.from_keywords("octavo bench sweep", **options)
        place = {"base_url": target.base_url, "host": target.host, "port": target.port} if self.running else {}
        dropped = {"api_key", "header", "base_url", "host", "port", "ready_check_timeout_sec"}
        about = results.environment()
        found = {
            "engine": options,
            "server": place,
            "requests": {name: v for name, v in dataclasses.asdict(target).items() if name not in dropped},
            "load": dataclasses.asdict(pressure),
            "workload": dataclasses.asdict(work),
            "goodput": self.slos,
            "octavo": about["versions"]["octavo"],
            "processor": about["processor"],
        }
        plain: dict[str, Any] = json.loads(json.dumps(results.plain(found)))
        return plain

    def stored(self, point: Point) -> dict[str, Any] | None:
        """The result of a point that is there, and without a failed request where another sweep measured it.

        Raises:
            InvalidConfig: it was measured with other settings; the message names them.
        """
        path = self.folder / point.file_name
        if not path.exists() or (self.overwrite and point.name not in self._measured):
            return None
        (result,) = report.read(path)
        before, now = (dict(flat(found)) for found in (result.get("sweep_settings") or {}, self.settings(point)))
        differing = [name for name in (*before, *now) if before.get(name) != now.get(name)]
        if differing:
            name = differing[0]
            raise InvalidConfig(
                f"{path} was measured with {name}={before.get(name)}, and this sweep has {name}={now.get(name)}.",
                "Take another --output-dir, or measure again with --overwrite.",
            )
        # A server that was ended with its sweep left requests that failed.
        return None if result["failed"] and point.name not in self._measured else result

    def run(self, found: Sequence[Point], attainment: float | None, precision: float) -> dict[str, Any]:
        """All points, those with the same server after each other; with `attainment` the highest rate of each."""
        rows: list[dict[str, Any]] = []
        highest: list[dict[str, Any]] = []
        errors: dict[str, str] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        with results.progress(len(found), "Points") as bar:
            for _, group in groupby(found, key=lambda point: point.engine):
                with ExitStack() as servers:  # started by the first point that has to be measured
                    for point in group:

                        def measure(point: Point, servers: ExitStack = servers) -> dict[str, Any]:
                            result = self.stored(point) or self._measure(point, servers)
                            rows.append(row_of(point, result))
                            return result

                        try:
                            if attainment is None:
                                measure(point)
                            else:
                                begin = len(rows)
                                highest.append(self._search(point, measure, attainment, precision))
                                rows[begin:] = sorted(rows[begin:], key=lambda row: float(row["request_rate"]))
                        except OctavoError as error:
                            errors[point.name] = str(error)
                            print(f"{point.name}: {error}", file=sys.stderr)
                        bar.update(1)
                self._server = None
        varied = dict.fromkeys(name for point in found for name in point.values)
        return {
            "kind": "sweep",
            "rows": rows,
            "num_varied": len(varied) + (attainment is not None),
            "highest": highest,
            "errors": errors,
            "goodput_slos_ms": self.slos,
            "attainment": attainment,
            "date": results.now(),
            "model_id": self.engine.get("model") or self.target.model or "the server's own",
            "configuration": self.settings(Point((), ())),
            **results.environment(),
        }

    def _search(
        self, point: Point, measure: Callable[[Point], dict[str, Any]], least: float, precision: float
    ) -> dict[str, Any]:
        """The row of the highest rate that enough requests meet at a point."""
        at_once = measure(point.with_rate(math.inf))
        if share(at_once) >= least:
            rate = math.inf
        elif not at_once.get("completed"):
            rate = 0.0
        else:
            guess = at_once["request_throughput"]
            rate = highest_rate(lambda rate: share(measure(point.with_rate(rate))), least, guess, precision)
        best = self.stored(point.with_rate(rate)) if rate else None
        row = row_of(point.with_rate(rate), best) if best else point.values | {"attainment": None}
        return row | {"highest_rate": rate}

    def _measure(self, point: Point, servers: ExitStack) -> dict[str, Any]:
        target, pressure, work = self.parts(point)
        if not self.running:
            if self._server is None:
                log = self.folder / f"server-{Point(point.engine, ()).file_name.removeprefix('point-')[:-5]}.log"
                self._server = servers.enter_context(OwnServer(self.options(point), log))
                # Not the name of a folder: the server's own name for its model.
                warm = dataclasses.replace(work, num_prompts=WARMUPS, seed=work.seed + 0x3A93)
                place = dataclasses.replace(target, base_url=f"http://127.0.0.1:{self._server.port}", model=None)
                run_load(place, Pressure(clients=1), warm, {}, [99.0], "off")
            target = dataclasses.replace(target, base_url=f"http://127.0.0.1:{self._server.port}", model=None)
            self._server.reset_prefix_cache()
        run = run_load(target, pressure, work, self.slos, [50.0, 90.0, 99.0], self.self_check)
        result = run.result | details(run.answers) | {"kind": "serve", "label": point.name, "point": point.values}
        result["sweep_settings"] = self.settings(point)
        results.write_json(self.folder / point.file_name, result)
        self._measured.add(point.name)
        return result


def share(result: Mapping[str, Any]) -> float:
    """Of all requests of a run, those that met the objectives."""
    met = result.get("request_goodput", 0.0) * result.get("duration", 0.0)
    return float(round(met) / max(1, result["num_prompts"]))


def row_of(point: Point, result: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = point.values | {name: result.get(name) for name in FIGURES if name in result}
    row |= {
        f"{kind}_{name}_ms": result.get(f"{kind}_{name}_ms") for name in ("ttft", "tpot") for kind in ("median", "p99")
    }
    if "request_goodput" in result:
        row["attainment"] = share(result)
    row["client_was_limit"] = bool((result.get("self_check") or {}).get("faults"))
    return row


def show(result: Mapping[str, Any]) -> None:
    """A line a point, and then the highest rates."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _KNOWN))
    heads = [*names, "Failed", "Requests/s", "Tokens/s", "TTFT", "P99", "TPOT", "P99"]
    with_goodput = any("attainment" in row for row in rows)
    lines = [
        [
            *(row.get(name) for name in names),
            f"{row.get('failed', 0)}{'*' if row['client_was_limit'] else ''}",
            *(row.get(key) for key in ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")),
            *(row.get(key) for key in ("median_tpot_ms", "p99_tpot_ms")),
            *([f"{row.get('attainment', 0):.0%}"] if with_goodput else []),
        ]
        for row in rows
    ]
    results.table([*heads, *(["Met"] if with_goodput else [])], lines)
    print("TTFT and TPOT are medians, in milliseconds.")
    if any(row["client_was_limit"] for row in rows):
        print("* The client was the limit: use more --clients or another machine.")
    for row in result["highest"]:
        point = ", ".join(f"{name}={row[name]}" for name in names if name in row and name != "request_rate")
        objectives = " ".join(f"{name}:{value:g}" for name, value in result["goodput_slos_ms"].items())
        rate = row["highest_rate"]
        where = f"{point}: " if point else ""
        if rate == math.inf:
            said = "all requests at once meet it; more --num-prompts say more"
        elif not rate:
            said = "no rate that was tried meets it"
        else:
            said = f"{rate:g} requests/s (met by {row['attainment']:.0%} of the requests)"
        print(f"{where}highest rate for {objectives} at {result['attainment']:.0%}: {said}")


_KNOWN = (*FIGURES, "attainment", "client_was_limit", "highest_rate", *(
    f"{kind}_{name}_ms" for name in ("ttft", "tpot") for kind in ("median", "p99")))  # fmt: skip
