"""The sections of the report, a function each; empty where nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetpipe.files.messages import counted
from hetpipe.files.units import human_bytes, human_seconds, three_digits
from hetpipe.planning.front import Front, nodes_text
from hetpipe.predict.idle import CAUSES
from hetpipe.predict.timeline import Timeline
from hetpipe.show.page.html import data, escaped, paragraph, section, table
from hetpipe.show.picture.canvas import NARROW, WIDE, Canvas
from hetpipe.show.picture.curves import memory_canvas
from hetpipe.show.picture.front import front_canvas
from hetpipe.show.picture.gantt import gantt_canvas
from hetpipe.show.picture.loss import RunCurve, loss_canvas
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.show.report import prediction_facts
from hetpipe.show.words import (
    PROOFS,
    equal_split_text,
    idle_text,
    in_words,
    memory_text,
    numbers_text,
    percent,
    stage_key,
    stage_sentence,
    work_text,
)
from hetpipe.study.scene import Scene, StageScene
from hetpipe.study.study import Alternative, Changes, MovedCut


def run_section(run: RunCurve | None) -> str:
    """What a run trained, and how its loss went."""
    if run is None:
        return ""
    facts = [["model", run.model], ["data", run.data], ["adapter", run.adapter]]
    facts += [["loss", _from_to(run.trained)], ["loss of samples that do not train", _from_to(run.evaluated)]]
    if run.best is not None:
        facts.append(["best evaluation", f"that of step {run.best}"])
    told = table(["", "of this run"], [row for row in facts if row[1]], label="the run", text=True)
    drawn = _figure(lambda width: loss_canvas(run, width)) if run.points else ""
    return section("run", "The run", told, drawn)


def _from_to(points: Sequence[tuple[int, float]]) -> str:
    return f"{points[0][1]:.4g} (step {points[0][0]}) to {points[-1][1]:.4g} (step {points[-1][0]})" if points else ""


def words_section(scene: Scene) -> str:
    """The plan in sentences, and how much faster it is than the equal split."""
    first, *others = in_words(scene)
    rest = "".join(f"<li>{escaped(sentence)}</li>" for sentence in others)
    speed = ""
    if scene.speedup is not None and scene.equal is not None:
        speed = paragraph(f"{three_digits(scene.speedup)} × as fast as {equal_split_text(scene.equal)}.", kind="big")
    return section("words", "The plan in words", speed, paragraph(first), f'<ul class="words">{rest}</ul>')


def picture_section(scene: Scene) -> str:
    """The partition, wide and narrow; what a hover or focus shows of a stage."""
    stages = {
        f"{lane.replicas[0]}.{stage.number}": {"text": stage_sentence(scene, lane, stage), "layers": _layers(stage)}
        for lane, stage in scene.stages
    }
    hint = "Rest the mouse on a stage, or go there with the Tab key, to see its layers."
    panel = f'<div id="details" role="status" aria-live="polite">{hint}</div>'
    drawn = _figure(lambda width: partition_canvas(scene, width))
    return section("picture", "Who computes what", drawn, panel, data("stages", stages))


def _layers(stage: StageScene) -> list[str]:
    return [
        f"{tile.layer} {tile.name}" + (f": {human_seconds(tile.seconds)}" if tile.seconds is not None else "")
        for tile in stage.tiles
    ]


def moves_section(scene: Scene, found: Sequence[MovedCut]) -> str:
    """A slider for each cut; all positions are in the page."""
    if not found or not scene.seconds:
        return data("cuts", [])
    cuts: dict[tuple[tuple[int, ...], int], list[MovedCut]] = {}
    for one in found:
        cuts.setdefault((one.replicas, one.stage), []).append(one)
    lanes, values = {lane.replicas: lane for lane in scene.lanes}, list[dict[str, Any]]()
    for (group, s), positions in cuts.items():
        a, b = lanes[group].stages[s : s + 2]
        own = next((one.step_seconds for one in positions if one.layers == 0), scene.seconds)
        name = f"r{numbers_text(group)}: between s{s} ({a.named}) and s{s + 1} ({b.named})"
        values.append({"name": name, "moves": [_position(one, a, b, own) for one in positions]})
    options = "".join(f'<option value="{i}">{escaped(value["name"])}</option>' for i, value in enumerate(values))
    form = (
        f'<div class="move"><label for="cut">Cut</label><select id="cut">{options}</select>'
        '<label for="by">Move it: right gives layers to the stage before it, left to the stage behind it</label>'
        '<input id="by" type="range" min="0" max="0" step="1"><output id="moved" for="cut by"></output></div>'
    )
    note = paragraph("Each position was simulated, with everything else of the plan as it is.", kind="note")
    return section("moves", "Move a cut", form, note, data("cuts", values))


def _position(one: MovedCut, a: StageScene, b: StageScene, own: float) -> dict[str, Any]:
    change = one.step_seconds / own - 1 if own > 0 else 0.0
    by = f"{'right' if one.layers > 0 else 'left'} by {counted(abs(one.layers), 'layer')}"
    said = "the plan as it is" if one.layers == 0 else f"{by}: {100 * change:+.1f} %"
    first, second = len(a.tiles) + one.layers, len(b.tiles) - one.layers
    sizes = [human_bytes(size) for size in one.peak_bytes]
    memory = f"s{a.number}: {counted(first, 'layer')}, {sizes[0]}; s{b.number}: {counted(second, 'layer')}, {sizes[1]}"
    memory += "" if one.fits else "; does not fit into memory"
    step = f"{human_seconds(one.step_seconds)} a step"
    return {"by": one.layers, "seconds": one.step_seconds, "step": step, "said": said, "memory": memory}


def _figure(draw: Callable[[float], Canvas]) -> str:
    """A picture twice: as wide as a screen, and as a phone."""
    wide, narrow = (draw(width).to_svg(alone=False) for width in (WIDE, NARROW))
    return f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'


def timeline_section(scene: Scene, predicted: Timeline | None, measured: Timeline | None) -> str:
    """Who does what when: measured above predicted."""
    both = {name: found for name, found in (("measured", measured), ("predicted", predicted)) if found is not None}
    if not both:
        return ""
    return section("timeline", "One step in time", _figure(lambda width: gantt_canvas(scene, both, width)))


def memory_section(scene: Scene, predicted: Timeline | None) -> str:
    """Bytes in use over the step."""
    if predicted is None or not predicted.memory:
        return ""
    note = "Predicted bytes in use; the dashed line is the device's memory."
    drawn = _figure(lambda width: memory_canvas(scene, predicted, width))
    return section("memory", "Memory over one step", drawn, paragraph(note, kind="note"))


def time_section(scene: Scene) -> str:
    """The seconds of each device, by what it does and why it does not."""
    if not scene.seconds:
        return ""
    kinds = [
        name
        for name in ("forward", "backward", "recompute", "optimizer")
        if any(name in dict(work_text(stage)) for _, stage in scene.stages)
    ]
    causes = [cause for cause in CAUSES if any(stage.idle.get(cause, 0.0) > 0 for _, stage in scene.stages)]
    rows = []
    for lane, stage in scene.stages:
        work, idle = dict(work_text(stage)), dict(idle_text(stage))
        cells = [work.get(kind, "0 s") for kind in kinds] + [idle.get(cause, "0 s") for cause in causes]
        many = f"{lane.count} × " if lane.count > 1 else ""
        name = f"{many}{stage_key(lane, stage)} {stage.named} {stage.kind}"
        rows.append([name, human_seconds(stage.busy), percent(stage.busy / scene.seconds), *cells, memory_text(stage)])
    heading = ["stage", "computes", "of the step", *kinds, *(f"idle: {cause}" for cause in causes), "memory"]
    marked = [i for i, (_, stage) in enumerate(scene.stages) if stage.limits_step]
    parts = (
        f"The step of {human_seconds(scene.seconds)} is {human_seconds(scene.pipeline_seconds)} of pipelines, "
        f"{human_seconds(scene.sync_seconds)} of gradient sums after them, and {human_seconds(scene.optimizer_seconds)} of "
        "optimizer. The row that limits the step stands out."
    )
    return section("time", "Time broken down", paragraph(parts), table(heading, rows, label="time of each stage", marked=marked))


def proof_section(scene: Scene) -> str:
    """Bounds, gap, price."""
    predicted = scene.plan.predicted
    facts = [(name, text) for name, text in prediction_facts(scene.plan) if name not in ("step", "throughput", "price")]
    if predicted is None or not facts:
        return ""
    said = "A lower bound comes with every plan. " + " ".join(f"{name}: {text}." for name, text in PROOFS.items())
    return section("proof", "What is proven", table(["", ""], facts, label="bounds", text=True), paragraph(said, kind="note"))


def price_section(scene: Scene) -> str:
    """What the devices cost."""
    predicted = scene.plan.predicted
    if predicted is None or not predicted.price_per_hour:
        return ""
    rows = [["this plan", f"{predicted.price_per_hour:.2f}", f"{predicted.price_per_million_samples:.2f}"]]
    other = scene.equal.plan.predicted if scene.equal is not None else None
    if other is not None:
        rows.append(["the equal split", f"{other.price_per_hour:.2f}", f"{other.price_per_million_samples:.2f}"])
    return section("price", "Price", table(["", "per hour", "per million samples"], rows, label="price"))


def against_section(scene: Scene, predicted: Timeline | None, measured: Timeline | None, *, differ: bool = False) -> str:
    """The measured step beside the predicted one; `differ`: whether steps have samples of other lengths."""
    if predicted is None or measured is None:
        return ""
    rows = [
        [
            "step",
            human_seconds(measured.step_seconds),
            human_seconds(predicted.step_seconds),
            _difference(measured.step_seconds, predicted.step_seconds),
        ]
    ]
    seen, expected = measured.busy_seconds(), predicted.busy_seconds()
    for device in scene.plan.device_ids:
        if device in seen and device in expected:
            cells = [human_seconds(seen[device]), human_seconds(expected[device]), _difference(seen[device], expected[device])]
            rows.append([f"computing on {device}", *cells])
    for device, size in sorted(measured.peak_bytes.items()):
        said = predicted.peak_bytes.get(device, 0)
        cells = [human_bytes(size, beside=said), human_bytes(said, beside=size), _difference(size, said)]
        rows.append([f"peak memory of {device}", *cells])
    heading = ["", "measured", "predicted", "difference"]
    note = "Seconds are of one step, the last that was measured" + (
        ", and of the predicted mean over steps whose samples have other lengths." if differ else ", and of the predicted one."
    )
    return section(
        "measured",
        "Measured against predicted",
        paragraph(note, kind="note"),
        table(heading, rows, label="measured against predicted"),
    )


def _difference(a: float, b: float) -> str:
    return f"{100 * (a / b - 1):+.1f} %" if b > 0 else ""


def front_section(found: Front | None) -> str:
    """The sub-clusters that no other beats in both time and price."""
    if found is None:
        return ""
    rows = [
        [
            nodes_text(row.nodes),
            f"{row.price_per_hour:.2f}",
            human_seconds(row.plan.step_seconds),
            f"{row.plan.price_per_million_samples:.2f}",
            "unknown" if row.plan.gap is None else percent(row.plan.gap),
        ]
        for row in found.front
        if row.plan is not None
    ]
    heading = ["nodes", "price per hour", "step", "price per million samples", "gap"]
    note = f"{len(found.rows)} sub-clusters were looked at; no other beats these both in time and in price."
    drawn = _figure(lambda width: front_canvas(found, width)) if front_canvas(found).height else ""
    return section("front", "Price against time", paragraph(note), drawn, table(heading, rows, label="the front"))


def rules_section(scene: Scene, found: Sequence[Alternative]) -> str:
    """What other partitioners make of it."""
    if not found or not scene.seconds:
        return ""
    rows = [[f"{scene.plan.partitioner} (this plan)", human_seconds(scene.seconds), "1.00", _shape(scene.plan), ""]]
    rows += [_row(one, scene.seconds) for one in sorted(found, key=lambda one: one.step_seconds)]
    heading = ["partitioner", "step", "× this plan's", "pipelines × stages", "why none"]
    return section("rules", "Other partitioners", table(heading, rows, label="other partitioners", marked=[0]))


def _row(one: Alternative, base: float) -> list[str]:
    if one.plan is None:
        return [one.name, "no plan", "", "", _clause(one)]
    return [one.name, human_seconds(one.step_seconds), three_digits(one.step_seconds / base), _shape(one.plan), ""]


def _clause(one: Alternative) -> str:
    """Why there is no plan, in a line: the first sentence, without who says it."""
    first = one.reason.split("\n")[0].split(". ")[0].removeprefix(f"{one.name}: ")
    return first if len(first) <= 160 else first[:159] + "…"


def _shape(plan: Any) -> str:
    counts: dict[int, int] = {}
    for replica in plan.replicas:
        counts[len(replica.stages)] = counts.get(len(replica.stages), 0) + 1
    return " + ".join(f"{count} × {stages}" for stages, count in counts.items())


def changes_section(found: Changes | None, batch: int) -> str:
    """What other clusters would do."""
    if found is None:
        return ""
    base, rows = found.plans[0].step_seconds, []
    for one in found.plans:
        if one.plan is None or one.plan.predicted is None:
            rows.append([one.name, "no plan", "", "", "", _clause(one)])
            continue
        predicted = one.plan.predicted
        cost = f"{predicted.price_per_million_samples:.2f}" if predicted.price_per_hour else ""
        speed = three_digits(batch / one.step_seconds) if one.step_seconds > 0 else ""
        rows.append([one.name, human_seconds(one.step_seconds), speed, _difference(base, one.step_seconds), cost, ""])
    heading = ["what if", "step", "samples/s", "speed", "price per million samples", "why none"]
    note = (
        f"Each was planned by {found.how}, or is this plan where it still runs, and was simulated; the first row is the "
        "cluster as it is."
    )
    return section("changes", "What if", paragraph(note, kind="note"), table(heading, rows, label="what if", marked=[0]))
