"""Plans as pictures: replicas as rows of stages as wide as their time, layers inside, the device below.

When a timeline is given, who works when stands under them. SVG, PNG, or one HTML file that needs no other.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.files.writing import check_output, write_bytes, write_text
from hetpipe.predict.cost import Costs
from hetpipe.predict.timeline import Span, Timeline
from hetpipe.show.canvas import (
    FAINT,
    INK,
    PAPER,
    Box,
    Canvas,
    Line,
    Words,
    fitting,
    printable,
    text_width,
)
from hetpipe.show.report import (
    KIND_NAMES,
    counted,
    layer_range,
    origin,
    plan_rows,
    prediction_facts,
    share_text,
    ticks,
    total_seconds,
)
from hetpipe.show.trace import by_device
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.spec.profile import Profile

PICTURES = (".svg", ".png", ".html")
# Okabe and Ito 2008: told apart by the colour-blind too
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#8C564B")
_UNKNOWN, _SYNC, _OPTIMIZER = "#5b7083", "#8f8f8f", "#1a1a1a"
_MARGIN, _SMALL = 20.0, 10.0
_BAR, _LABEL, _GAP = 44.0, 38.0, 16.0  # heights: a replica's bar, the labels under it, what parts rows
_LANE = 17.0  # height of a device's row in the Gantt chart


def _mixed(colour: str, part: float, other: str = PAPER) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * part + b * (1 - part)):02x}" for a, b in pairs)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What is drawn of a stage: its first layer, their weights (seconds, or 1) and names, its label."""

    first: int
    weights: list[float]
    names: list[str]
    tips: list[str]
    label: tuple[str, str]
    colour: str

    @property
    def total(self) -> float:
        return sum(self.weights)

    @property
    def label_width(self) -> float:
        return max(text_width(self.label[0], bold=True), text_width(self.label[1], _SMALL)) + 14


class _Content:
    """A plan, and what is known of it, as what is to be drawn."""

    def __init__(self, plan: Plan, profile: Profile | None, cluster: Cluster | None) -> None:
        plan.check(profile=profile, cluster=cluster)
        self.plan, self.profile, self.cluster = plan, profile, cluster
        self.costs = Costs(profile.at(plan.precision), cluster) if profile is not None and cluster is not None else None
        used = {cluster.device(d).type for d in plan.device_ids} if cluster else set()
        kinds = [kind for kind in cluster.device_types if kind in used] if cluster else []
        self.colours = {
            kind: _mixed(_PALETTE[i % len(_PALETTE)], 1 / (1 + i // len(_PALETTE)), "#404040")
            for i, kind in enumerate(kinds)
        }
        self._types = {d.id: d.type for d in cluster.devices} if cluster else {}
        self.replicas = [[self._stage(r, stage) for stage in r.stages] for r in plan.replicas]

    def colour(self, device: str) -> str:
        """The colour of a device's type; grey where it is not known."""
        return self.colours.get(self._types.get(device, ""), _UNKNOWN)

    def _weights(self, replica: ReplicaPlan, stage: StagePlan) -> tuple[list[float], str]:
        lo, hi = stage.layers
        if self.costs is None or self.cluster is None:
            return [1.0] * (hi - lo), ""
        kind, degree = self.cluster.device(stage.device).type, len(stage.devices)
        size = replica.microbatch_sizes[0]
        forward, backward = self.costs.time_prefix(kind, size, degree)
        own = (forward[1:] - forward[:-1]) * (2 if stage.recompute else 1) + backward[1:] - backward[:-1]
        whole = sum(self.costs.stage_seconds(kind, lo, hi, size, recompute=stage.recompute, degree=degree))
        inside = float(own[lo:hi].sum())
        scaled = own[lo:hi] * (whole / inside) if inside > 0 else own[lo:hi] + whole / (hi - lo)
        return [float(x) for x in scaled], human_seconds(whole)

    def _stage(self, replica: ReplicaPlan, stage: StagePlan) -> _Stage:
        lo, hi = stage.layers
        weights, seconds = self._weights(replica, stage)
        layers = self.profile.layers[lo:hi] if self.profile else ()
        names = [printable(layer.name) for layer in layers] or [str(i) for i in range(lo, hi)]
        kind = self.cluster.device(stage.device).type if self.cluster else ""
        tips = [f"layer {lo + i}" + (f": {names[i]}" if layers else "") for i in range(hi - lo)]
        if seconds:
            tips = [f"{tip}, F + B {human_seconds(x)}" for tip, x in zip(tips, weights, strict=True)]
        devices = printable(", ".join(stage.devices) + (f" · {kind}" if kind else ""))
        many = "layers" if hi - lo > 1 else "layer"
        details = [f"{many} {layer_range(stage)}", seconds, "recomputed" if stage.recompute else ""]
        label = (devices, " · ".join(filter(None, details)))
        colour = self.colour(stage.device)
        return _Stage(first=lo, weights=weights, names=names, tips=tips, label=label, colour=colour)


def _spread(centres: Sequence[float], widths: Sequence[float], room: float) -> list[float]:
    """Centres, moved so that labels neither overlap nor leave [0, room], into which their widths fit."""
    moved, end = [], 0.0
    for centre, width in zip(centres, widths, strict=True):
        end = max(centre - width / 2, end) + width
        moved.append(end - width / 2)
    limit = room
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], limit - widths[i] / 2)
        limit = moved[i] - widths[i] / 2
    return moved


