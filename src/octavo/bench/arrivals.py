"""When requests arrive: constant gaps, Poisson, bursts, and rates that ramp up."""

import math
import random
from collections.abc import Iterator


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start: gaps from a gamma distribution (burstiness 1 is Poisson), scaled to count / rate."""
    if math.isinf(rate):
        return [0.0] * count
    times, total = [], 0.0
    for gap in _gaps(count, burstiness, rng):
        total += gap
        times.append(total)
    scale = count / rate / total if total else 0.0
    return [moment * scale for moment in times]


def ramp(
    count: int, strategy: str, first: float, last: float, burstiness: float, rng: random.Random
) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds after the start while the rate goes from `first` to `last` (requests/s), linear or exponential in the
    number of requests; and the moments at which the rate passed a whole number."""
    times: list[float] = []
    events: list[dict[str, float]] = []
    total, shown = 0.0, math.floor(first) - 1
    for number, gap in enumerate(_gaps(count, burstiness, rng)):
        share = number / max(1, count - 1)
        rate = first + (last - first) * share if strategy == "linear" else first * (last / first) ** share
        if math.floor(rate) != shown:
            shown = math.floor(rate)
            events.append({"rps": rate, "seconds": total})
        total += gap / rate
        times.append(total)
    return times, events


def _gaps(count: int, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gaps with mean 1; infinite burstiness makes them all equal."""
    for _ in range(count):
        yield 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / burstiness)
