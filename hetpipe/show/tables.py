"""Tables of a profile and of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetpipe.documents.clusters.assumed import (
    ALLOCATOR_FACTOR,
    CHANNEL_BYTES,
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    NVLINK_CHANNELS,
    PCIE_CHANNELS,
)
from hetpipe.documents.profile import Profile
from hetpipe.files.units import human_bytes, human_seconds, three_digits
from hetpipe.predict.idle import Cause
from hetpipe.show.report import Narrowing, paragraphs
from hetpipe.show.words import idle_line, limit_line, memory_line, memory_text, percent, stage_key, too_full, unused_line
from hetpipe.study.scene import Scene

MOST_FLOWS = 20  # that are shown
_CHANNELS = (
    f"{human_bytes(CHANNEL_BYTES)} a channel of a CUDA card, {PCIE_CHANNELS} over PCIe, {NVLINK_CHANNELS} over NVLink, "
    "nothing elsewhere"
)
# of the figures of a DeviceOverhead: what each is, how it is written, and what is counted where it was not measured
_OVERHEADS: dict[str, tuple[str, Callable[[float], str], str]] = {
    "action_seconds": ("each forward and backward more", human_seconds, "nothing"),
    "device_bytes": ("context", human_bytes, f"{human_bytes(CONTEXT_BYTES + CUBLAS_BYTES)} of a CUDA card, nothing elsewhere"),
    "communicator_bytes": ("a communicator", human_bytes, _CHANNELS),
    "allocator_factor": ("held by the allocator, over in use", three_digits, f"{ALLOCATOR_FACTOR} on a CUDA card, 1 elsewhere"),
    "transfer_overlap": ("of a transfer hidden behind compute", percent, "all"),
    "host_bytes_per_second": ("to and from the host", lambda rate: f"{three_digits(rate / 1e9)} GB/s", "nothing is offloaded"),
    "host_copy_overlap": ("of such a copy hidden behind compute", percent, "none"),
}
_SHORT: dict[Cause, str] = {
    "fill and drain": "fill",
    "slower stage": "slower",
    "link": "link",
    "gradient sum": "sum",
    "slower optimizer": "optim.",
    "overhead": "other",
}


def profile_table(profile: Profile) -> Table:
    """Per layer: bytes, and forward + backward seconds of one sample on each device type."""
    table = Table(title=f"profile of {profile.model}")
    frozen = any(layer.trained < layer.parameter_bytes for layer in profile.layers)
    for name in ("layer", "parameters", *(["of these train"] if frozen else []), "output/sample", "saved/sample"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    first = [m for m in profile.measurements if m.tensor_parallel == 1]
    for m in first:
        table.add_column(f"{m.device_type}{f' in {m.precision}' if m.precision else ''}: F + B", justify="right")
    for index, layer in enumerate(profile.layers):
        times = [human_seconds(m.forward_seconds[0][index] + m.backward_seconds[0][index]) for m in first]
        tied = f" (tied: {layer.tied})" if layer.tied else ""
        table.add_row(
            f"{layer.name}{tied}",
            human_bytes(layer.parameter_bytes),
            *([human_bytes(layer.trained)] if frozen else []),
            human_bytes(layer.output_bytes_per_sample),
            human_bytes(layer.saved_bytes_per_sample),
            *times,
        )
    table.add_section()
    totals = [human_seconds(sum(m.forward_seconds[0]) + sum(m.backward_seconds[0])) for m in first]
    table.add_row(
        "all",
        human_bytes(sum(layer.parameter_bytes for layer in profile.layers)),
        *([human_bytes(sum(layer.trained for layer in profile.layers))] if frozen else []),
        "",
        human_bytes(sum(layer.saved_bytes_per_sample for layer in profile.layers)),
        *totals,
    )
    return table


def beside_table(profile: Profile) -> RenderableType:
    """What was measured beside the layers, with its spread: rates of flows, and what the framework takes of each device type; and
    what was not, with what plans count instead."""
    table = Table(title="measured beside the layers", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("what", "where", "measured", "spread"):
        table.add_column(name, justify="right" if name in ("measured", "spread") else "left")
    flows = profile.provenance.get("links", ())
    for row in flows[:MOST_FLOWS]:
        what = "one flow" if row["flows"] == 1 else f"{row['flows']} flows at once"
        rate = f"{three_digits(row['bytes_per_second'] / 1e6)} MB/s"
        table.add_row(what, f"{row.get('from', 'all')} → {row.get('to', 'all')}", rate, percent(row["relative_spread"]))
    if len(flows) > MOST_FLOWS:
        table.add_row(f"{len(flows) - MOST_FLOWS} rates more", "in the profile", "", "")
    for overhead in profile.overheads:
        for name, (what, text, _) in _OVERHEADS.items():
            value = getattr(overhead, name)
            if value is not None:
                table.add_row(what, overhead.device_type, text(value), percent(overhead.relative_spread.get(name, 0.0)))
    missing = [] if profile.adapters else ["adapters (one host): each as fast as its node's fastest link"]
    for name, (what, _, default) in _OVERHEADS.items():
        kinds = [x.device_type for x in profile.overheads if getattr(x, name) is None]
        missing += [f"{what} on {', '.join(kinds)}: {default}"] if kinds else []
    said = "\n".join(f"not measured, {line}" for line in missing)
    return Group(table, Text(said, style="dim")) if said else table


def step_table(scene: Scene) -> RenderableType:
    """A predicted step: its seconds and what they are made of, then for each stage how much of the step it computes, why it
    is idle, how full its memory is, and which one limits the step. Replicas that are alike stand once."""
    assert scene.seconds is not None
    parts = {"pipeline": scene.pipeline_seconds, "gradient sums": scene.sync_seconds, "optimizer": scene.optimizer_seconds}
    inside = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in parts.items())
    facts = Table.grid(padding=(0, 2))
    facts.add_row("step", f"{human_seconds(scene.seconds)} ({inside})")
    if scene.seconds > 0:
        facts.add_row("samples per second", f"{scene.plan.global_batch / scene.seconds:.2f}")
    facts.add_row("idle", idle_line(scene) or "nothing")
    facts.add_row("limit", limit_line(scene) or "nothing takes time")
    facts.add_row("memory", memory_line(scene), style="bold red" if too_full(scene) else "")
    if scene.unused:
        facts.add_row("unused", unused_line(scene))
    return Group(facts, Narrowing(_step_tables(scene)), Text("% of the step; ◀ limits it", style="dim"))


def _step_tables(scene: Scene) -> Iterator[RenderableType]:
    """The stages of a step; then narrower and narrower: memory only as the part that is full, the causes of little idle time put
    together, and at last a paragraph a stage."""
    shares = {cause: share for cause, share in scene.idle_shares().items() if share > 0}
    causes = sorted(shares, key=lambda cause: -shares[cause])
    yield _step_table(scene, list(shares), short=False)
    for left_out in range(len(causes)):
        kept = causes[: len(causes) - left_out] if left_out else causes
        yield _step_table(scene, [cause for cause in shares if cause in kept], short=True)
    yield _step_table(scene, [], short=True)
    yield paragraphs(_step_rows(scene, list(shares), short=False))


def _step_table(scene: Scene, causes: Sequence[Cause], *, short: bool) -> Table:
    """The stages, with a column for each of these causes, and one for the rest of idle time, if there is any."""
    table, rows = Table(box=box.SIMPLE_HEAD, pad_edge=False), _step_rows(scene, causes, short=short)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("stage", "device") else "right", no_wrap=True)
    for row, (_, stage) in zip(rows, scene.stages, strict=True):
        table.add_row(*map(Text, row.values()), style="bold" if stage.limits_step else "")
    return table


def _step_rows(scene: Scene, causes: Sequence[Cause], *, short: bool) -> list[dict[str, str]]:
    """What is said of each stage, by column."""
    whole, rows = scene.seconds or 1.0, []
    rest = any(cause not in causes and share > 0 for cause, share in scene.idle_shares().items())
    for lane, stage in scene.stages:
        many = f"{lane.count} × " if lane.count > 1 else ""
        waits = {_SHORT[cause]: stage.idle.get(cause, 0.0) for cause in causes}
        if rest:
            waits["rest" if causes else "idle"] = stage.idle_total - sum(waits.values())
        row = {"stage": f"{many}{stage_key(lane, stage)}{' ◀' if stage.limits_step else ''}"}
        row |= {"device": f"{stage.named} {stage.kind}"}
        row |= {name: percent(max(0.0, seconds) / whole) for name, seconds in {"busy": stage.busy, **waits}.items()}
        full = short and stage.fullness is not None
        rows.append(row | {"memory": f"{percent(stage.fullness or 0.0)} full" if full else memory_text(stage, part=False)})
    return rows
