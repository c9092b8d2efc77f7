"""The loss of a run, drawn: of its steps, and of the samples that were evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hetpipe.show.picture.canvas import WIDE, Box, Canvas, Group, Stroke, Words, text_width
from hetpipe.show.report import ticks

_MARGIN, _LEFT, _HEIGHT, _TOP, _BOTTOM = 12.0, 62.0, 300.0, 34.0, 40.0
_SMOOTHED = 200  # steps, from which on their mean over a few is drawn, too
_PARTS = 60  # of a run, over which that mean goes
_TRAINED, _EVALUATED = "type0", "type3"
Point = tuple[int, float]  # step, loss


class RunCurve(NamedTuple):
    """What a run trained, and how its loss went. `best`: the step of the best evaluation, if they were compared."""

    model: str
    data: str
    adapter: str
    trained: Sequence[Point]
    evaluated: Sequence[Point] = ()
    best: int | None = None

    @property
    def points(self) -> list[Point]:
        """All that can be drawn."""
        return [point for point in (*self.trained, *self.evaluated) if math.isfinite(point[1])]


class _Scale:
    """From steps and losses to pixels."""

    def __init__(self, points: Sequence[Point], width: float) -> None:
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        self.first, self.last, self.low, self.high = min(steps), max(steps), min(losses), max(losses)
        spread = self.high - self.low or abs(self.high) or 1.0
        self.low, self.high = self.low - 0.05 * spread, self.high + 0.05 * spread
        self.right = width - _MARGIN

    def at(self, point: Point) -> tuple[float, float]:
        """Where a point is."""
        step, loss = point
        part = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        down = (self.high - loss) / (self.high - self.low)
        return _LEFT + part * (self.right - _LEFT), _TOP + down * (_HEIGHT - _TOP - _BOTTOM)


def loss_canvas(curve: RunCurve, width: float = WIDE) -> Canvas:
    """The curve; nothing is drawn of a run of which no loss is known."""
    canvas = Canvas(width=width, title=f"{curve.model}: loss over the steps")
    if not curve.points:
        return canvas
    canvas.height, scale = _HEIGHT, _Scale(curve.points, width)
    _grid(canvas.groups[0], scale)
    _legend(canvas.groups[0], curve)
    trained, evaluated = _known(curve.trained), _known(curve.evaluated)
    if trained:
        group = canvas.group(f"loss of the steps: {trained[0][1]:.4g} to {trained[-1][1]:.4g}")
        many = len(trained) > _SMOOTHED
        group.lines.append(_line(trained, scale, "faint" if many else _TRAINED, 0.75 if many else 1.6))
        if many:
            group.lines.append(_line(_smoothed(trained), scale, _TRAINED, 1.8))
    if evaluated:
        group = canvas.group(f"evaluations: {evaluated[0][1]:.4g} to {evaluated[-1][1]:.4g}")
        group.lines.append(_line(evaluated, scale, _EVALUATED, 1.6))
        for step, loss in evaluated:
            x, y = scale.at((step, loss))
            half = 5.0 if step == curve.best else 3.0
            tip = f"evaluation of step {step}: {loss:.4g}{', the best' if step == curve.best else ''}"
            group.boxes.append(Box(x=x - half, y=y - half, width=2 * half, height=2 * half, fill=_EVALUATED, round=half, tip=tip))
    return canvas


def _known(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over a few steps in a row."""
    size = max(2, len(points) // _PARTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(part[len(part) // 2][0], sum(loss for _, loss in part) / len(part)) for part in parts]


def _line(points: Sequence[Point], scale: _Scale, colour: str, thickness: float) -> Stroke:
    return Stroke(points=tuple(map(scale.at, points)), colour=colour, thickness=thickness)


def _grid(group: Group, scale: _Scale) -> None:
    low, distance = scale.low, ticks(scale.high - scale.low, 5)[1]
    for value in (i * distance for i in range(math.ceil(low / distance), math.floor(scale.high / distance) + 1)):
        x, y = scale.at((scale.first, value))
        group.lines.append(Stroke(points=((_LEFT, y), (scale.right, y)), colour="rule", thickness=0.75))
        group.words.append(Words(x=_LEFT - 6, y=y, text=f"{value:.4g}", size=10, anchor="end", colour="faint"))
    for step in sorted({round(tick) for tick in ticks(scale.last, 6) if tick >= scale.first} | {scale.last}):
        x, _ = scale.at((step, low))
        text = f"{step:,}"
        if step == scale.last or x + text_width(text, 10) < scale.right - text_width(f"{scale.last:,}", 10) - 8:
            x = min(x, scale.right - text_width(text, 10) / 2)
            group.words.append(Words(x=x, y=_HEIGHT - _BOTTOM + 14, text=text, size=10, anchor="middle", colour="faint"))
    group.words.append(Words(x=scale.right, y=_HEIGHT - 10, text="steps", size=10.5, anchor="end", bold=True))
    group.words.append(Words(x=_MARGIN + 4, y=_HEIGHT / 2, text="loss", size=10.5, bold=True, upright=True))


def _legend(group: Group, curve: RunCurve) -> None:
    names = [("of the steps", _TRAINED, curve.trained), ("of samples that do not train", _EVALUATED, curve.evaluated)]
    x = _LEFT
    for name, colour, points in names:
        if points:
            group.lines.append(Stroke(points=((x, 14.0), (x + 18, 14.0)), colour=colour, thickness=2.0))
            group.words.append(Words(x=x + 24, y=14, text=name, size=10.5))
            x += 44 + text_width(name, 10.5)
