"""Figures of a report as SVG: lines, histograms, timelines, stacked bars; their colours are the page's."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 28, 12, 44
MOST_BINS = 40
ROW = 22  # height of a bar that has a label
MOST_ROWS_HEIGHT = 280  # of a timeline, whatever its number of requests


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) in the order in which a line joins them; `labels` are what a reader finds at each."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    line: bool = True
    dots: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places, from `start` to `end` of the drawing."""

    label: str
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = field(default=())

    def at(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share


def axis(label: str, values: Iterable[float], start: float, end: float, *, log: bool = False, count: int = 6) -> Axis:
    """Round ends around the values; a linear axis begins at 0."""
    found = list(values) or [0.0, 1.0]
    top = max(found)
    if log:
        low, high = 10.0 ** math.floor(math.log10(min(found)) + 1e-6), 10.0 ** math.ceil(math.log10(top) - 1e-6)
        high = max(high, 10 * low)
        decades = round(math.log10(high / low))
        ticks = tuple(low * 10.0**power for power in range(0, decades + 1, max(1, decades // count)))
        return Axis(label, low, high, start, end, True, ticks)
    step = _round_up((top or 1.0) / count)
    high = step * math.ceil((top or 1.0) / step - 1e-9)
    return Axis(label, 0.0, high, start, end, False, tuple(step * n for n in range(round(high / step) + 1)))


def lines(series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False) -> str:
    """Lines with dots, and a legend where there are several."""
    points = [point for one in series for point in one.points]
    legend = _legend([one.name for one in series]) if len(series) > 1 else ""
    top = TOP + (20 if legend else 0)
    x = axis(x_label, (x for x, _ in points), LEFT, WIDTH - RIGHT, log=log_x, count=8)
    y = axis(y_label, (y for _, y in points), HEIGHT - BOTTOM, top, log=log_y)
    parts = [_axes(x, y), legend]
    for number, one in enumerate(series):
        places = [(x.at(a), y.at(b)) for a, b in one.points]
        if one.line:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(f'<polyline class="line c{number}" points="{path}"/>')
        if one.dots:
            parts += [
                f'<circle class="dot c{number}" cx="{a:.1f}" cy="{b:.1f}" r="3.5">'
                f"<title>{escape(_told(one, index, x, y))}</title></circle>"
                for index, (a, b) in enumerate(places)
            ]
        if one.labels:
            parts += [
                f'<text class="mark" x="{a - 4 if a > WIDTH * 0.8 else a + 5:.1f}" y="{b - 7:.1f}" '
                f'text-anchor="{"end" if a > WIDTH * 0.8 else "start"}">{escape(label)}</text>'
                for (a, b), label in zip(places, one.labels, strict=True)
                if label
            ]
    return _svg(parts, HEIGHT, f"{y_label} over {x_label}")


def histogram(values: Sequence[float], x_label: str, y_label: str) -> str:
    """Counts of values in equal bins, up to the 99.5th percentile; what lies beyond is said."""
    ordered = sorted(values)
    end = ordered[min(len(ordered) - 1, math.floor(len(ordered) * 0.995))] or 1.0
    width = _round_up(end / MOST_BINS)
    bins = [0] * max(1, math.ceil(end / width + 1e-9))
    beyond = 0
    for value in ordered:
        place = int(value / width)
        if place < len(bins):
            bins[place] += 1
        else:
            beyond += 1
    x = axis(x_label, [width * len(bins)], LEFT, WIDTH - RIGHT, count=8)
    y = axis(y_label, bins, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y)]
    for place, count in enumerate(bins):
        if count:
            left, right, top = x.at(place * width), x.at((place + 1) * width), y.at(count)
            parts.append(
                f'<rect class="bar c0" x="{left:.1f}" y="{top:.1f}" width="{max(1.0, right - left - 1):.1f}" '
                f'height="{y.start - top:.1f}"><title>{_number(place * width)} to {_number((place + 1) * width)}: '
                f"{count:,}</title></rect>"
            )
    if beyond:
        parts.append(
            f'<text class="mark" x="{WIDTH - RIGHT}" y="{TOP + 10}" text-anchor="end">{beyond:,} more beyond, '
            f"up to {_number(ordered[-1])}</text>"
        )
    return _svg(parts, HEIGHT, f"{y_label} by {x_label}")


Bar = tuple[float, float, int, str]
"""Where it begins, how long it is, its colour, and what a reader finds at it."""


def timeline(rows: Sequence[Sequence[Bar]], names: Sequence[str], x_label: str, y_label: str) -> str:
    """One row a request, thin where there are many; `names` are those of the colours."""
    thick = max(1.0, min(float(ROW), MOST_ROWS_HEIGHT / max(1, len(rows))))
    top = TOP + 20
    height = top + thick * len(rows) + BOTTOM
    x = axis(x_label, [begin + length for row in rows for begin, length, _, _ in row], LEFT, WIDTH - RIGHT, count=8)
    parts = [_grid_x(x, top, height - BOTTOM), _legend(names)]
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(16 {(top + height - BOTTOM) / 2:.0f}) '
        f'rotate(-90)">{escape(y_label)}</text>'
    )
    for number, row in enumerate(rows):
        place = top + thick * number
        for begin, length, colour, told in row:
            left, right = x.at(begin), x.at(begin + length)
            parts.append(
                f'<rect class="bar c{colour}" x="{left:.1f}" y="{place:.1f}" width="{max(0.5, right - left):.1f}" '
                f'height="{max(0.8, thick - (2 if thick > 6 else 0)):.1f}"><title>{escape(told)}</title></rect>'
            )
    return _svg(parts, height, f"{y_label} over {x_label}")


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], x_label: str) -> str:
    """Bars of the whole width, cut into shares (they add up to 1); equal names have equal colours."""
    names = [name for name, _ in rows[0][1]] if rows else []
    used = [name for number, name in enumerate(names) if any(row[number][1] >= 0.0005 for _, row in rows)]
    legend_rows = math.ceil(len(used) / 3)
    top = TOP + 18 * legend_rows + 6
    height = top + len(rows) * (ROW + 12) + BOTTOM
    x = Axis(x_label, 0.0, 100.0, LEFT, WIDTH - RIGHT, ticks=(0.0, 20.0, 40.0, 60.0, 80.0, 100.0))
    parts = [_grid_x(x, top, height - BOTTOM), _legend(used, columns=3)]
    for number, (label, row) in enumerate(rows):
        place, begin = top + 6 + number * (ROW + 12), 0.0
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{place + 15:.0f}" text-anchor="end">{escape(label)}</text>')
        for name, share in row:
            if name in used and share > 0:
                left, right = x.at(100 * begin), x.at(100 * (begin + share))
                parts.append(
                    f'<rect class="bar c{used.index(name)}" x="{left:.1f}" y="{place}" '
                    f'width="{max(0.3, right - left):.1f}" height="{ROW}">'
                    f"<title>{escape(label)}, {escape(name)}: {share:.1%}</title></rect>"
                )
                if right - left > 44:
                    parts.append(
                        f'<text class="inside" x="{(left + right) / 2:.1f}" y="{place + 15}" '
                        f'text-anchor="middle">{share:.1%}</text>'
                    )
            begin += share
    return _svg(parts, height, f"{x_label}: {', '.join(label for label, _ in rows)}")


