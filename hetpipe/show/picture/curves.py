"""Memory over time, drawn: for each device the bytes in use in a step, under its limit."""

from __future__ import annotations

from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.predict.timeline import Timeline
from hetpipe.show.picture.canvas import WIDE, Canvas, Group, Strip, Stroke, Words, fitting, text_width
from hetpipe.show.picture.theme import type_colour
from hetpipe.show.report import ticks
from hetpipe.show.words import memory_text, stage_key
from hetpipe.study.scene import Scene

_MARGIN, _LABEL, _ABOVE, _HIGH = 12.0, 190.0, 32.0, 34.0  # widths, then heights of a label above its row and of a row
_FEW, MOST_ROWS = 12, 16  # stages that are drawn finely, that are drawn


def memory_canvas(scene: Scene, timeline: Timeline, width: float = WIDE) -> Canvas:
    """The timeline's `memory` (`predict.footprint.with_footprint`): a row a stage, each as high as its device's memory.
    What a row is stands before it where there is room, else above it."""
    canvas = Canvas(width=width, title=f"{scene.plan.model}: memory over one step", height=10.0)
    beside, seconds = width >= WIDE, timeline.step_seconds
    left, room = (_MARGIN + _LABEL, _LABEL - 8) if beside else (_MARGIN, width - 2 * _MARGIN)
    scale = (width - left - _MARGIN) / seconds if seconds > 0 else 0.0
    kinds, first = list(scene.memories), canvas.height
    shown = scene.stages[:MOST_ROWS]
    fine = 1.0 if len(shown) <= _FEW else 5.0
    for lane, stage in shown:
        series, limit = timeline.memory.get(stage.devices[0], ()), stage.limit or stage.memory or 1
        y = canvas.height
        name = f"{stage_key(lane, stage)} {stage.named}"
        group = canvas.group(f"memory of {name} over the step: at most {memory_text(stage)}")
        for down, text, look in ((10, name, {"bold": True}), (24, memory_text(stage), {"colour": "faint"})):
            shown_text = fitting(text, room / 1.1, 10)
            group.words.append(Words(x=_MARGIN, y=y + down, text=shown_text, size=10, clear=True, **look))
        y += 0.0 if beside else _ABOVE
        group.lines.append(Stroke(points=((left, y), (left + seconds * scale, y)), dashed=True))
        place = kinds.index(stage.kind) if stage.kind in kinds else None
        ends = [*(when for when, _ in series[1:]), seconds]
        steps = [(left + a * scale, left + b * scale, size) for (a, size), b in zip(series, ends, strict=True)] if series else []
        _area(group, steps, y, limit, type_colour(place), fine)
        canvas.height = y + _HIGH + 9
    top = canvas.groups[0]
    for t in ticks(seconds, 8 if beside else 4):
        x, text = left + t * scale, human_seconds(t)
        top.lines.append(Stroke(points=((x, first), (x, canvas.height - 6)), colour="rule", thickness=0.75))
        x = min(x, width - text_width(text, 10) / 2)
        top.words.append(Words(x=x, y=canvas.height + 4, text=text, size=10, anchor="middle", colour="faint"))
    canvas.height += 18
    if len(scene.stages) > MOST_ROWS:
        text = f"the first {MOST_ROWS} of {len(scene.stages)} stages"
        top.words.append(Words(x=_MARGIN, y=canvas.height, text=text, size=10, colour="faint"))
        canvas.height += 14
    return canvas


def _area(group: Group, steps: list[tuple[float, float, int]], y: float, limit: int, colour: str, fine: float) -> None:
    """Bytes in use as an area; of steps within `fine` pixels the fullest."""
    columns: list[tuple[float, float, int]] = []
    for a, b, size in steps:
        if columns and b - columns[-1][0] < fine:
            columns[-1] = (columns[-1][0], b, max(size, columns[-1][2]))
        else:
            columns.append((a, b, size))
    levels: dict[int, list[tuple[float, float]]] = {}
    for a, b, size in columns:
        runs = levels.setdefault(size, [])
        if runs and abs(runs[-1][1] - a) < 1e-9:
            runs[-1] = (runs[-1][0], b)
        else:
            runs.append((a, b))
    for size, runs in levels.items():
        high = _HIGH * min(size / limit, 1.0)
        group.strips.append(
            Strip(
                y=y + _HIGH - high,
                height=high,
                spans=tuple(runs),
                fill=colour,
                opacity=0.55,
                tip=f"{human_bytes(size)} of {human_bytes(limit)}",
            )
        )
