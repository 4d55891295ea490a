"""The highest request rate at which enough requests meet their objectives, by bisection."""

from collections.abc import Callable

MOST_DOUBLINGS = 4
LOWEST_SHARE = 1 / 256  # of the first guess; below it no rate is looked for


def highest_rate(met: Callable[[float], float], least: float, guess: float, precision: float) -> float:
    """The highest rate known to be met; 0.0 where none is, and the last one tried where even 16 guesses are met.

    Args:
        met: measures a rate (requests/s) and gives the share of requests that met all objectives.
        least: the share that is enough.
        guess: a rate near the answer, such as the most requests/s that the server delivers.
        precision: the answer and the lowest rate known to be too high are no further apart than this share of it.
    """
    low, high = 0.0, _rounded(guess)
    for _ in range(MOST_DOUBLINGS + 1):
        if met(high) < least:
            break
        low, high = high, _rounded(2 * high)
    else:
        return low
    while high - low > precision * high and high > guess * LOWEST_SHARE:
        middle = _rounded((low + high) / 2)
        if not low < middle < high:
            break
        if met(middle) >= least:
            low = middle
        else:
            high = middle
    return low


def _rounded(rate: float) -> float:
    """Four digits: a rate is a file's name too."""
    return float(f"{rate:.4g}")
