"""`octavo bench serve`: load on a running server that speaks OpenAI's API, ours or another; never loads torch."""

import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter
from tqdm import tqdm

from octavo.bench import client, report, results
from octavo.bench.arrivals import arrivals, ramp
from octavo.bench.measures import DEFINITIONS, TITLES, is_good, objectives, summary
from octavo.bench.self_check import check
from octavo.bench.workload import Item, Workload, items
from octavo.config import options_of
from octavo.errors import InvalidConfig, OctavoError
from octavo.flags import Family, with_options
from octavo.known import Elsewhere
from octavo.tools.server_client import NoAnswer, Server

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and what every request of the run carries."""

    backend: Literal["openai", "vllm", "openai-chat"] = "openai"
    """Kind of request: completions (openai and vllm are the same), or chat."""
    base_url: str | None = None
    """Address, in place of --host and --port: http://HOST:PORT or https://HOST."""
    host: str = "127.0.0.1"
    """Host of the server."""
    port: int = 8000
    """Port of the server."""
    endpoint: str | None = None
    """Path of requests; that of the backend when not given."""
    api_key: str | None = None
    """Key that requests carry; OCTAVO_API_KEY or OPENAI_API_KEY when not given."""
    header: tuple[str, ...] = ()
    """A further header, NAME=VALUE; may be repeated."""
    model: str | None = None
    """Name of the model; the first of /v1/models when not given."""
    prompts: Literal["auto", "ids", "text"] = "auto"
    """Random prompts as token ids, or as the text that the server's /detokenize makes of them. auto: ids for completions, text for chat."""  # noqa: E501
    lowest_id: int = 300
    """Random prompts have no token id below: special ones are often there."""
    vocab_size: int = 32000
    """Random prompts have no token id from here on."""
    ignore_eos: bool = True
    """Let answers have exactly the length asked for."""
    temperature: float | None = None
    """Sampling temperature; the server's default when not given."""
    top_p: float | None = None
    """Sampling nucleus; the server's default when not given."""
    extra_body: str = "{}"
    """JSON object of further request fields."""
    ready_check_timeout_sec: float = 60.0
    """Seconds to wait for /health before giving up."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """When requests are sent."""

    request_rate: float = math.inf
    """Requests/s; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is Poisson, below 1 bursts, inf makes all gaps equal."""
    max_concurrency: int | None = None
    """Most requests at once; a request's wait for its place counts in no latency."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Let the rate go from --ramp-up-start-rps to --ramp-up-end-rps, in place of --request-rate."""
    ramp_up_start_rps: float | None = None
    """Requests/s at the start of a ramp."""
    ramp_up_end_rps: float | None = None
    """Requests/s at the end of a ramp."""
    num_warmups: int = 0
    """Requests before the run that count in nothing; they have prompts of their own."""
    clients: int | None = None
    """Client processes; half the cores, at most 8, when not given."""

    def __post_init__(self) -> None:
        for name in (
            "request_rate",
            "burstiness",
            "max_concurrency",
            "ramp_up_start_rps",
            "ramp_up_end_rps",
            "clients",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidConfig(f"{name}={value} is not allowed: it must be above 0.")
        if self.num_warmups < 0:
            raise InvalidConfig(f"num_warmups={self.num_warmups} is not allowed: it must be from 0.")
        ramp_given = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(ramp_given) and not all(ramp_given):
            raise InvalidConfig("A ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps.")
        if self.ramp_up_strategy and not math.isinf(self.request_rate):
            raise InvalidConfig("Give either --request-rate or a ramp.")


_NOT_HERE = {
    "tokenizer": Elsewhere("token counts are the server's own; --prompts text makes texts of exact lengths"),
    "percentile_method": Elsewhere("percentiles lie between ranks, as numpy's do"),
    "trust_remote_code": Elsewhere("no code of a model is run"),
    "use_beam_search": Elsewhere("there is no beam search"),
    "logprobs": Elsewhere("put it into --extra-body"),
    "disable_tqdm": Elsewhere("the progress bar goes to standard error", (None, False, True)),
    "save_detailed": Elsewhere("use --save-result and --detailed"),
}


def _family(kind: type, title: str, elsewhere: Mapping[str, Elsewhere] | None = None) -> Family:
    return Family(lambda owner, **given: kind(**given), tuple(options_of(kind, title)), elsewhere or {})


TARGET = _family(Target, "Server", _NOT_HERE)
PRESSURE = _family(Pressure, "Load")
WORKLOAD = _family(Workload, "Workload")


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: figures and settings under vLLM's keys, and the answers behind them."""

    result: dict[str, Any]
    answers: list[client.Answer]


@with_options(target=TARGET, pressure=PRESSURE, work=WORKLOAD)
def serve(
    *,
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    percentile_metrics: str = "ttft,tpot,itl",
    metric_percentiles: str = "99",
    self_check: Literal["refuse", "warn", "off"] = "refuse",
    save_result: bool = False,
    detailed: bool = False,
    result_dir: Path = Path("."),
    result_filename: str | None = None,
    append_result: bool = False,
    output_html: Path | None = None,
    json_lines: Annotated[Path | None, Parameter(name="--json")] = None,
    label: str = "",
    metadata: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    target: Target,
    pressure: Pressure,
    work: Workload,
) -> None:
    """Load a running server, ours or another with OpenAI's API, and report what it delivers.

    Exit status 1: a request failed; 3: the client was the limit, and nothing is reported.

    Parameters
    ----------
    goodput
        Objectives in milliseconds, such as ttft:300 tpot:30 e2el:2000; goodput is requests/s that meet all of them.
    percentile_metrics
        What to print; the JSON has all. ttft: from sending to the first chunk with text (an empty one is none). itl:
        gaps between chunks with text. tpot: (e2el - ttft) / (output tokens - 1). e2el: from sending to the last
        chunk. client_queue_time: the wait for a place under --max-concurrency, which counts in no other. Tokens are
        those of the server's usage; failed requests are in no average.
    metric_percentiles
        Percentiles, such as 50,90,99.
    self_check
        Find out whether the client was the limit, and then refuse to report, or warn.
    save_result
        Write a JSON file with figures, settings and versions.
    detailed
        Let the JSON have the times of every request too.
    result_dir
        Folder of the JSON file.
    result_filename
        Its name; label, rate, model and date when not given.
    append_result
        Add to the file, a line a run.
    output_html
        File for the result as one page with figures, which needs no network and no other file.
    json_lines
        Also add the result as a line to this file.
    label
        Kept in the result.
    metadata
        KEY=VALUE pairs, kept in the result.
    """
    metrics = [name.strip() for name in percentile_metrics.split(",") if name.strip()]
    unknown = [name for name in metrics if name not in TITLES]
    if unknown:
        raise InvalidConfig(f"--percentile-metrics has no {unknown[0]!r}: there are {', '.join(TITLES)}.")
    percents = _percents(metric_percentiles)
    run = run_load(target, pressure, work, objectives(goodput), percents, self_check)
    result = run.result | {"label": label, "metadata": dict(_pair(text) for text in metadata)}
    if detailed:
        result |= details(run.answers)
    if self_check == "refuse" and (result.get("self_check") or {}).get("faults"):
        print(f"octavo: nothing is reported: {_why(result)}", file=sys.stderr)
        sys.exit(3)
    results.show_serving(result, metrics, percents)
    if (result.get("self_check") or {}).get("faults"):
        print(f"Take these figures with care: {_why(result)}")
    if any(
        model.get("owned_by") == "octavo" for model in result["server"].get("models") or () if isinstance(model, dict)
    ):
        print("How far this is from the limit of the server's machine: octavo bench throughput, there, says it.")
    if save_result or result_filename:
        concurrency = f"-concurrency{pressure.max_concurrency}" if pressure.max_concurrency else ""
        model = str(result["model_id"]).rsplit("/", 1)[-1]
        name = f"{label or target.backend}-{pressure.request_rate}qps{concurrency}-{model}-{result['date']}.json"
        results.write_json(result_dir / (result_filename or name), result, append=append_result)
    if json_lines:
        results.write_json(json_lines, result, append=True)
    if output_html:
        report.write(output_html, result | details(run.answers))
    if result["failed"]:
        sys.exit(1)


def run_load(
    target: Target,
    pressure: Pressure,
    work: Workload,
    goodput: Mapping[str, float],
    percents: list[float],
    self_check: str,
) -> Run:
    """Wait for the server, warm it up, and load it once."""
    url = target.base_url or f"http://{target.host}:{target.port}"
    server = Server(url, target.api_key)
    wait_until_ready(server, target.ready_check_timeout_sec)
    model = target.model or server.model()
    rng = random.Random(work.seed + 1)  # arrivals do not depend on the number of prompts drawn
    processes = pressure.clients or max(1, min(8, (os.cpu_count() or 2) // 2))
    found = items(work, target.lowest_id, target.vocab_size - 1, lambda text: _count(server, model, text))
    parts = urlsplit(server.url)
    secure = parts.scheme == "https"
    place = (parts.hostname or "", parts.port or (443 if secure else 80))
    concurrency = pressure.max_concurrency or 0
    if pressure.num_warmups:
        other = Workload(**asdict(work) | {"seed": work.seed + 0x5EED, "num_prompts": pressure.num_warmups})
        warm = items(other, target.lowest_id, target.vocab_size - 1, lambda text: _count(server, model, text))
        requests = [prepared(target, server, model, item, place[0], parts.path) for item in warm]
        answers, _ = client.send(*place, requests, [0.0] * len(requests), concurrency, processes, secure=secure)
        bad = [answer for answer in answers if not is_good(answer)]
        if bad:
            print(f"{len(bad)} of {len(answers)} warm-up requests failed: {bad[0].error}", file=sys.stderr)
    requests = [prepared(target, server, model, item, place[0], parts.path) for item in found]
    events: list[dict[str, float]] = []
    if pressure.ramp_up_strategy:
        first, last = pressure.ramp_up_start_rps or 1.0, pressure.ramp_up_end_rps or 1.0
        moments, events = ramp(len(found), pressure.ramp_up_strategy, first, last, pressure.burstiness, rng)
    else:
        moments = arrivals(len(found), pressure.request_rate, pressure.burstiness, rng)
    with tqdm(total=len(found), desc="Requests", unit="req", disable=not sys.stderr.isatty()) as bar:
        answers, load = client.send(*place, requests, moments, concurrency, processes, bar.update, secure)
    result = summary(answers, goodput, percents)
    result |= {
        "date": results.now(),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(found),
        "request_rate": str(pressure.request_rate),
        "burstiness": pressure.burstiness,
        "max_concurrency": pressure.max_concurrency,
        "goodput_slos_ms": dict(goodput),
        "rps_change_events": events,
        "configuration": {
            "target": asdict(target) | {"api_key": None, "header": ()},
            "load": asdict(pressure),
            "workload": asdict(work),
        },
        "server": _about(server),
        "prefix_cache": "as the server had it before the run; random prompts of another seed share no block with it",
        "definitions": DEFINITIONS.strip(),
    } | results.environment()
    if self_check != "off" and result["completed"]:
        result["self_check"] = check(result, load, processes).as_json()
    return Run(result, answers)


def wait_until_ready(server: Server, seconds: float) -> None:
    """
    Raises:
        NoAnswer: /health was not 200 within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            status = server.call("GET", "/health")[0]
            if status == 200 or status in (401, 404):  # another server may have no such route
                return
            why = f"/health answers {status}"
        except NoAnswer as error:
            why = error.message
        if time.monotonic() > deadline:
            raise NoAnswer(f"The server was not ready after {seconds:g} s: {why}")
        time.sleep(0.2)


def prepared(target: Target, server: Server, model: str, item: Item, host: str, prefix: str = "") -> bytes:
    """An HTTP request, ready to be written."""
    chat = target.backend == "openai-chat"
    prompt: Any = item.prompt
    if isinstance(prompt, list) and (target.prompts == "text" or (chat and target.prompts == "auto")):
        prompt = server.ask("POST", "/detokenize", {"model": model, "tokens": prompt})["prompt"]
    if chat and not isinstance(prompt, str):
        raise InvalidConfig("A chat message is no list of token ids.", "Leave --prompts at auto.")
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": item.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": target.ignore_eos,
    }
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {name: v for name in ("temperature", "top_p") if (v := getattr(target, name)) is not None}
    body |= _object(target.extra_body)
    headers = {"host": host, "content-type": "application/json", **server.headers}
    headers |= {name.lower(): value for name, value in (_pair(text) for text in target.header)}
    data = json.dumps(body).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    path = prefix + (target.endpoint or ENDPOINTS[target.backend])
    return f"POST {path} HTTP/1.1\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _about(server: Server) -> dict[str, Any]:
    """What the server says of itself, where it does."""
    try:
        status, _, content = server.call("GET", "/version")
        models = server.call("GET", "/v1/models")[2]
    except OctavoError:
        return {}
    found: dict[str, Any] = {"version": content} if status == 200 else {}
    return found | ({"models": models["data"]} if isinstance(models, dict) and "data" in models else {})


def _count(server: Server, model: str, text: str) -> int:
    """Tokens of a text, as the server counts them."""
    return int(server.ask("POST", "/tokenize", {"model": model, "prompt": text})["count"])


def details(answers: list[client.Answer]) -> dict[str, Any]:
    begin = min(answer.sent for answer in answers)
    return {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.output_tokens for a in answers],
        "ttfts": [a.ttft if is_good(a) else None for a in answers],
        "itls": [[y - x for x, y in zip(a.times, a.times[1:], strict=False)] for a in answers],
        "latencies": [a.latency if is_good(a) else None for a in answers],
        "start_times": [a.sent - begin for a in answers],
        "queue_times": [a.waited for a in answers],
        "errors_by_request": [a.error for a in answers],
    }


def _why(result: dict[str, Any]) -> str:
    faults = "; ".join(result["self_check"]["faults"])
    return f"the client was the limit ({faults}). Use more --clients or another machine; --self-check warn reports."


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name or any(letter in text for letter in "\r\n"):
        raise InvalidConfig(f"{text!r} is not allowed: it must be NAME=VALUE.")
    return name, value


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidConfig(f"--extra-body {text} is not allowed: it must be a JSON object.")
    return found


def _percents(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= percent <= 100 for percent in found):
        raise InvalidConfig(f"--metric-percentiles {text} is not allowed: it must be numbers from 0 to 100.")
    return found