def _inside(name: str, index: str, width: float) -> Words | None:
    """A layer's name if all of it fits into its segment, across or upright; else much of it, or its index."""
    across = Words(x=0, y=0, text=name, size=_SMALL, anchor="middle")
    upright = Words(x=0, y=0, text=name, size=9, upright=True)
    if text_width(name, _SMALL) <= width - 2:
        return across
    if width >= 12 and text_width(name, 9) <= _BAR - 2:
        return upright
    if part := fitting(name, width - 4, _SMALL, least=12):
        return replace(across, text=part)
    if text_width(index, _SMALL) <= width - 2:
        return replace(across, text=index)
    return replace(upright, text=index) if width >= 12 else None


def _draw_stage(canvas: Canvas, stage: _Stage, x: float, y: float, scale: float) -> None:
    at = x
    for i, (weight, name, tip) in enumerate(zip(stage.weights, stage.names, stage.tips, strict=True)):
        width = weight * scale
        fill = _mixed(stage.colour, 0.42 if i % 2 else 0.28)
        canvas.boxes.append(Box(x=at, y=y, width=width, height=_BAR, fill=fill, tip=tip))
        words = _inside(name, str(stage.first + i), width)
        if words is not None:
            canvas.words.append(replace(words, x=at + width / 2, y=y + _BAR / 2))
        at += width
    canvas.boxes.append(Box(x=x, y=y, width=at - x, height=_BAR, fill="none", edge=stage.colour, thickness=2))


def _draw_replica(
    canvas: Canvas, stages: Sequence[_Stage], left: float, y: float, scale: float, room: float
) -> None:
    x, centres = 0.0, []
    for stage in stages:
        _draw_stage(canvas, stage, left + x, y, scale)
        centres.append(x + stage.total * scale / 2)
        x += stage.total * scale
    labels = _spread(centres, [stage.label_width for stage in stages], room)
    below = y + _BAR
    for stage, centre, label in zip(stages, centres, labels, strict=True):
        half = stage.total * scale / 2
        if abs(label - centre) + stage.label_width / 2 - 7 > half:
            ends = {"x1": left + centre, "y1": below + 1, "x2": left + label, "y2": below + 9}
            canvas.lines.append(Line(**ends, colour=stage.colour))
        middle = Words(x=left + label, y=below + 17, text=stage.label[0], anchor="middle", bold=True)
        canvas.words.append(middle)
        canvas.words.append(
            replace(middle, y=below + 31, text=stage.label[1], size=_SMALL, bold=False, colour=FAINT)
        )


def _draw_heading(canvas: Canvas, content: _Content) -> None:
    plan, facts = content.plan, dict(prediction_facts(content.plan))
    canvas.words.append(Words(x=_MARGIN, y=30, text=plan.model, size=17, bold=True))
    shape = f"{counted(len(plan.replicas), 'replica')} on {counted(len(plan.device_ids), 'device')}"
    lines = [f"{shape}, {origin(plan)}"]
    if plan.predicted is not None:
        text = f"predicted: {human_seconds(plan.predicted.step_seconds)} a step, {facts['throughput']}"
        lines.append(text + (f", gap {facts['gap']} to the lower bound" if "gap" in facts else ""))
    else:
        lines.append("no prediction")
    for i, text in enumerate(lines):
        canvas.words.append(Words(x=_MARGIN, y=54 + 17 * i, text=text, size=12, colour=FAINT))
    canvas.height = 54 + 17 * len(lines)


