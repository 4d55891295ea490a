"""Whether figures are the server's or the client's: how late the client was, what it reads of an echo server."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench import client, echo
from octavo.bench.client import Load

BUSY = 0.9  # of a core, by the busiest client process
LEAST_LAG = 0.003  # seconds; below it nothing is wrong
ECHO_SECONDS = 1.5
ECHO_SHARE = 0.9  # of the tokens/s that the echo server sends


@dataclass(frozen=True, slots=True)
class Check:
    """`faults` is empty where the client was not the limit; times in milliseconds."""

    client_busy: float
    mean_lag_ms: float
    worst_lag_ms: float
    echo_streams: int
    echo_asked_tokens_per_s: float
    echo_read_tokens_per_s: float
    echo_ttft_ms: float
    faults: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check(result: dict[str, Any], load: Load, processes: int) -> Check:
    """Judge a run by its load, and by an echo server that streams as the measured one did.

    One client process reads the streams that one process had, at their median interval.
    """
    ttft, itl = result["median_ttft_ms"] / 1e3, result["median_itl_ms"] / 1e3
    faults = []
    if load.busy > BUSY:
        faults.append(f"a client process used {load.busy:.0%} of a core")
    if load.mean_lag > max(LEAST_LAG, 0.1 * ttft):
        faults.append(f"the client was {load.mean_lag * 1e3:.1f} ms late on average, for a TTFT of {ttft * 1e3:.1f} ms")
    streams = max(1, round(result["max_concurrent_requests"] / max(1, processes)))
    gap = max(itl, 1e-3)
    count = max(2, min(1000, round(ECHO_SECONDS / gap)))
    with echo.EchoServer(echo.even(0.0, gap, count)) as server:
        body = json.dumps({"prompt": [1]}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nhost: echo\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        # Spread over one interval, as the steps of a server are not all at one moment for all clients.
        starts = [gap * number / streams for number in range(streams)]
        answers, _ = client.send("127.0.0.1", server.port, [request] * streams, starts, streams, 1)
    good = [answer for answer in answers if not answer.error and len(answer.times) > 1]
    asked, read = streams / gap, 0.0
    first = 0.0
    if good:
        read = sum((len(a.times) - 1) / (a.times[-1] - a.sent) for a in good)
        first = sorted(a.ttft for a in good)[len(good) // 2]
    if read < ECHO_SHARE * asked:
        faults.append(f"the client reads {read:,.0f} of {asked:,.0f} tokens/s that an echo server sends")
    if first > max(LEAST_LAG, 0.1 * ttft):
        faults.append(f"an echo server seems to take {first * 1e3:.1f} ms to a first token")
    return Check(load.busy, load.mean_lag * 1e3, load.worst_lag * 1e3, streams, asked, read, first * 1e3, faults)
