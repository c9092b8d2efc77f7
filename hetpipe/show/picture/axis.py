"""The scale of a partition's picture: seconds to the right and bytes upward; its marks (the end of the step, the bound, the end
of the equal split) and what they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.files.units import human_seconds
from hetpipe.show.picture.canvas import Canvas, Group, Stroke, Words, text_width, wrapped
from hetpipe.show.words import explanations
from hetpipe.study.scene import Scene

MARGIN, FRAME = 12.0, 10.0
_MOST_HIGH, _LEAST_HIGH, _ALL_HIGH = 80.0, 42.0, 640.0  # heights of the largest device's memory, and of all stages together
_LEAST = 24.0  # of a device's memory
_FARTHEST = 3.0  # steps that the time axis holds, for an equal split that takes longer


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From seconds (or layers) and bytes to pixels."""

    left: float
    room: float
    seconds: float
    largest: float
    high: float

    def x(self, seconds: float) -> float:
        """Where a moment of the step is."""
        return self.left + min(seconds / self.seconds if self.seconds > 0 else 0.0, 1.0) * self.room

    def heights(self, memory: int | None, limit: int | None) -> tuple[float, float]:
        """How high a stage's bytes and its device's memory are: the latter by the square root of the bytes, so that small devices
        are seen beside large ones, and the former as the part of it that they are."""
        whole = limit or memory
        if not whole or self.largest <= 0:
            return _LEAST, _LEAST
        high = max(_LEAST, self.high * math.sqrt(whole / self.largest))
        return high * (memory / whole if memory is not None else 1.0), high


def scale_of(scene: Scene, width: float) -> Scale:
    """The scale that holds the scene, and the equal split beside it, in so many pixels of width."""
    sizes = [size for _, stage in scene.stages for size in (stage.memory, stage.limit) if size is not None]
    left = MARGIN + FRAME
    room = width - 2 * left
    if scene.seconds is None:
        longest = float(scene.plan.layer_count)
    else:
        equal = scene.equal.seconds if scene.equal is not None and scene.equal.seconds is not None else 0.0
        longest = max(scene.seconds, min(equal, _FARTHEST * scene.seconds))
    return Scale(
        left=left,
        room=room,
        seconds=longest,
        largest=max(sizes, default=0),
        high=min(_MOST_HIGH, max(_LEAST_HIGH, _ALL_HIGH / len(scene.stages))),
    )


def draw_marks(group: Group, scene: Scene, scale: Scale, top: float, bottom: float) -> None:
    """The end of the step, and the bound, over what stands between these heights."""
    for seconds, colour, dashed in ((scene.seconds, "ink", False), (scene.bound, "limit", True)):
        if seconds is not None and scene.seconds is not None:
            x = scale.x(seconds)
            group.lines.append(Stroke(points=((x, top), (x, bottom)), colour=colour, dashed=dashed, thickness=1.4))


def draw_axis(canvas: Canvas, scene: Scene, scale: Scale) -> None:
    """The names of the end of the step and of the bound, below their lines."""
    group, y = canvas.group(), canvas.height
    width, inside = "number of layers", "in bars: the number of a layer, and its name where there is room"
    high = "height: how full its device's memory is, up to the dashed line; devices of different types are not to one scale"
    if scene.seconds is not None:
        width = "seconds of a step"
        marks = [(scene.seconds, f"step {human_seconds(scene.seconds)}", "ink", 1)]
        if scene.bound is not None:
            marks.insert(0, (scene.bound, f"bound {human_seconds(scene.bound)}", "limit", -1))
        if scene.equal is not None and scene.equal.seconds is not None:
            end = scene.equal.seconds
            marks.append((end, f"equal split {human_seconds(end)}" + (" →" if end > scale.seconds else ""), "faint", -1))
        y = mark_names(group, scale, canvas.width, marks, y)
    said = (f"width of a bar: {width}; {high}", inside, *explanations(scene))
    for line in [own for text in said for own in wrapped(text, canvas.width - 2 * MARGIN, 10)]:
        y += 14
        group.words.append(Words(x=MARGIN, y=y, text=line, size=10, colour="faint"))
    canvas.height = y + 14


def mark_names(group: Group, scale: Scale, width: float, marks: Sequence[tuple[float, str, str, int]], y: float) -> float:
    """(seconds, name, colour, side) below their lines: to the right of it (1) or to the left (-1), in the first row where no
    other name is in the way; where the rows end."""
    rows: list[list[tuple[float, float]]] = []
    for seconds, name, colour, side in marks:
        wide = text_width(name, 10.5, bold=True)
        left = scale.x(seconds) + (3 if side > 0 else -3 - wide)
        left = min(max(left, MARGIN), width - MARGIN - wide)
        row = next((i for i, own in enumerate(rows) if all(left > b + 4 or left + wide < a - 4 for a, b in own)), len(rows))
        rows += [[]] if row == len(rows) else []
        rows[row].append((left, left + wide))
        group.words.append(Words(x=left, y=y + 10 + 14 * row, text=name, size=10.5, bold=True, colour=colour))
    return y + 14 * len(rows)
