"""Plans and timelines as text: tables, and a Gantt chart for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.units import human_bytes, human_seconds, three_digits
from hetpipe.predict.cost import Costs
from hetpipe.predict.timeline import Span, Timeline
from hetpipe.show.trace import WORK, by_device
from hetpipe.show.words import (
    FEW_STAGES,
    PROOFS,
    enumerated,
    in_words,
    layer_range,
    memory_text,
    microbatches_text,
    numbers_text,
    origin_text,
    share_text,
    stage_key,
    unused_line,
)
from hetpipe.study.scene import LaneScene, Scene, StageScene, make_scene

_NUMBERS = ("F", "B", "params", "memory")
PER_STEP = "F, B: seconds of a step that a device computes forward and backward"
_SPARE = ("names", "params", "depth", "recompute")  # columns of a table that is too wide, least needed first
# Okabe and Ito 2008: told apart by the colour-blind too
KIND_COLOURS = {"F": "#56B4E9", "B": "#E69F00", "sync": "#CC79A7", "optimizer": "#009E73"}
KIND_NAMES = {"F": "forward", "B": "backward", "sync": "sync", "optimizer": "optimizer"}


def shorten(name: str, length: int) -> str:
    """The end of a name, which tells it apart: `…layers.49.attention`."""
    return name if len(name) <= length else "…" + name[len(name) - length + 1 :]


def ticks(seconds: float, count: int) -> list[float]:
    """At most `count` + 1 round times from 0 to `seconds`, in steps of 1, 2 or 5 × 10ᵏ."""
    if not seconds > 0:
        return [0.0]
    raw = seconds / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    return [i * step for i in range(math.floor(seconds / step * (1 + 1e-9)) + 1)]


def _names(stage: StageScene) -> str:
    first, last = shorten(stage.tiles[0].name, 24), shorten(stage.tiles[-1].name, 24)
    return first if len(stage.tiles) == 1 else f"{first} … {last}"


def _stage_row(plan: Plan, lane: LaneScene, stage: StageScene, profile: Profile | None, costs: Costs | None) -> dict[str, str]:
    (lo, hi), degree = stage.layers, len(stage.devices)
    forward = backward = parameters = ""
    if costs is not None:
        pairs = [
            costs.stage_seconds(stage.kind, lo, hi, size, recompute=stage.recomputed, offload=stage.offloaded, degree=degree)
            for size in lane.sizes
        ]
        forward, backward = (human_seconds(sum(seconds)) for seconds in zip(*pairs, strict=True))
        parameters = human_bytes(costs.parameter_bytes(stage.kind, lo, hi, degree)[0])
    elif profile is not None and degree == 1:
        parameters = human_bytes(float(profile.parameter_bytes()[lo:hi].sum()))
    many = f"{lane.count} × " if lane.count > 1 else ""
    return {
        "stage": f"{many}{stage_key(lane, stage)}",
        "device": f"{stage.named} {stage.kind}".strip(),
        "share": "" if stage.number else share_text(lane.sizes),
        "layers": layer_range(stage.layers),
        "names": _names(stage) if profile is not None else "",
        "F": forward,
        "B": backward,
        "depth": f"{stage.depth}",
        "recompute": "yes" if stage.recomputed else "offload" if stage.offloaded else "",
        "params": parameters,
        "memory": memory_text(stage, part=False),
    }


def plan_rows(plan: Plan, *, profile: Profile | None = None, cluster: Cluster | None = None) -> list[dict[str, str]]:
    """One row a stage, replicas that are alike once, as text by column; columns of which nothing is known are left out.

    "share" (of the replica) stands with its first stage; F and B are the seconds of all micro-batches of a step; "depth" is the
    warm-up depth. InputError if the plan does not belong to the profile and cluster.
    """
    profile = profile.at(plan.precision) if profile is not None else None
    scene = make_scene(plan, profile=profile, cluster=cluster)
    costs = Costs(profile, cluster) if profile is not None and cluster is not None else None
    rows = [_stage_row(plan, lane, stage, profile, costs) for lane, stage in scene.stages]
    kept = [column for column in rows[0] if any(row[column] for row in rows)]
    return [{column: row[column] for column in kept} for row in rows]


def prediction_facts(plan: Plan) -> list[tuple[str, str]]:
    """What was predicted of the plan, as (name, text); empty where nothing was."""
    p = plan.predicted
    if p is None:
        return []
    parts = {"pipeline": p.pipeline_seconds, "gradient sync": p.gradient_sync_seconds, "optimizer": p.optimizer_seconds}
    inside = ", ".join(f"{name} {human_seconds(x)}" for name, x in parts.items())
    facts = [("step", f"{human_seconds(p.step_seconds)} ({inside})")]
    facts += [("throughput", f"{three_digits(p.samples_per_second)} samples/s")]
    if p.lower_bound_seconds is not None:
        named = p.proof if p.lower_bound_price_per_million_samples is None else "fluid"
        proof = f" ({named}: {PROOFS[named]})" if named else ""
        facts.append(("lower bound", human_seconds(p.lower_bound_seconds) + proof))
    if p.fluid_bound_seconds is not None and p.proof != "fluid":
        efficiency = p.fluid_bound_seconds / p.step_seconds if p.step_seconds > 0 else 1.0
        text = f"{human_seconds(p.fluid_bound_seconds)} (no plan of any kind is below it; this one reaches {efficiency:.0%})"
        facts.append(("fluid bound", text))
    if p.gap is not None:
        of = "" if p.lower_bound_price_per_million_samples is None else " of the price"
        facts.append((f"gap{of}", f"{100 * p.gap:.1f} %"))
    if p.price_per_hour:
        per_million = f"{p.price_per_million_samples:.2f} per million samples"
        facts.append(("price", f"{p.price_per_hour:.2f} per hour, {per_million}"))
    if p.lower_bound_price_per_million_samples is not None and p.proof:
        text = f"{p.lower_bound_price_per_million_samples:.2f} per million samples ({p.proof}: {PROOFS[p.proof]})"
        facts.append(("least price in time", text))
    return facts


def _columns(rows: Sequence[dict[str, str]], wanted: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in wanted:
        number = column in _NUMBERS
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for i, row in enumerate(rows):
        if i and row["share"]:
            table.add_section()
        table.add_row(*(Text(row[column]) for column in wanted))
    return table


@dataclass(frozen=True)
class Narrowing:
    """The first of several tables that fits into the terminal, or the last, whose lines are folded."""

    tables: Iterable[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide, tables = options.update(max_width=10_000), list(self.tables)
        yield next((t for t in tables if console.measure(t, options=wide).maximum <= options.max_width), tables[-1])


def _stages(rows: Sequence[dict[str, str]]) -> Iterable[RenderableType]:
    """All columns, then fewer and fewer, without the least needed, and at last a paragraph a stage."""
    spare = [column for column in _SPARE if column in rows[0]]
    yield from (_columns(rows, [c for c in rows[0] if c not in spare[:left_out]]) for left_out in range(len(spare) + 1))
    yield paragraphs([{name: text for name, text in row.items() if name not in _SPARE} for row in rows])


def paragraphs(rows: Sequence[Mapping[str, str]]) -> Group:
    """A paragraph a stage, for terminals that are too narrow for a table."""
    return Group(*map(_paragraph, rows), "")


def _paragraph(row: Mapping[str, str]) -> RenderableType:
    """`r0 s0 n0/0 a100`, and below it the other columns, each with its name."""
    heading = Text(f"\n{row['stage']} {row['device']}", style="bold")
    said = [Text(f"{name} {text}") for name, text in row.items() if text and name not in ("stage", "device")]
    return Group(heading, Padding(Columns(said, padding=(0, 3)), (0, 0, 0, 2), expand=False))


def plan_table(plan: Plan, *, profile: Profile | None = None, cluster: Cluster | None = None) -> Group:
    """The plan: a row a stage, grouped by replica, and below it the prediction.

    More is shown with the profile (names, parameters), the cluster (types, memory) and both (times).
    InputError if they do not belong together.
    """
    profile = profile.at(plan.precision) if profile is not None else None
    scene = make_scene(plan, profile=profile, cluster=cluster)
    rows = plan_rows(plan, profile=profile, cluster=cluster)
    notes = [Text(PER_STEP, style="dim")] if "F" in rows[0] else []
    heading = f"{plan.model}: {origin_text(plan)}"
    below = Table.grid(padding=(0, 2))
    if plan.precision:
        below.add_row(Text("precision", style="bold"), Text(", ".join(f"{p} on {kind}" for kind, p in plan.precision.items())))
    for name, text in prediction_facts(plan):
        below.add_row(Text(name, style="bold"), Text(text))
    if scene.unused:
        below.add_row(Text("unused", style="bold"), Text(unused_line(scene)))
    nothing = Text("no prediction in this plan: 'hetpipe simulate' makes one", style="dim")
    return Group(Text(heading, style="bold"), Narrowing(_stages(rows)), *notes, below if plan.predicted else nothing)


def total_seconds(timeline: Timeline) -> float:
    """Where the time axis ends: the step, or the last span where one lies behind it."""
    return max([timeline.step_seconds, *(span.end for span in timeline.spans)])


def _cells(spans: Sequence[Span], seconds: float, width: int) -> list[Span | None]:
    """What each of `width` buckets shows: the work that fills most of it, unless idle time fills more.

    A gradient sum shows only where no work does. An optimizer (or sum) too short for a bucket still gets one.
    """
    shown: list[Span | None] = [None] * width
    best, idle = [0.0] * width, [1.0] * width
    scale = width / seconds if seconds > 0 else 0.0
    for span in spans:
        a, b = span.start * scale, min(span.end * scale, width)
        for c in range(int(a + 1e-9), math.ceil(b - 1e-9)) if span.kind in WORK else ():
            part = min(b, c + 1) - max(a, c)
            idle[c] -= part
            if part > best[c] + 1e-9:
                best[c], shown[c] = part, span
    for c in range(width):
        if idle[c] > best[c] + 1e-9:
            shown[c] = None
    for span in spans:
        if span.kind in ("sync", "optimizer") and span.end > span.start:
            _mark(shown, span, scale)
    return shown


def _mark(shown: list[Span | None], span: Span, scale: float) -> None:
    if any(x is span for x in shown):
        return
    first, last = int(span.start * scale + 0.5), int(span.end * scale + 0.5)
    for c in range(first, min(last, len(shown))):
        shown[c] = shown[c] or span
    middle = min(int((span.start + span.end) / 2 * scale), len(shown) - 1)
    if first == last and (shown[middle] is None or span.kind == "optimizer"):
        shown[middle] = span


def _row(spans: Sequence[Span], seconds: float, width: int) -> Text:
    """`F11B00··oo`: a letter, then the micro-batch's last digit; only the digit where there is one column."""
    cells, text = _cells(spans, seconds, width), _line()
    for c, span in enumerate(cells):
        if span is None:
            text.append("·", style="dim")
            continue
        starts = (c == 0 or cells[c - 1] is not span) and c + 1 < width and cells[c + 1] is span
        lone = span.microbatch is None or span.kind not in ("F", "B")
        letter = span.kind[0] if lone or starts else f"{span.microbatch % 10}"  # type: ignore[operator]
        text.append(letter, style=f"black on {KIND_COLOURS[span.kind]}")
    return text


