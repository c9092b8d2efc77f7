"""A front, drawn: price against time, both on a logarithmic scale; the sub-clusters that no other beats, those that lost, and
lower bounds of those that were not planned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetpipe.files.messages import counted
from hetpipe.files.units import human_seconds, three_digits
from hetpipe.planning.front import Front, Row, nodes_text, price_per_million_samples
from hetpipe.show.picture.canvas import WIDE, Box, Canvas, Group, Stroke, Words, fitting, text_width
from hetpipe.show.report import ticks

HEIGHT, _MARGIN, _LEFT, _BOTTOM, _TOP = 400.0, 12.0, 70.0, 46.0, 34.0
_HEADING = 52.0  # height of what stands above a chart that is alone
# name: colour, half of a point's size
LOOKS = {"front": ("type4", 5.0), "planned, beaten": ("type5", 3.5), "not planned: lower bound": ("faint", 2.0)}
Point = tuple[float, float]  # price per million samples, seconds of a step


def point_of(row: Row, front: Front) -> Point | None:
    """Where a sub-cluster stands: its plan, else the lower bound of what it could reach; None where neither is known."""
    if row.plan is not None:
        return row.plan.price_per_million_samples, row.plan.step_seconds
    if row.lower_bound_seconds is None:
        return None
    return price_per_million_samples(row.price_per_hour, row.lower_bound_seconds, front.global_batch), row.lower_bound_seconds


def kind_of(row: Row) -> str:
    """Which of LOOKS."""
    return "front" if row.on_front else "planned, beaten" if row.plan is not None else "not planned: lower bound"


class _Axis:
    """From values above zero to pixels, by their logarithm; values that are all alike stand in the middle."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        spread = high / low if high > low else 1.5
        self.low, self.high = low / spread**0.06, high * spread**0.06
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        """Where a value is."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values: 1, 2 and 5 × 10ᵏ (powers of ten where these would stand closer than 32 pixels); where they are fewer than
        three, multiples of one of them."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [step * 10.0**power for power in powers for step in (1, 2, 5) if self.low <= step * 10.0**power <= self.high]
        if len(found) > abs(self.end - self.start) / 32:
            return [10.0**power for power in powers if self.low <= 10.0**power <= self.high]
        if len(found) < 3:
            step = ticks(self.high - self.low, 5)[1]
            found = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return found


def front_canvas(front: Front, width: float = WIDE, *, alone: bool = False) -> Canvas:
    """The chart: each sub-cluster of the front can be focused and says what it is; free of price, or of time, none is drawn.
    `alone`: with a heading, which a page has outside of it."""
    placed = [(row, point) for row in front.rows if (point := point_of(row, front)) is not None and min(point) > 0]
    canvas = Canvas(width=width, title=f"{front.model}: price against time")
    if alone:
        _heading(canvas, front, "" if placed else "; no sub-cluster has both a price and a time")
    if not placed:
        return canvas
    top, canvas.height = canvas.height, canvas.height + HEIGHT
    xs = _Axis([x for _, (x, _) in placed], _LEFT, width - _MARGIN)
    ys = _Axis([y for _, (_, y) in placed], canvas.height - _BOTTOM, top + _TOP)
    _grid(canvas, xs, ys)
    _legend(canvas.groups[0], {kind_of(row) for row, _ in placed}, top + 14)
    best = sorted(((point, nodes_text(row.nodes), row) for row, point in placed if row.on_front), key=lambda item: item[:2])
    steps: list[Point] = []
    for (x, y), *_ in best:  # between two points the cheaper one is what there is
        steps += [(xs.at(x), steps[-1][1])] if steps else []
        steps.append((xs.at(x), ys.at(y)))
    if len(steps) > 1:
        canvas.groups[0].lines.append(Stroke(points=tuple(steps), colour="type4", thickness=1.4))
    others = canvas.group()  # over the lines of the grid
    for row, (x, y) in placed:
        if not row.on_front:
            _point(others, row, (x, y), xs, ys)
    taken: list[tuple[float, float, float]] = []
    for (x, y), name, row in best:
        group = canvas.group(_said(row, (x, y)))
        _point(group, row, (x, y), xs, ys)
        shown = fitting(name, min(240, width / 2), 10)
        left, height = min(xs.at(x) + 9, width - _MARGIN - text_width(shown, 10)), ys.at(y) - 11
        right = left + text_width(shown, 10)
        if all(left > b or right < a or abs(height - v) > 12 for a, b, v in taken):
            taken.append((left, right, height))
            group.words.append(Words(x=left, y=height, text=shown, size=10, clear=True))
    return canvas


def _said(row: Row, point: Point) -> str:
    return f"{nodes_text(row.nodes)}: {point[0]:.2f} per million samples, {human_seconds(point[1])} a step ({kind_of(row)})"


def _point(group: Group, row: Row, point: Point, xs: _Axis, ys: _Axis) -> None:
    colour, half = LOOKS[kind_of(row)]
    x, y = xs.at(point[0]), ys.at(point[1])
    group.boxes.append(
        Box(x=x - half, y=y - half, width=2 * half, height=2 * half, fill=colour, opacity=0.9, round=half, tip=_said(row, point))
    )


def _heading(canvas: Canvas, front: Front, more: str) -> None:
    room = canvas.width - 2 * _MARGIN
    said = f"{counted(front.global_batch, 'sample')} a step, {counted(len(front.rows), 'sub-cluster')}{more}"
    title = Words(x=_MARGIN, y=22, text=fitting(canvas.title, room / 1.1, 16), size=16, bold=True)
    canvas.groups[0].words += [title, Words(x=_MARGIN, y=44, text=fitting(said, room, 11.5), size=11.5, colour="faint")]
    canvas.height = _HEADING


def _legend(group: Group, kinds: set[str], y: float) -> None:
    x = _MARGIN
    for name, (colour, half) in LOOKS.items():
        if name in kinds:
            group.boxes.append(Box(x=x, y=y - half, width=2 * half, height=2 * half, fill=colour, opacity=0.9, round=half))
            group.words.append(Words(x=x + 16, y=y, text=name, size=10.5))
            x += 34 + text_width(name, 10.5)


def _grid(canvas: Canvas, xs: _Axis, ys: _Axis) -> None:
    group, right = canvas.groups[0], canvas.width - _MARGIN
    for value in xs.ticks():
        x = xs.at(value)
        group.lines.append(Stroke(points=((x, ys.end), (x, ys.start)), colour="rule", thickness=0.75))
        place = Words(x=x, y=ys.start + 12, text=three_digits(value), size=10, anchor="middle", colour="faint")
        group.words.append(place)
    for value in ys.ticks():
        y = ys.at(value)
        group.lines.append(Stroke(points=((_LEFT, y), (right, y)), colour="rule", thickness=0.75))
        group.words.append(Words(x=_LEFT - 6, y=y, text=human_seconds(value), size=10, anchor="end", colour="faint"))
    below = Words(x=right, y=canvas.height - 14, text="price per million samples", size=10.5, anchor="end", bold=True)
    beside = Words(x=_MARGIN + 4, y=canvas.height - HEIGHT / 2, text="seconds per step", size=10.5, bold=True, upright=True)
    group.words += [below, beside]
