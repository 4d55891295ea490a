"""What happened lately: rates and percentiles over a sliding window of seconds."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate

MOST = 20_000  # entries of a window; beyond it the oldest go first


class Rate:
    """Amounts per second over the last `seconds`."""

    def __init__(self, seconds: float, start: float) -> None:
        self.seconds, self.start = seconds, start
        self._entries: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        self._entries.append((now, amount))
        self._sum += amount
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / max(1.0, min(self.seconds, now - self.start))

    def _forget(self, now: float) -> None:
        entries = self._entries
        while entries and entries[0][0] <= now - self.seconds:
            self._sum -= entries.popleft()[1]


class Percentiles:
    """Values of the last `seconds`, each with how often it came."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._entries: deque[tuple[float, float, int]] = deque(maxlen=MOST)

    def add(self, now: float, value: float, count: int = 1) -> None:
        entries = self._entries
        entries.append((now, value, count))
        while entries[0][0] <= now - self.seconds:
            entries.popleft()

    def at(self, now: float, *shares: float) -> list[float] | None:
        """The smallest value that at least each share of all values does not exceed; None without values."""
        recent = sorted((value, count) for when, value, count in self._entries if when > now - self.seconds)
        if not recent:
            return None
        reached = list(accumulate(count for _, count in recent))
        return [recent[min(bisect_left(reached, share * reached[-1]), len(recent) - 1)][0] for share in shares]