def intervals(rows: Sequence[tuple[str, float, float, float]], x_label: str) -> str:
    """A dot and its interval in each row (name, low, value, high), around a line at 1."""
    left = min(320, max(LEFT + 110, 16 + round(6.3 * max(len(row[0]) for row in rows))))
    height = TOP + len(rows) * ROW + BOTTOM
    ends = [1.0, *(row[1] for row in rows), *(row[3] for row in rows)]
    step = _round_up((max(ends) - min(ends) or 0.1) / 6)
    low, high = step * math.floor(min(ends) / step), step * math.ceil(max(ends) / step + 1e-9)
    count = round((high - low) / step)
    x = Axis(x_label, low, high, left, WIDTH - RIGHT, ticks=tuple(low + step * n for n in range(count + 1)))
    parts = [_grid_x(x, TOP, height - BOTTOM), f'<path class="line c7" d="M{x.at(1):.1f} {TOP}V{height - BOTTOM}"/>']
    for number, (name, least, value, most) in enumerate(rows):
        y = TOP + ROW * (number + 0.5)
        told = f"{name}: {value:.3f} ({least:.3f} to {most:.3f})"
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<path class="line c0" d="M{x.at(least):.1f} {y:.1f}H{x.at(most):.1f}"/>'
            f'<circle class="dot c0" cx="{x.at(value):.1f}" cy="{y:.1f}" r="4"><title>{escape(told)}</title></circle>'
        )
    return _svg(parts, height, x_label)


