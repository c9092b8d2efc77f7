"""The partition of many devices, drawn small: a chart a replica, a column a stage, as high as its seconds of a step.

replica 2: 408 of 1024 samples, in 51 micro-batches of 8
┬───────────────────────── step
│ ··  ··  ░░  ··               idle time, by its cause
│ ██▌ ██▌ ██▌ ██▌              what it computes; beside it how full its device's memory is
└ 0–3 4–6 7–9 10               layers
  a5/0 a0/0 a0/2 a1/0          device
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hetpipe.files.units import human_seconds
from hetpipe.predict.idle import CAUSES, Cause
from hetpipe.show.picture.axis import MARGIN
from hetpipe.show.picture.canvas import Box, Canvas, Group, Stroke, Words, fitting, text_width, wrapped
from hetpipe.show.picture.theme import CAUSE_PATTERNS, TYPE_PATTERNS, TYPES, type_colour
from hetpipe.show.words import TIGHT, explanations, lane_title, layer_range, numbers_text, stage_sentence
from hetpipe.study.scene import LaneScene, Scene, StageScene

_HIGH, _TITLE, _LABELS, _GAP = 84.0, 18.0, 30.0, 16.0  # of a chart, of what stands above and below it, and between two
_LEAST, _MOST, _FEW = 34.0, 64.0, 64  # widths of a column, with the room between two; up to how many may be wider
_MEMORY, _STRIP = 5.0, 6.0  # how wide the memory beside a column is, how high a column's foot in its type's pattern
_MOST_COLUMNS = 512  # that are drawn; the table and the text have all


class Chart(NamedTuple):
    """Stages side by side: those of a lane, or all lanes that have one stage only."""

    title: str
    short: str
    columns: Sequence[tuple[LaneScene, StageScene]]


def stage_colour(scene: Scene, stage: StageScene) -> tuple[str, str]:
    """The colour and the pattern of a stage's type of device."""
    kinds = list(scene.memories)
    place = kinds.index(stage.kind) if stage.kind in kinds else None
    return type_colour(place), TYPE_PATTERNS[place % TYPES] if place is not None else ""


def waiting_box(cause: Cause, box: Box) -> Box:
    """The box as idle time of this cause looks, in bars, in columns and in the legend."""
    return replace(box, fill="rule", opacity=0.3, pattern=CAUSE_PATTERNS[cause], edge="rule", thickness=0.75)


def draw_columns(canvas: Canvas, scene: Scene) -> None:
    """All charts below what is drawn already, side by side where there is room, and what they say."""
    room = canvas.width - 2 * MARGIN
    charts = list(_charts(scene))
    longest = max(len(chart.columns) for chart in charts)
    pitch = min(_MOST, max(_LEAST, room / longest)) if len(scene.stages) <= _FEW else _LEAST
    each = max(1, int(room / pitch))
    x, y = MARGIN, canvas.height + 8
    for chart in charts:
        lines = [chart.columns[i : i + each] for i in range(0, len(chart.columns), each)]
        wide = max(len(lines[0]) * pitch, text_width(chart.short, 11, bold=True) + 8)
        if x > MARGIN and x + wide > canvas.width - MARGIN:
            x, y = MARGIN, y + _TITLE + _HIGH + _LABELS + _GAP
        for i, line in enumerate(lines):
            if i:
                y += _HIGH + _LABELS + 10
            _chart(canvas, scene, chart if i == 0 else None, line, x, y, pitch)
        x += wide + _GAP
        if len(lines) > 1:  # the next one below its last line
            x = canvas.width
    canvas.height = y + _TITLE + _HIGH + _LABELS + _GAP
    _say(canvas, scene)


def _charts(scene: Scene) -> Iterator[Chart]:
    """The charts: of as many stages as are drawn."""
    left = _MOST_COLUMNS
    alone = [lane for lane in scene.lanes if len(lane.stages) == 1]
    if len(alone) > 1:
        title = f"{sum(lane.count for lane in alone)} replicas of one stage each, whose numbers stand below"
        yield Chart(title, "replicas of one stage", [(lane, lane.stages[0]) for lane in alone][:left])
        left -= len(alone)
    for lane in scene.lanes:
        if left > 0 and (len(lane.stages) > 1 or len(alone) == 1):
            short = f"r{numbers_text(lane.replicas)}: {lane.samples}" + (" each" if lane.count > 1 else "")
            yield Chart(lane_title(lane, scene), short, [(lane, stage) for stage in lane.stages][:left])
            left -= len(lane.stages)


Columns = Sequence[tuple[LaneScene, StageScene]]