def _draw_legend(canvas: Canvas, entries: Sequence[tuple[str, str, str]]) -> None:
    """Swatches (fill, edge) with their names, in as many lines as they need."""
    x, y = _MARGIN, canvas.height + 8
    for fill, edge, name in entries:
        width = 22 + text_width(name) + 18
        if x > _MARGIN and x + width > canvas.width - _MARGIN:
            x, y = _MARGIN, y + 20
        canvas.boxes.append(Box(x=x, y=y - 7, width=14, height=14, fill=fill, edge=edge, thickness=2))
        canvas.words.append(Words(x=x + 22, y=y, text=name))
        x += width
    canvas.height = y + (24 if entries else 8)


def _draw_replicas(canvas: Canvas, content: _Content, left: float, room: float) -> None:
    longest = max(sum(stage.total for stage in stages) for stages in content.replicas)
    scale = room / longest if longest > 0 else 0.0
    y = canvas.height
    for r, (replica, stages) in enumerate(zip(content.plan.replicas, content.replicas, strict=True)):
        canvas.words.append(Words(x=_MARGIN, y=y + 13, text=f"replica {r}", bold=True))
        canvas.words.append(Words(x=_MARGIN, y=y + 30, text=_share(replica), size=_SMALL, colour=FAINT))
        _draw_replica(canvas, stages, left, y, scale, room)
        y += _BAR + _LABEL + _GAP
    what = "seconds of forward + backward of one micro-batch" if content.costs else "number of layers"
    canvas.words.append(Words(x=left, y=y, text=f"width: {what}", size=_SMALL, colour=FAINT))
    canvas.height = y + _MARGIN


def _fill(kind: str, colour: str) -> str:
    return {"F": _mixed(colour, 0.35), "B": _mixed(colour, 0.8), "sync": _SYNC}.get(kind, _OPTIMIZER)


