"""Load on a running server as `vllm bench serve` makes it: same arrivals, same definitions, same printed block.

    python benchmarks/serve.py [--host 127.0.0.1] [--port 8000] [--model NAME] [--num-prompts 1000]
        [--random-input-len 1024] [--random-output-len 128] [--request-rate inf] [--burstiness 1.0]
        [--max-concurrency N] [--prompts ids|text] [--clients N] [--num-warmups N] [--seed 0] [--json FILE]

Random prompts have exactly the asked number of tokens: they are sent as ids, or as the text that the server's
/detokenize makes of them. Outputs have it too, since the end of sequence is ignored.

Time to first token (TTFT) is from sending to the first chunk with tokens, inter-token latency (ITL) the gaps between
chunks, time per output token (TPOT) is (latency - TTFT) / (tokens - 1), end-to-end latency (E2EL) is from sending to
the last chunk. A request's wait for a place under --max-concurrency counts in none of them.
"""

import argparse
import http.client
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

import sse_client
from sse_client import Answer


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start: gaps from a gamma distribution (burstiness 1 is Poisson), scaled to count / rate."""
    if math.isinf(rate):
        return [0.0] * count
    constant = math.isinf(burstiness)
    gaps = [1 / rate if constant else rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
    total, times = 0.0, []
    for gap in gaps:
        total += gap
        times.append(total)
    scale = count / rate / total
    return [moment * scale for moment in times]


def call(host: str, port: int, path: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=120)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content else None


def wait_until_ready(host: str, port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if call(host, port, "/health")[0] == 200:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            sys.exit(f"{host}:{port} was not ready after {seconds:g} s")
        time.sleep(0.2)


def prepared(args: argparse.Namespace, model: str, rng: random.Random, count: int) -> list[bytes]:
    """HTTP requests, ready to be written."""
    requests = []
    for _ in range(count):
        prompt: Any = [rng.randrange(args.lowest_id, args.vocab_size) for _ in range(args.random_input_len)]
        if args.prompts == "text":
            status, found = call(args.host, args.port, "/detokenize", {"model": model, "tokens": prompt}, args.api_key)
            if status != 200:
                sys.exit(f"/detokenize: {found}")
            prompt = found["prompt"]
        body: dict[str, Any] = {
            "model": model, "prompt": prompt, "max_tokens": args.random_output_len, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, **json.loads(args.extra_body),
        }  # fmt: skip
        if args.temperature is not None:
            body["temperature"] = args.temperature
        data = json.dumps(body).encode()
        key = f"authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {args.host}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        requests.append(head.encode() + data)
    return requests


def percentile(values: list[float], percent: float) -> float:
    """Between the two nearest ranks, as numpy does it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(answers: list[Answer], busy: float) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error and answer.times]
    errors = Counter(answer.error or "no tokens" for answer in answers if answer not in good)
    result: dict[str, Any] = {"completed": len(good), "failed": len(answers) - len(good), "errors": dict(errors)}
    if not good:
        return result
    begin, end = min(answer.sent for answer in answers), max(answer.times[-1] for answer in good)
    duration = end - begin
    tokens_in, tokens_out = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    chunks = Counter(int(moment - begin) for answer in good for moment in answer.times)
    # Tokens are counted a second by chunks, scaled: a chunk may hold several tokens.
    per_chunk = tokens_out / sum(chunks.values())
    marks = sorted([(a.sent, 1) for a in good] + [(a.times[-1], -1) for a in good])
    running = most = 0
    for _, change in marks:
        running += change
        most = max(most, running)
    result |= {
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": max(chunks.values()) * per_chunk,
        "max_concurrent_requests": most,
        "client_busy": busy / duration,
    }
    series = {
        "ttft": [a.ttft for a in good],
        "tpot": [(a.latency - a.ttft) / (a.output_tokens - 1) for a in good if a.output_tokens > 1],
        "itl": [b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False)],
        "e2el": [a.latency for a in good],
    }
    for name, values in series.items():
        values = [1e3 * value for value in values] or [0.0]
        result |= {
            f"mean_{name}_ms": statistics.fmean(values),
            f"median_{name}_ms": statistics.median(values),
            f"std_{name}_ms": statistics.pstdev(values),
            f"p99_{name}_ms": percentile(values, 99),
        }
    return result


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    def row(label: str, value: Any) -> None:
        print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")

    print(f"{' Serving Benchmark Result ':=^50}")
    row("Successful requests:", result["completed"])
    row("Failed requests:", result["failed"])
    for error, count in result["errors"].items():
        print(f"  {count} x {error[:160]}")
    if args.max_concurrency:
        row("Maximum request concurrency:", args.max_concurrency)
    if not math.isinf(args.request_rate):
        row("Request rate configured (RPS):", args.request_rate)
    if not result["completed"]:
        return
    for label, name in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        row(label, result[name])
    for title, name in (
        ("Time to First Token", "ttft"),
        ("Time per Output Token (excl. 1st token)", "tpot"),
        ("Inter-token Latency", "itl"),
        ("End-to-end Latency", "e2el"),
    ):
        print(f"{title:-^50}")
        for label, kind in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            row(f"{label} {name.upper()} (ms):", result[f"{kind}_{name}_ms"])
    print("=" * 50)
    if result["client_busy"] > 0.8:
        print(f"A client process was busy {result['client_busy']:.0%} of the time: it may be the limit (--clients).")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""))
    parser.add_argument("--model", help="the first of /v1/models when not given")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--random-input-len", "--input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", "--output-len", type=int, default=128)
    parser.add_argument("--lowest-id", type=int, default=300, help="token ids below are not in prompts")
    parser.add_argument("--vocab-size", type=int, default=32000, help="token ids from here on are not in prompts")
    parser.add_argument("--prompts", choices=("ids", "text"), default="ids")
    parser.add_argument("--request-rate", type=float, default=math.inf)
    parser.add_argument("--burstiness", type=float, default=1.0)
    parser.add_argument("--max-concurrency", type=int, default=0)
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--extra-body", default="{}", help="JSON object of further request fields")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ready-check-timeout-sec", type=float, default=600)
    parser.add_argument("--json", help="file that gets the result as one more line of JSON")
    parser.add_argument("--label", default="", help="kept in the JSON")
    return parser


def main() -> None:
    args = arguments().parse_args()
    wait_until_ready(args.host, args.port, args.ready_check_timeout_sec)
    model = args.model or call(args.host, args.port, "/v1/models", key=args.api_key)[1]["data"][0]["id"]
    rng = random.Random(args.seed)
    requests = prepared(args, model, rng, args.num_warmups + args.num_prompts)
    if args.num_warmups:
        warm = requests[: args.num_warmups]
        sse_client.send(args.host, args.port, warm, [0.0] * len(warm), args.max_concurrency, args.clients)
    moments = arrivals(args.num_prompts, args.request_rate, args.burstiness, rng)
    answers, busy = sse_client.send(
        args.host, args.port, requests[args.num_warmups :], moments, args.max_concurrency, args.clients
    )
    result = summary(answers, busy)
    show(result, args)
    if args.json:
        settings = {
            "date": time.strftime("%Y%m%d-%H%M%S"), "label": args.label, "model_id": model,
            "num_prompts": args.num_prompts, "request_rate": str(args.request_rate), "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency or None, "random_input_len": args.random_input_len,
            "random_output_len": args.random_output_len, "prompts": args.prompts, "clients": args.clients,
        }  # fmt: skip
        with open(args.json, "a") as file:
            file.write(json.dumps(settings | result) + "\n")
    if result["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
