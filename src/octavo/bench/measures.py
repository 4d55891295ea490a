"""What the answers of a load amount to: throughput, latencies, percentiles, goodput; keys are those of vLLM's JSON."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.bench.client import Answer
from octavo.errors import InvalidConfig

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client Queue Time",
}
DEFINITIONS = """
ttft: from sending a request to its first chunk with text; an empty first chunk is none. A request's wait for a place
under --max-concurrency is client_queue_time and counts in nothing else.
itl: the gaps between chunks with text; a chunk may hold several tokens (tokens_per_chunk says how many).
tpot: (e2el - ttft) / (output tokens - 1), for answers of more than one token; tokens as the server's usage counts them.
e2el: from sending to the last chunk.
goodput: requests/s that meet every objective of --goodput. Failed requests count in no average.
"""


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, as numpy does it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percent_name(percent: float) -> str:
    return f"p{percent:g}"


def objectives(given: Iterable[str]) -> dict[str, float]:
    """Most milliseconds of each metric, from texts such as ttft:300.

    Raises:
        InvalidConfig: another metric, or no number above 0.
    """
    found = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = 0.0
        if name not in ("ttft", "tpot", "e2el") or not most > 0:
            raise InvalidConfig(
                f"--goodput {text} is not allowed: it must be ttft, tpot or e2el, a colon, and milliseconds above 0."
            )
        found[name] = most
    return found


def times_of(answer: Answer) -> dict[str, float]:
    """Seconds of one good answer; tpot is missing for a single token."""
    found = {"ttft": answer.ttft, "e2el": answer.latency}
    if answer.output_tokens > 1:
        found["tpot"] = (answer.latency - answer.ttft) / (answer.output_tokens - 1)
    return found


def is_good(answer: Answer) -> bool:
    return not answer.error and bool(answer.times)


def summary(
    answers: Sequence[Answer], goodput: Mapping[str, float] | None = None, percents: Sequence[float] = (99,)
) -> dict[str, Any]:
    """Figures of all answers. Without one good answer only the counts and the errors."""
    good = [answer for answer in answers if is_good(answer)]
    errors = Counter(answer.error or "an answer without text" for answer in answers if not is_good(answer))
    result: dict[str, Any] = {"completed": len(good), "failed": len(answers) - len(good), "errors": dict(errors)}
    if not good:
        return result
    counted = "usage" if all(answer.output_tokens for answer in good) else "chunks, for want of usage"
    for answer in good:
        answer.output_tokens = answer.output_tokens or len(answer.times)
    begin = min(answer.sent for answer in good)
    duration = max(answer.sent + answer.latency for answer in good) - begin
    tokens_in, tokens_out = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    chunks = sum(len(answer.times) for answer in good)
    result |= {
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": max(tokens_by_second(good, begin).values()),
        "max_concurrent_requests": most_at_once(answers),
        "tokens_per_chunk": tokens_out / chunks,
        "tokens_counted_by": counted,
    }
    if goodput:
        met = sum(all(times_of(a).get(k, 0.0) * 1e3 <= most for k, most in goodput.items()) for a in good)
        result["request_goodput"] = met / duration
    series = {
        "ttft": [a.ttft for a in good],
        "tpot": [found["tpot"] for a in good if "tpot" in (found := times_of(a))],
        "itl": [b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False)],
        "e2el": [a.latency for a in good],
        "client_queue_time": [a.waited for a in good],
    }
    for name, values in series.items():
        result |= spread(name, values, percents)
    return result


def spread(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds; zeros where nothing was measured."""
    values = [1e3 * value for value in values] or [0.0]
    found = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    return found | {f"{percent_name(p)}_{name}_ms": percentile(values, p) for p in percents}


def tokens_by_second(answers: Iterable[Answer], begin: float) -> dict[int, float]:
    """Output tokens in each second after `begin`; an answer's tokens are spread over its chunks."""
    found: dict[int, float] = {}
    for answer in answers:
        share = answer.output_tokens / len(answer.times)
        for moment in answer.times:
            second = int(moment - begin)
            found[second] = found.get(second, 0.0) + share
    return found


def most_at_once(answers: Iterable[Answer]) -> int:
    """Most requests between their sending and their last chunk at one moment."""
    marks = sorted(mark for a in answers if is_good(a) for mark in ((a.sent, 1), (a.sent + a.latency, -1)))
    running = most = 0
    for _, change in marks:
        running += change
        most = max(most, running)
    return most