def _draw_gantt(canvas: Canvas, content: _Content, timeline: Timeline, left: float, room: float) -> None:
    seconds, y = total_seconds(timeline), canvas.height + 18
    scale = room / seconds if seconds > 0 else 0.0
    canvas.words.append(Words(x=_MARGIN, y=y, text="One step", size=13, bold=True))
    canvas.height = y + 14
    example = next(iter(content.colours.values()), _UNKNOWN)
    shades = {"F": " (light)", "B": " (dark)"}
    names = {kind: name + shades.get(kind, "") for kind, name in KIND_NAMES.items()}
    _draw_legend(canvas, [(_fill(kind, example), "none", name) for kind, name in names.items()])
    rows, heights, y = by_device(timeline), [], canvas.height
    for i, (r, *_) in enumerate(rows):
        y += 6 if i and r != rows[i - 1][0] else 0
        heights.append(y)
        canvas.boxes.append(Box(x=left, y=y, width=room, height=_LANE - 2, fill="#f4f4f4"))
        y += _LANE
    for t in ticks(seconds, int(room // 90)):
        x, label = left + t * scale, human_seconds(t)
        grid = Box(x=x, y=canvas.height - 2, width=0.75, height=y + 4 - canvas.height, fill="#c0c0c0")
        canvas.boxes.append(grid)
        canvas.words.append(Words(x=x, y=y + 12, text=label, size=_SMALL, anchor="middle", colour=FAINT))
    for at, (r, s, device, spans) in zip(heights, rows, strict=True):
        label, middle = f"r{r} s{s} {device}", at + _LANE / 2 - 1
        canvas.words.append(Words(x=left - 8, y=middle, text=label, size=_SMALL, anchor="end"))
        for span in sorted(spans, key=lambda span: span.kind != "sync"):  # work over sums
            if span.kind in KIND_NAMES and span.end > span.start:
                _draw_span(canvas, span, content.colour(device), left, at, scale)
    canvas.height = y + 24


def _draw_span(canvas: Canvas, span: Span, colour: str, left: float, y: float, scale: float) -> None:
    x, width = left + span.start * scale, (span.end - span.start) * scale
    number = "" if span.microbatch is None else str(span.microbatch)
    tip = f"{KIND_NAMES[span.kind]} {number}, {human_seconds(span.end - span.start)}"
    fill = _fill(span.kind, colour)
    edge = PAPER if width > 3 else fill
    place = {"x": x, "y": y, "width": width, "height": _LANE - 2, "thickness": 0.5}
    canvas.boxes.append(Box(**place, fill=fill, edge=edge, tip=f"{tip} from {human_seconds(span.start)}"))
    if number and text_width(number, 9) + 1 <= width:
        ink = PAPER if _is_dark(fill) else INK
        middle = Words(x=x + width / 2, y=y + _LANE / 2 - 1, text=number, size=9, anchor="middle", colour=ink)
        canvas.words.append(middle)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 125


def _share(replica: ReplicaPlan) -> str:
    return f"{share_text(replica)} = {counted(replica.samples, 'sample')}"


def plan_canvas(
    plan: Plan, *, profile: Profile | None = None, cluster: Cluster | None = None,
    timeline: Timeline | None = None,
) -> Canvas:  # fmt: skip
    """The plan as a drawing. InputError if the plan does not belong to the profile and cluster."""
    content = _Content(plan, profile, cluster)
    beside = [text_width(_share(replica), _SMALL) for replica in plan.replicas]
    rows = by_device(timeline) if timeline else []
    beside += [text_width(f"r{r} s{s} {device}", _SMALL) + 10 for r, s, device, _ in rows]
    left = _MARGIN + max(beside) + 12
    labels = max(sum(stage.label_width for stage in stages) for stages in content.replicas)
    room = max(640.0, min(1.3 * labels, 1400.0), labels)  # with some to spare, labels stay near their stages
    title = text_width(printable(plan.model), 17, bold=True)
    canvas = Canvas(width=max(left + room + _MARGIN, title + 2 * _MARGIN))
    _draw_heading(canvas, content)
    entries = []
    for kind, colour in content.colours.items():
        memory = content.cluster.device_types[kind].memory if content.cluster else 0
        entries.append((_mixed(colour, 0.35), colour, f"{kind} · {human_bytes(memory)}"))
    _draw_legend(canvas, entries)
    _draw_replicas(canvas, content, left, room)
    if timeline is not None:
        _draw_gantt(canvas, content, timeline, left, room)
    return canvas


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 "DejaVu Sans", Verdana, sans-serif; color: #1a1a1a; background: #fff; margin: 1em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
th, td {{ text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
<div class="wide">
{svg}</div>
{tables}
</body>
</html>
"""


def _html_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(printable(cell))}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(heading, "th")] if heading else []
    return "<table>\n" + "\n".join([*lines, *(line(row, "td") for row in rows)]) + "\n</table>"


def plan_page(
    plan: Plan, *, profile: Profile | None = None, cluster: Cluster | None = None,
    timeline: Timeline | None = None,
) -> str:  # fmt: skip
    """One HTML page with the drawing, the plan's table and its prediction; it loads nothing else."""
    canvas = plan_canvas(plan, profile=profile, cluster=cluster, timeline=timeline)
    rows = plan_rows(plan, profile=profile, cluster=cluster)
    tables = [_html_table(list(rows[0]), [list(row.values()) for row in rows])]
    if plan.predicted is not None:
        tables.append(_html_table([], prediction_facts(plan)))
    title = html.escape(printable(f"{plan.model}: plan"))
    return _PAGE.format(title=title, svg=canvas.to_svg(), tables="\n".join(tables))


def draw_plan(
    plan: Plan, path: str | Path, *, profile: Profile | None = None, cluster: Cluster | None = None,
    timeline: Timeline | None = None,
) -> None:  # fmt: skip
    """Draw the plan into `path`: .svg, .png (needs matplotlib) or .html, by its suffix.

    The more is given the more is shown: names (profile), device types (cluster), widths by time (both), and
    who works when (timeline). InputError for another suffix, or where these do not belong together.
    """
    check_output(path, *PICTURES)
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        write_text(path, plan_page(plan, profile=profile, cluster=cluster, timeline=timeline))
        return
    canvas = plan_canvas(plan, profile=profile, cluster=cluster, timeline=timeline)
    if suffix == ".svg":
        write_text(path, canvas.to_svg())
    else:
        write_bytes(path, canvas.to_png())
