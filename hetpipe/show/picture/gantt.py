"""Who does what when in a step, drawn: a row a device, measured above predicted, at one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.files.units import human_seconds
from hetpipe.predict.idle import Gap, idle_gaps
from hetpipe.predict.timeline import Span, Timeline
from hetpipe.show.picture.canvas import WIDE, Box, Canvas, Group, Strip, Stroke, Words, fitting, text_width
from hetpipe.show.picture.theme import CAUSE_PATTERNS
from hetpipe.show.report import ticks, total_seconds
from hetpipe.show.words import numbers_text
from hetpipe.study.scene import Scene, StageScene

_MARGIN, _LABEL, _ABOVE = 12.0, 150.0, 13.0  # widths, and the height of a label above its row
_WORK, _WIRE, _GAP = 15.0, 4.0, 5.0  # heights: of work, of transfers and sums under it, between rows
_FEW = 600  # spans up to which each has a box of its own, with a title
_PATTERN = 6.0  # pixels in which a pattern is seen
MOST_ROWS = 24  # that are shown
_MOST_SPANS = 700  # of a row, above which each pixel shows what is done most in it
# name: colour, opacity, whether it stands under the work
LOOKS: dict[str, tuple[str, float, bool]] = {
    "forward": ("type5", 0.75, False),
    "backward": ("type1", 0.75, False),
    "recompute": ("type3", 0.85, False),
    "optimizer": ("ink", 0.75, False),
    "transfer": ("type2", 0.9, True),
    "gradient sum": ("type4", 0.9, True),
}
_Parts = dict[str, list[tuple[float, float, Span]]]
_NAMES = {"F": "forward", "B": "backward", "send": "transfer", "sync": "gradient sum", "optimizer": "optimizer"}


def gantt_canvas(scene: Scene, timelines: Mapping[str, Timeline], width: float = WIDE) -> Canvas:
    """The named timelines ("measured", "predicted"), the first above the others; replicas that are alike once. What a row
    is stands before it where there is room, else above it."""
    canvas = Canvas(width=width, title=f"{scene.plan.model}: one step in time, {' above '.join(timelines)}")
    seconds = max((total_seconds(timeline) for timeline in timelines.values()), default=0.0)
    chart = _Chart(canvas, seconds, {name: _rows(timeline) for name, timeline in timelines.items()})
    chart.legend(any(timeline.spans for timeline in timelines.values()), scene)
    first = canvas.height
    gaps = {name: idle_gaps(timeline) for name, timeline in timelines.items()}
    left = MOST_ROWS // max(1, len(timelines))
    for lane in scene.lanes:
        for stage in lane.stages[:left]:
            left -= 1
            for i, name in enumerate(timelines):
                label = f"r{numbers_text(lane.replicas)} s{stage.number} {stage.named}" if i == 0 else ""
                label = label if len(timelines) == 1 else f"{label} {name}".strip()
                chart.row(label, name, stage, gaps[name].get(stage.devices[0], ()))
            canvas.height += _GAP
        canvas.height += _GAP
    chart.axis(seconds, first)
    most = MOST_ROWS // max(1, len(timelines))
    if len(scene.stages) > most:
        text = f"the first {most} of {len(scene.stages)} stages; 'hetpipe simulate --trace' writes all"
        canvas.groups[0].words.append(Words(x=_MARGIN, y=canvas.height, text=text, size=10, colour="faint"))
        canvas.height += 14
    return canvas


def _rows(timeline: Timeline) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in timeline.spans:
        found.setdefault(span.device, []).append(span)
    return found


def _joined(gaps: Sequence[Gap], short: float) -> list[Gap]:
    """Gaps that touch and are short as one, with the cause of most of it."""
    runs: list[list[Gap]] = []
    for gap in gaps:
        touches = bool(runs) and gap.start - runs[-1][-1].end < 1e-9
        if touches and max(gap.end - gap.start, runs[-1][-1].end - runs[-1][-1].start) < short:
            runs[-1].append(gap)
        else:
            runs.append([gap])
    found = []
    for run in runs:
        sums = {cause: sum(b - a for a, b, own in run if own == cause) for _, _, cause in run}
        found.append(Gap(run[0].start, run[-1].end, max(sums, key=lambda cause: sums[cause])))
    return found


class _Chart:
    def __init__(self, canvas: Canvas, seconds: float, rows: Mapping[str, Mapping[str, list[Span]]]) -> None:
        self.canvas, self.rows, self.beside = canvas, rows, canvas.width >= WIDE
        self.left = _MARGIN + (_LABEL if self.beside else 0.0)
        self.scale = (canvas.width - self.left - _MARGIN) / seconds if seconds > 0 else 0.0
        self.few = sum(len(spans) for devices in rows.values() for spans in devices.values()) <= _FEW

    def x(self, seconds: float) -> float:
        """Where a moment is."""
        return self.left + seconds * self.scale

    def legend(self, shown: bool, scene: Scene) -> None:
        """What is what."""
        kinds = {_NAMES[span.kind] for devices in self.rows.values() for spans in devices.values() for span in spans}
        if any(stage.recompute > 0 for _, stage in scene.stages):
            kinds.add("recompute")
        swatch = Box(x=0, y=0, width=16, height=12)
        work = [
            (name, replace(swatch, fill=colour, opacity=opacity))
            for name, (colour, opacity, _) in LOOKS.items()
            if shown and name in kinds
        ]
        idle = [
            (f"idle: {cause}", replace(swatch, fill="panel", edge="rule", pattern=CAUSE_PATTERNS[cause]))
            for cause, share in scene.idle_shares().items()
            if share > 0
        ]
        group, y = self.canvas.groups[0], 14.0
        for entries in (work, idle):
            x = _MARGIN
            for name, box in entries:
                wide = 22 + text_width(name, 10.5)
                if x > _MARGIN and x + wide > self.canvas.width - _MARGIN:
                    x, y = _MARGIN, y + 18
                group.boxes.append(replace(box, x=x, y=y - 6))
                group.words.append(Words(x=x + 22, y=y, text=name, size=10.5))
                x += wide + 16
            y += 18
        self.canvas.height = y - 2

    def row(self, label: str, name: str, stage: StageScene, gaps: Sequence[Gap]) -> None:
        """One device of one timeline."""
        y, spans = self.canvas.height + (0.0 if self.beside else _ABOVE), self.rows[name].get(stage.devices[0], [])
        sums: dict[str, float] = {}
        for span in spans:
            sums[_NAMES[span.kind]] = sums.get(_NAMES[span.kind], 0.0) + span.end - span.start
        said = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in sums.items())
        group = self.canvas.group(f"{name}, stage {stage.number} on {stage.named}: {said}")
        middle, room = (y + _WORK / 2, _LABEL - 8) if self.beside else (y - _ABOVE / 2, self.canvas.width - 2 * _MARGIN)
        group.words.append(Words(x=_MARGIN, y=middle, text=fitting(label, room, 10), size=10, clear=True))
        for a, b, cause in gaps if self.few else _joined(gaps, _PATTERN / self.scale):
            if (b - a) * self.scale >= (1 if self.few else _PATTERN):
                tip = f"idle, {cause}: {human_seconds(b - a)}"
                group.boxes.append(
                    Box(
                        x=self.x(a),
                        y=y,
                        width=(b - a) * self.scale,
                        height=_WORK,
                        fill="panel",
                        pattern=CAUSE_PATTERNS[cause],
                        tip=tip,
                    )
                )
        again = stage.recompute / (stage.recompute + stage.backward) if stage.recompute > 0 else 0.0
        parts: _Parts = {}
        for span in spans:
            middle = span.start + again * (span.end - span.start) if span.kind == "B" else span.start
            if middle > span.start:
                parts.setdefault("recompute", []).append((span.start, middle, span))
            parts.setdefault(_NAMES[span.kind], []).append((middle, span.end, span))
        for kind, found in (parts if len(spans) <= _MOST_SPANS else self._coarse(parts)).items():
            self._draw(group, kind, found, y)
        self.canvas.height = y + _WORK + _WIRE + 1

    def _coarse(self, parts: _Parts) -> _Parts:
        """One kind of work for each pixel, that with most of it; what stands under the work is joined where it is nearer."""
        most: dict[int, dict[str, float]] = {}
        found: _Parts = {}
        for kind, spans in parts.items():
            for a, b, span in spans:
                if LOOKS[kind][2]:
                    runs = found.setdefault(kind, [])
                    near = bool(runs) and (a - runs[-1][1]) * self.scale < 1
                    runs[-1:] = [(runs[-1][0], max(b, runs[-1][1]), span)] if near else [*runs[-1:], (a, b, span)]
                    continue
                for column in range(int(a * self.scale), int(b * self.scale) + 1):
                    part = min(b * self.scale, column + 1) - max(a * self.scale, column)
                    kinds = most.setdefault(column, {})
                    kinds[kind] = kinds.get(kind, 0.0) + part
        for column, kinds in sorted(most.items()):
            kind = max(kinds, key=lambda kind: kinds[kind])
            runs, span = found.setdefault(kind, []), parts[kind][0][2]
            joined = bool(runs) and abs(runs[-1][1] * self.scale - column) < 1e-6
            end = (column + 1) / self.scale
            runs[-1:] = [(runs[-1][0], end, span)] if joined else [*runs[-1:], (column / self.scale, end, span)]
        return found

    def _draw(self, group: Group, kind: str, found: list[tuple[float, float, Span]], y: float) -> None:
        colour, opacity, under = LOOKS[kind]
        top, high = (y + _WORK, _WIRE) if under else (y, _WORK)
        if self.few:
            for a, b, span in found:
                number = "" if span.microbatch is None else f" {span.microbatch}"
                tip = f"{kind}{number}: {human_seconds(b - a)} from {human_seconds(a)}"
                width = max((b - a) * self.scale, 0.2)
                edge = "paper" if width > 3 and not under else "none"
                group.boxes.append(
                    Box(
                        x=self.x(a),
                        y=top,
                        width=width,
                        height=high,
                        fill=colour,
                        opacity=opacity,
                        edge=edge,
                        thickness=0.6,
                        tip=tip,
                    )
                )
                if number and not under and text_width(number, 9) <= width:
                    place = Words(
                        x=self.x(a) + width / 2, y=y + _WORK / 2, text=number.strip(), size=9, anchor="middle", colour="night"
                    )
                    group.words.append(place)
            return
        spans = tuple((self.x(a), self.x(b)) for a, b, _ in found if (b - a) * self.scale > 0.05)
        total = human_seconds(sum(b - a for a, b, _ in found))
        if spans:
            tip = f"{kind}: {total}"
            group.strips.append(Strip(y=top, height=high, spans=spans, fill=colour, opacity=opacity, tip=tip))

    def axis(self, seconds: float, first: float) -> None:
        """Round times, as lines down all rows."""
        group, bottom = self.canvas.groups[0], self.canvas.height
        for t in ticks(seconds, 8 if self.beside else 4):
            points = ((self.x(t), first - 4), (self.x(t), bottom))
            group.lines.append(Stroke(points=points, colour="rule", thickness=0.75))
            text = human_seconds(t)
            x = min(self.x(t), self.canvas.width - text_width(text, 10) / 2)
            group.words.append(Words(x=x, y=bottom + 10, text=text, size=10, anchor="middle", colour="faint"))
        self.canvas.height = bottom + 24