def _axis(seconds: float, width: int) -> str:
    line = ""
    for t in ticks(seconds, width // 12):
        at, label = round(t * width / seconds) if seconds > 0 else 0, "|" + human_seconds(t)
        if at >= len(line) and at + len(label) <= width:
            line = line.ljust(at) + label
    return line


@dataclass(frozen=True)
class _Gantt:
    timeline: Timeline
    width: int | None
    scene: Scene | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, seconds = by_device(self.timeline), total_seconds(self.timeline)
        heads = {r: f"r{r}" for r, *_ in rows}
        if self.scene is not None:
            heads = {lane.replicas[0]: f"r{numbers_text(lane.replicas)}" for lane in self.scene.lanes}
            rows = [row for row in rows if row[0] in heads]
        labels, last, wide = [], None, max(map(len, heads.values()), default=0)
        for r, s, device, _ in rows:
            labels.append(f"{heads[r] if r != last else '':<{wide}} s{s} {device}")
            last = r
        left = max([len(label) for label in labels], default=0)
        width = self.width or max(20, options.max_width - left - 1)
        for label, (*_, spans) in zip(labels, rows, strict=True):
            yield _line(f"{label:<{left}} ").append_text(_row(spans, seconds, width))
        yield _line(" " * (left + 1) + _axis(seconds, width), style="dim")
        legend = Text()
        for kind, name in KIND_NAMES.items():
            legend.append(kind[0], style=f"black on {KIND_COLOURS[kind]}").append(f" {name}  ")
        legend.append("·", style="dim").append(" idle")
        yield Padding(legend, (0, 0, 0, left + 1 if left + 1 + len(legend) <= options.max_width else 0), expand=False)


def _line(text: str = "", style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="crop")


def text_gantt(timeline: Timeline, width: int | None = None, *, scene: Scene | None = None) -> RenderableType:
    """A row a device in the order of replicas and stages, a column per time bucket; with the scene, replicas that are alike once.

    `width` columns, or as many as the terminal has. A forward or backward is its letter, then the last digit
    of its micro-batch (where it has one column only the digit, in its colour); `s` is a sum of gradients, `o`
    the optimizer.
    """
    if width is not None and width < 1:
        raise ValueError(f"width must be at least 1 column, got {width}")
    return _Gantt(timeline, width, scene)


def _kind_seconds(spans: Iterable[Span]) -> dict[str, float]:
    found = dict.fromkeys(WORK, 0.0)
    for span in spans:
        if span.kind in found:
            found[span.kind] += span.end - span.start
    return found


def _utilisation(spans: Iterable[Span], step: float) -> list[str]:
    per_kind = _kind_seconds(spans)
    busy = 100 * sum(per_kind.values()) / step if step > 0 else 0.0
    return [f"{busy:.1f} %", f"{max(0.0, 100 - busy):.1f} %", *map(human_seconds, per_kind.values())]


def utilisation_table(predicted: Timeline | None, measured: Timeline, *, differ: bool = False) -> Table:
    """Per device what part of a step it computes (busy) and does not (bubble), and its seconds by kind.

    What was predicted stands on a second line: where samples `differ` in length from step to step, of the mean step.
    """
    caption = f"of one step, the last that was measured ({human_seconds(measured.step_seconds)})"
    if predicted is not None:
        of = "mean of all lengths" if differ else "one"
        caption += f", and of the predicted {of} ({human_seconds(predicted.step_seconds)})"
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("device", "", "busy", "bubble", "F", "B", "optimizer"):
        table.add_column(column, justify="left" if column in ("device", "") else "right")
    expected = {device: spans for *_, device, spans in by_device(predicted)} if predicted else {}
    for r, s, device, spans in by_device(measured):
        name = Text(f"r{r} s{s} {device}")
        table.add_row(name, "measured", *_utilisation(spans, measured.step_seconds))
        if predicted is not None and device in expected:
            figures = _utilisation(expected[device], predicted.step_seconds)
            table.add_row("", "predicted", *figures, style="dim")
    return table


def plan_text(scene: Scene) -> str:
    """One sentence: which device runs which layers, on how many samples of a step."""
    if len(scene.stages) > FEW_STAGES:
        return " ".join(in_words(scene)[1 : 1 + len(scene.types())])
    text = "; ".join(_lane_text(scene, lane) for lane in scene.lanes)
    unused = ", ".join(f"{f'{count} × ' if count > 1 else ''}{kind}" for kind, count in scene.unused.items())
    return text + (f"; {unused} stays idle, since it would make a step no shorter" if unused else "")


def _lane_text(scene: Scene, lane: LaneScene) -> str:
    layers = scene.plan.layer_count
    parts = []
    for stage in lane.stages:
        devices = " + ".join(stage.devices) if lane.count == 1 else enumerated([" + ".join(twin) for twin in stage.twins])
        some = f"layer{'s' if len(stage.tiles) > 1 else ''} {layer_range(stage.layers)} of {layers}"
        what = some if len(stage.tiles) < layers else f"all {layers} layers"
        again = ", recomputing activations" if stage.recomputed else ", offloading activations" if stage.offloaded else ""
        parts.append(f"{stage.kind} ({devices}) {'each run' if lane.count > 1 else 'runs'} {what}{again}")
    samples = f"{lane.samples} of {scene.plan.global_batch} samples of a step"
    return f"{', '.join(parts)}: {samples}, in {microbatches_text(lane.sizes)}"