def roof(bandwidth: float, flops: float, points: Sequence[tuple[str, float, float]]) -> str:
    """FLOP/s over FLOPs for each byte moved; nothing lies above the line. Points are (name, FLOP/byte, FLOP/s)."""
    ridge = flops / bandwidth
    least = min([ridge / 100, *(x / 3 for _, x, _ in points)])
    most = max([ridge * 3, *(x * 3 for _, x, _ in points)])
    left = 10.0 ** math.floor(math.log10(least))
    right = 10.0 ** math.ceil(math.log10(most))
    limit = Series("limit", [(left, left * bandwidth), (ridge, flops), (right, flops)], dots=False)
    reached = [Series(name, [(x, y)], [f"{name} {y / min(flops, x * bandwidth):.0%}"], False) for name, x, y in points]
    scaled = [
        Series(one.name, [(x, y / 1e9) for x, y in one.points], one.labels, one.line, one.dots)
        for one in (limit, *reached)
    ]
    return lines(scaled, "FLOPs for each byte moved", "GFLOP/s", log_x=True, log_y=True)


def _told(series: Series, index: int, x: Axis, y: Axis) -> str:
    a, b = series.points[index]
    label = f"{series.labels[index]}: " if series.labels and series.labels[index] else f"{series.name}: "
    return f"{label}{x.label} {_number(a)}, {y.label} {_number(b)}"


def _legend(names: Sequence[str], columns: int = 0) -> str:
    parts, place = [], float(LEFT)
    for number, name in enumerate(names):
        row = number // columns if columns else 0
        if columns:
            place = LEFT + (number % columns) * (WIDTH - LEFT - RIGHT) / columns
        parts.append(
            f'<rect class="bar c{number}" x="{place:.0f}" y="{4 + 18 * row}" width="11" height="11" rx="2"/>'
            f'<text class="tick" x="{place + 16:.0f}" y="{13 + 18 * row}">{escape(name)}</text>'
        )
        place += 36 + 6.6 * len(name)
    return "".join(parts)


def _axes(x: Axis, y: Axis) -> str:
    parts = [
        f'<path class="grid" d="M{LEFT} {y.at(tick):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y.at(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        for tick in y.ticks
    ]
    middle = (y.start + y.end) / 2
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(14 {middle:.0f}) rotate(-90)">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts) + _grid_x(x, y.end, y.start)


def _grid_x(x: Axis, top: float, bottom: float) -> str:
    parts = [
        f'<path class="grid" d="M{x.at(tick):.1f} {top:.1f}V{bottom:.1f}"/>'
        f'<text class="tick" x="{x.at(tick):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{_number(tick)}</text>'
        for tick in x.ticks
    ]
    parts.append(
        f'<text class="label" x="{(x.start + x.end) / 2:.0f}" y="{bottom + 36:.1f}" text-anchor="middle">'
        f"{escape(x.label)}</text>"
    )
    return "".join(parts)


def _svg(parts: Iterable[str], height: float, told: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(told, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def _round_up(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    digits = 0 if abs(value) >= 1000 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
