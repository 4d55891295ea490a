"""A plan's curves as one SVG file: tokens/s and the two times over the number of requests at once."""

import math
from html import escape
from pathlib import Path

from octavo.core.plan import Point

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 360, 260, 58, 40, 44
PANELS = (("output tok/s", "#2563eb"), ("TTFT, ms", "#b45309"), ("TPOT, ms", "#047857"))


def plot(path: Path, found: list[Point], title: str) -> None:
    """Three panels side by side, both axes logarithmic."""
    width = WIDTH * len(PANELS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="11"><rect width="{width}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="12" y="18" font-size="13" font-weight="600" fill="#111">{escape(title)}</text>',
    ]
    rows = [(one.output_tokens_per_second, one.ttft * 1e3, one.tpot * 1e3) for one in found]
    numbers = [one.concurrency for one in found]
    for panel, (name, colour) in enumerate(PANELS):
        parts.append(_panel(panel * WIDTH, name, colour, numbers, [row[panel] for row in rows]))
    path.write_text("".join(parts) + "</svg>\n", encoding="utf-8")


def _panel(left: int, name: str, colour: str, numbers: list[int], values: list[float]) -> str:
    text = f'<text x="{left + LEFT}" y="{TOP - 10}" fill="#444">{name}</text>'
    if not numbers:
        return text + f'<text x="{left + LEFT}" y="{HEIGHT // 2}" fill="#999">does not fit</text>'
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values) * 1.0001))
    last = max(numbers[-1], 2)

    def x(number: float) -> float:
        return left + LEFT + (WIDTH - LEFT - 20) * math.log(number) / math.log(last)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(value / low) / math.log(high / low)

    lines = []
    mark = low
    while mark <= high:
        lines.append(
            f'<path d="M{left + LEFT} {y(mark):.1f}H{left + WIDTH - 20}" stroke="#e5e7eb"/>'
            f'<text x="{left + LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end" fill="#666">{mark:,g}</text>'
        )
        mark *= 10
    for number in numbers[:: max(1, len(numbers) // 5)]:
        lines.append(
            f'<text x="{x(number):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#666">{number}</text>'
        )
    points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in zip(numbers, values, strict=True))
    dots = "".join(
        f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"><title>{n} at once: {v:,.1f}</title></circle>'
        for n, v in zip(numbers, values, strict=True)
    )
    label = f'<text x="{left + LEFT}" y="{HEIGHT - 8}" fill="#666">requests at once</text>'
    return (
        text
        + "".join(lines)
        + f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{label}'
    )