def _chart(canvas: Canvas, scene: Scene, chart: Chart | None, columns: Columns, x: float, y: float, pitch: float) -> None:
    """One line of columns from (x, y) on; with its title if it is the first of its chart."""
    top = canvas.groups[0]
    if chart is not None:
        long = text_width(chart.title, 11, bold=True) <= canvas.width - MARGIN - x and len(columns) * pitch > canvas.width / 2
        text = chart.title if long else chart.short
        top.words.append(Words(x=x, y=y + 8, text=text, size=11, bold=True))
    high = y + _TITLE
    wide = len(columns) * pitch
    marks = [(0.0, "rule", False)]
    if scene.seconds is not None:
        marks.append((1.0, "ink", False))
        if scene.bound is not None and scene.seconds > 0:
            marks.append((min(1.0, scene.bound / scene.seconds), "limit", True))
    for part, colour, dashed in marks:
        at = high + (1 - part) * _HIGH
        top.lines.append(Stroke(points=((x, at), (x + wide - 4, at)), colour=colour, dashed=dashed, thickness=1.2))
    for i, (lane, stage) in enumerate(columns):
        group = canvas.group(stage_sentence(scene, lane, stage), f"{lane.replicas[0]}.{stage.number}")
        _column(group, scene, stage, x + i * pitch, high, pitch)
        alone = chart is not None and chart.short == "replicas of one stage"
        _labels(group, lane, stage, x + i * pitch, high + _HIGH, pitch, by_replica=alone or len(lane.stages) == 1)


def _column(group: Group, scene: Scene, stage: StageScene, x: float, top: float, pitch: float) -> None:
    """What a stage computes, from the foot up, then its idle time; beside it its memory."""
    width, whole = pitch - 8 - _MEMORY, scene.seconds or float(scene.plan.layer_count)
    colour, pattern = stage_colour(scene, stage)
    busy = stage.busy if stage.forward is not None else float(len(stage.tiles))
    base, high = top + _HIGH, _HIGH * min(1.0, busy / whole if whole > 0 else 0.0)
    tip = f"computes {human_seconds(stage.busy)}" if stage.forward is not None else f"{len(stage.tiles)} layers"
    body = Box(x=x, y=base - high, width=width, height=high, fill=colour, opacity=0.5, tip=tip)
    foot = replace(body, y=base - min(_STRIP, high), height=min(_STRIP, high), opacity=0.55, pattern=pattern, tip="")
    edge = ("limit", 2.5) if stage.limits_step else (colour, 1.2)
    ends = Box(
        x=x,
        y=base - high,
        width=width,
        height=_HIGH * stage.optimizer / whole if whole > 0 else 0.0,
        fill="ink",
        opacity=0.75,
        tip=f"optimizer: {human_seconds(stage.optimizer)}",
    )
    frame = replace(body, fill="none", edge=edge[0], thickness=edge[1], tip="")
    group.boxes += [body, foot, *[ends] * (stage.optimizer > 0), frame]
    at = base - high
    for cause in CAUSES:
        if (seconds := stage.idle.get(cause, 0.0)) > 0 and whole > 0:
            part = _HIGH * seconds / whole
            said = f"idle, {cause}: {human_seconds(seconds)}"
            group.boxes.append(waiting_box(cause, Box(x=x, y=at - part, width=width, height=part, tip=said)))
            at -= part
    if stage.fullness is not None:
        beside = Box(x=x + width + 1.5, y=top, width=_MEMORY, height=_HIGH, fill="panel", edge="rule", thickness=0.5)
        part = _HIGH * min(1.0, stage.fullness)
        full = replace(beside, y=base - part, height=part, fill="limit" if stage.fullness >= TIGHT else "faint", edge="none")
        group.boxes += [beside, full]


def _labels(group: Group, lane: LaneScene, stage: StageScene, x: float, y: float, pitch: float, *, by_replica: bool) -> None:
    """Layers, and which device; of replicas of one stage which replica and which device."""
    who = f"{stage.named}" if lane.count == 1 else f"{lane.count} devices"
    first = f"r{lane.replicas[0]}" if by_replica else layer_range(stage.layers)
    lines = [first, fitting(who, pitch - 2, 8.5, least=2) if lane.count == 1 else who]
    for i, (text, size) in enumerate(zip(lines, (9.0, 8.5), strict=True)):
        if text_width(text, size) > pitch:
            text = {0: f"{stage.layers[0]}…", 1: f"{lane.count} ×" if lane.count > 1 else ""}[i]
        group.words.append(Words(x=x, y=y + 9 + 11 * i, text=text, size=size, colour="faint" if i else "ink"))


def _say(canvas: Canvas, scene: Scene) -> None:
    """How a column is read, and how many stages are not drawn."""
    top, y = canvas.groups[0], canvas.height
    said = ["over columns: which replicas, and how many samples of a step each has"] if len(scene.lanes) > 1 else []
    said += ["below a column stand its layers and its device, or how many alike devices it stands for"]
    if scene.seconds is not None:
        step = human_seconds(scene.seconds)
        bound = f", the dashed one the bound, {human_seconds(scene.bound)}" if scene.bound else ""
        said = [
            f"a column is a stage, as high as what it computes in a step; the line is its end, {step}{bound}",
            "a column with a thick frame limits the step; idle time is on top of it, whenever it was; no column is a timeline",
            *said,
            "the thin bar beside a column is how full its device's memory is, in another colour where that is tight",
        ]
    drawn = min(len(scene.stages), _MOST_COLUMNS)
    if len(scene.stages) > drawn:
        said.insert(0, f"and {len(scene.stages) - drawn} more stages")
    terms = [text for text in explanations(scene) if not text.startswith("bar: ")]
    for line in [own for text in (*said, *terms) for own in wrapped(text, canvas.width - 2 * MARGIN, 10)]:
        top.words.append(Words(x=MARGIN, y=y, text=line, size=10, colour="faint"))
        y += 14
    canvas.height = y + 4
