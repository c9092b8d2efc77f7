"""A plan in words: what each stage does, what limits the step, and why; the same sentences in every picture and page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hetpipe.documents.plan import Plan
from hetpipe.files.limits import MOST_LINES
from hetpipe.files.messages import counted
from hetpipe.files.units import human_bytes, human_seconds, three_digits
from hetpipe.predict.idle import CAUSES, Cause
from hetpipe.show.terms import in_short, term
from hetpipe.study.scene import Edge, LaneScene, Scene, StageScene

TIGHT, MANY_TIMES = 0.9, 10  # of a device's memory
_EXACT = 1e-6  # a gap that is rounding
_CLOSE = 0.0005  # a gap below which no percentage is shown
_WIDE = 1.0  # a gap above which the bound leaves out what decides the step
FEW_STAGES = 6  # up to which each has a sentence of its own
PROOFS = {
    "exhaustive": "the whole class of plans was searched",
    "search-bound": "no plan of the class that was searched is below it",
    "fluid": "no plan of any kind is below it",
}
EQUAL_IN = {"even": "layers", "even-data-parallel": "samples"}  # of which each device has as many
_WAITS: dict[Cause, str] = {
    "fill and drain": "while pipelines fill and drain",
    "slower stage": "waiting for slower stages",
    "link": "waiting for messages on links",
    "gradient sum": "waiting for other replicas and gradient sums",
    "slower optimizer": "waiting for slower optimizers",
    "overhead": "between actions",
}


def percent(part: float) -> str:
    """`7.1 %`, `43 %`."""
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def numbers_text(numbers: Sequence[int]) -> str:
    """`0–3, 7`.

    >>> numbers_text([0, 1, 2, 3, 7])
    '0–3, 7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}–{b}" if b > a else f"{a}" for a, b in runs)


def lane_name(lane: LaneScene) -> str:
    """`replica 0`, or `replicas 0–31`."""
    return f"replica{'s' if lane.count > 1 else ''} {numbers_text(lane.replicas)}"


def layer_range(layers: tuple[int, int]) -> str:
    """The layers of a stage, first to last, both included: `0–8`, or `9` where it is one."""
    lo, hi = layers
    return f"{lo}–{hi - 1}" if hi - lo > 1 else f"{lo}"


def share_text(sizes: Sequence[int]) -> str:
    """Number of micro-batches × size, and a lone one by its size: `9 × 4 + 3`."""
    runs = [(len(list(group)), size) for size, group in groupby(sizes)]
    if len(runs) > 4:
        return f"{len(sizes)} × {min(sizes)} to {max(sizes)}"
    return " + ".join(f"{size}" if count == 1 < len(runs) else f"{count} × {size}" for count, size in runs)


def microbatches_text(sizes: Sequence[int]) -> str:
    """`micro-batches of 4, 4 and 3`, `9 micro-batches of 4 and one of 3`, `40 micro-batches of 1 to 3`."""
    runs = [(len(list(group)), size) for size, group in groupby(sizes)]
    if len(runs) > 4:
        return f"{len(sizes)} micro-batches of {min(sizes)} to {max(sizes)}"
    if 1 < len(sizes) <= 4 and len(runs) > 1:
        return f"micro-batches of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    parts = [f"{'one' if count == 1 else count} of {size}" for count, size in runs]
    first = parts[0].replace(" of", f" {'micro-batch' if runs[0][0] == 1 else 'micro-batches'} of")
    return " and ".join([", ".join([first, *parts[1:-1]]), *parts[1:][-1:]])


def equal_split_text(scene: Scene) -> str:
    """`the equal split of layers`, or of samples."""
    in_what = EQUAL_IN.get(scene.plan.partitioner)
    return f"the equal split of {in_what}" if in_what else f"the equal split ({scene.plan.partitioner})"


def origin_text(plan: Plan) -> str:
    """What a plan is for and from: `64 samples a step, 1f1b, planned by chain`."""
    by = plan.partitioner if plan.partitioner.startswith("by ") else f"by {plan.partitioner}"
    return f"{counted(plan.global_batch, 'sample')} a step, {plan.schedule}, planned {by}"


def stage_key(lane: LaneScene, stage: StageScene) -> str:
    """`r0 s1`, or `r0–31 s1`."""
    return f"r{numbers_text(lane.replicas)} s{stage.number}"


def lane_title(lane: LaneScene, scene: Scene) -> str:
    """`replicas 0–31, alike: 8 of 256 samples each, in 4 micro-batches of 2`."""
    alike, each = (", alike", " each") if lane.count > 1 else ("", "")
    samples = f"{lane.samples} of {scene.plan.global_batch} samples{each}"
    return f"{lane_name(lane)}{alike}: {samples}, in {microbatches_text(lane.sizes)}"


def devices_text(lane: LaneScene, stage: StageScene) -> str:
    """`n0/1 RTX-2080`; of alike replicas, `n0/1 and n1/0, each RTX-2080`, or `n0/0, n0/1 and 30 more, each RTX-2080`."""
    if lane.count == 1:
        return f"{stage.named} {stage.kind}".strip()
    return f"{enumerated(list(map(' + '.join, stage.twins)))}, each {stage.kind}".strip()


def drawn_devices(lane: LaneScene, stage: StageScene) -> str:
    """`n0/1 RTX-2080`; of alike replicas, `2 devices alike: n0/1 and n1/0, each RTX-2080 (one is drawn)`."""
    if lane.count == 1:
        return devices_text(lane, stage)
    what = "devices" if len(stage.devices) == 1 else "groups of devices"
    return f"{lane.count} {what} alike: {devices_text(lane, stage)} (one is drawn)"


def stage_nodes_text(stage: StageScene) -> str:
    """`node n0`, or `nodes n0 and n1` of alike replicas."""
    nodes = list(dict.fromkeys(twin[0].rpartition("/")[0] for twin in stage.twins))
    return f"node{'s' if len(nodes) > 1 else ''} {enumerated(nodes)}"


def enumerated(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b and 30 more`."""
    kept = list(names) if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return kept[0] if len(kept) == 1 else f"{', '.join(kept[:-1])} and {kept[-1]}"


def explanations(scene: Scene) -> list[str]:
    """What a picture cannot do without, in a sentence each: how a bar is read, and terms."""
    there = ["replica", "micro-batch"] + [scene.plan.schedule] * (term(scene.plan.schedule) is not None)
    if scene.bound is not None:
        there.append("lower bound")
    found = ["work: layers × samples"]
    if scene.seconds is not None:
        found = [
            "bar: a step added up, no timeline; idle time is at its end, whenever it was",
            "work: a device's layers × samples, in seconds of the fastest type",
        ]
    return found + [in_short(name) for name in there]


def memory_text(stage: StageScene, *, part: bool = True) -> str:
    """`6.07 of 8.00 GiB, 76 %` (without the last, `part`): as much of it as is known."""
    if stage.memory is None:
        return human_bytes(stage.limit) if stage.limit is not None else ""
    if stage.limit is None or stage.fullness is None:
        return human_bytes(stage.memory)
    used, limit = human_bytes(stage.memory), human_bytes(stage.limit)
    used = used.removesuffix(limit[limit.index(" ") :])
    how_full = percent(stage.fullness) if stage.fullness < MANY_TIMES else f"{three_digits(stage.fullness)} ×"
    return f"{used} of {limit}" + (f", {how_full}" if part else "")


def work_share(lane: LaneScene, stage: StageScene) -> str:
    """`23 % of the work each`."""
    return f"{percent(stage.work)} of the work" + (" each" if lane.count > 1 else "")


def work_text(stage: StageScene) -> list[tuple[str, str]]:
    """(what it computes, seconds of a step)."""
    parts = (
        ("forward", stage.forward or 0.0),
        ("backward", stage.backward),
        ("recompute", stage.recompute),
        ("optimizer", stage.optimizer),
    )
    return [(name, human_seconds(seconds)) for name, seconds in parts if seconds > 0]


def idle_text(stage: StageScene) -> list[tuple[str, str]]:
    """(why it is idle, seconds of a step)."""
    return [(cause, human_seconds(stage.idle[cause])) for cause in CAUSES if stage.idle.get(cause, 0.0) > 0]


def edge_text(edge: Edge) -> str:
    """`128 MiB, 1.2 s a step`."""
    return f"{human_bytes(edge.bytes)}, {human_seconds(edge.seconds)} a step"


def stage_sentence(scene: Scene, lane: LaneScene, stage: StageScene) -> str:
    """All that is known of a stage, for those who do not see the picture, and for a mouse or a focus that rests on it."""
    layers = f"layers {layer_range(stage.layers)}" if len(stage.tiles) > 1 else f"layer {layer_range(stage.layers)}"
    parts = [f"{lane_name(lane)} stage {stage.number} on {devices_text(lane, stage)}: {layers}, {work_share(lane, stage)}"]
    if stage.forward is not None and scene.seconds:
        inside = ", ".join(f"{name} {seconds}" for name, seconds in work_text(stage))
        parts.append(f"computes {human_seconds(stage.busy)} of {human_seconds(scene.seconds)} ({inside})")
        idle = ", ".join(f"{cause} {seconds}" for cause, seconds in idle_text(stage))
        parts.append(f"idle {human_seconds(stage.idle_total)}" + (f" ({idle})" if idle else ""))
    if memory := memory_text(stage):
        parts.append(f"memory {memory}")
    if stage.edge is not None:
        parts.append(f"sends and gets {edge_text(stage.edge)}")
    if stage.recomputed:
        parts.append("recomputes activations")
    if stage.offloaded:
        parts.append("keeps activations in the host's memory")
    if stage.limits_step:
        parts.append("limits the step")
    return "; ".join(parts)


def idle_line(scene: Scene) -> str:
    """`11 % of device time is idle: 7.1 % while pipelines fill and drain, …`; empty where no times are known."""
    shares = scene.idle_shares()
    if not shares:
        return ""
    parts = [f"{percent(share)} {_WAITS[cause]}" for cause, share in shares.items() if share >= 0.0005]
    return f"{percent(sum(shares.values()))} of device time is idle" + (f": {', '.join(parts)}" if parts else "")


def limit_line(scene: Scene) -> str:
    """Which device limits the step; empty where no times are known."""
    if not scene.limiting or not scene.seconds:
        return ""
    lane, stage = scene.limiting[0]
    share, many = stage.busy / scene.seconds, len(scene.limiting) * lane.count > 1
    names = "; ".join(dict.fromkeys(devices_text(own, s) for own, s in scene.limiting[:3]))
    names += f" and {len(scene.limiting) - 3} more" if len(scene.limiting) > 3 else ""
    if share < 0.5:
        return f"No device limits the step: even {names}{' compute' if many else ' computes'} for only {percent(share)} of it"
    verb = "limit the step: each of them computes" if many else "limits the step: it computes"
    return f"{names}{',' if lane.count > 1 else ''} {verb} for {percent(share)} of it"


def work_line(scene: Scene) -> str:
    """Which device does most of what is computed; empty where there is only one, or no times are known."""
    if not scene.seconds or scene.device_count < 2:
        return ""
    lane, stage = max(scene.stages, key=lambda item: item[1].work)
    return f"{devices_text(lane, stage)}{', do' if lane.count > 1 else ' does'} most: {work_share(lane, stage)}"


def memory_line(scene: Scene) -> str:
    """Which device's memory is fullest, or that the plan does not fit; empty where that is not known."""
    full = [(stage.fullness, lane, stage) for lane, stage in scene.stages if stage.fullness is not None]
    if not full:
        return ""
    _, lane, stage = max(full, key=lambda item: item[0])
    if over := too_full(scene):
        number = sum(lane.count * len(stage.devices) for lane, stage in over)
        what = f"the memory of {counted(number, 'device')}" if number > 1 else "memory"
        return f"The plan does not fit into {what}: {needs_text(lane, stage)}"
    return f"Memory is fullest on {devices_text(lane, stage)}: {memory_text(stage)}"


def too_full(scene: Scene) -> list[tuple[LaneScene, StageScene]]:
    """The stages that need more memory than their devices have, the worst first."""
    over = [(lane, stage) for lane, stage in scene.stages if stage.fullness is not None and stage.fullness > 1]
    return sorted(over, key=lambda item: -(item[1].fullness or 0.0))


def needs_text(lane: LaneScene, stage: StageScene) -> str:
    """`n0/1 t4 needs 149 GiB, and has 15.0 GiB`; of alike replicas, all of them."""
    assert stage.memory is not None
    assert stage.limit is not None
    needs, has = ("need", "have") if lane.count > 1 else ("needs", "has")
    return f"{devices_text(lane, stage)} {needs} {human_bytes(stage.memory)}, and {has} {human_bytes(stage.limit)}"


def memory_warnings(scene: Scene) -> list[str]:
    """What a command says of a plan that does not fit: a line for each stage, at most ten."""
    over = too_full(scene)
    told = [f"the plan does not fit into memory: {needs_text(lane, stage)}" for lane, stage in over[:MOST_LINES]]
    return told + [f"… and {counted(len(over) - MOST_LINES, 'stage')} more"] * (len(over) > MOST_LINES)


def unused_line(scene: Scene) -> str:
    """`38 of 64 devices are unused (16 × a10g, 22 × p40): no plan that was tried is faster with them`; empty where all are used.
    Why is known only of plans that were searched for."""
    if not scene.unused:
        return ""
    number, names = sum(scene.unused.values()), ", ".join(f"{count} × {kind}" for kind, count in scene.unused.items())
    text = f"{number} of {counted(number + scene.device_count, 'device')} {'are' if number > 1 else 'is'} unused ({names})"
    predicted = scene.plan.predicted
    if predicted is None or predicted.lower_bound_seconds is None:
        return text
    better = "faster" if predicted.lower_bound_price_per_million_samples is None else "cheaper"
    return f"{text}: no plan that was tried is {better} with {'them' if number > 1 else 'it'}"


def step_line(scene: Scene) -> str:
    """`predicted step 13.8 s, 4.63 samples/s, 1.70 × as fast as the equal split of layers (23.4 s)`."""
    if scene.seconds is None:
        predicted = scene.plan.predicted
        return f"predicted step {human_seconds(predicted.step_seconds)}" if predicted is not None else "no prediction"
    text = f"predicted step {human_seconds(scene.seconds)}"
    if scene.seconds > 0:
        text += f", {three_digits(scene.plan.global_batch / scene.seconds)} samples/s"
    if scene.speedup is not None and scene.equal is not None and scene.equal.seconds is not None:
        equal = f"{equal_split_text(scene.equal)} ({human_seconds(scene.equal.seconds)})"
        text += f", {three_digits(scene.speedup)} × as fast as {equal}"
    return text


def bound_line(scene: Scene) -> str:
    """`proven: no plan of this kind takes less than 13.1 s; this one takes 5.3 % longer`; empty where none is known."""
    predicted = scene.plan.predicted
    if predicted is None or predicted.lower_bound_seconds is None:
        return ""
    priced = predicted.lower_bound_price_per_million_samples is not None
    plans = f"no plan of {'any' if priced or predicted.proof == 'fluid' else 'this'} kind"
    gap = predicted.step_seconds / predicted.lower_bound_seconds - 1 if predicted.lower_bound_seconds > 0 else None
    if gap is not None and gap < _EXACT:
        return f"proven: {plans} is faster"
    bound = f"proven: {plans} takes less than {human_seconds(predicted.lower_bound_seconds)}"
    if gap is None:
        return bound
    text = f"{bound}; this one takes {percent(gap) if gap >= _CLOSE else 'less than 0.1 %'} longer"
    if predicted.proof == "search-bound" and gap >= _CLOSE:
        text += "; the proof ended with its effort or time, and --effort long or --time-limit goes on"
    wide = gap > _WIDE and scene.plan.partitioner == "auto"  # another plan may well be as slow as that
    return f"{text}; so wide a gap says nothing about the plan" if wide else text


def headlines(scene: Scene) -> list[str]:
    """What stands over a picture: speed, bound, what limits, memory, idle time; as much of it as is known."""
    lines = (step_line, bound_line, unused_line, work_line, limit_line, memory_line, idle_line)
    return [text for line in lines if (text := line(scene))]


def description(scene: Scene) -> str:
    """The whole picture as lines of text."""
    lines = [f"{scene.plan.model}: {origin_text(scene.plan)}", *headlines(scene)]
    for lane in scene.lanes:
        lines.append(lane_title(lane, scene))
        lines += [stage_sentence(scene, lane, stage) for stage in lane.stages]
    return "\n".join(lines)


def in_words(scene: Scene) -> list[str]:
    """Sentences that say who gets what, and why; what limits the step; what is lost; what an equal split would lose."""
    plan, layers = scene.plan, scene.plan.layer_count
    pipelines = counted(len(plan.replicas), "pipeline") + (" side by side" if len(plan.replicas) > 1 else "")
    first = f"{plan.model} runs as {pipelines} on {counted(scene.device_count, 'device')}: {step_line(scene)}."
    found = [first, *_shares(scene, layers)]
    if limit := limit_line(scene):
        found.append(f"{limit}.")
    if idle := idle_line(scene):
        found.append(f"{idle}.")
    if memory := memory_line(scene):
        found.append(f"{memory}.")
    if unused := unused_line(scene):
        found.append(f"{unused}.")
    if bound := bound_line(scene):
        found.append(f"{bound[0].upper()}{bound[1:]}.")
    return found


def _shares(scene: Scene, layers: int) -> list[str]:
    """What each stage gets, most work first; by type where there are many stages."""
    fastest = min(scene.speeds, key=lambda kind: scene.speeds[kind], default="")
    total = scene.plan.global_batch
    if len(scene.stages) <= FEW_STAGES:
        order = sorted(scene.stages, key=lambda item: -item[1].work)
        return [
            f"{devices_text(lane, stage)}{', get' if lane.count > 1 else ' gets'} {len(stage.tiles)} of "
            f"{counted(layers, 'layer')} and {lane.samples} of {total} samples, "
            f"{work_share(lane, stage)}{_because(scene, stage, fastest)}."
            for lane, stage in order
        ]
    found = []
    for kind in scene.types() or [""]:
        mine = [(lane, stage) for lane, stage in scene.stages if stage.kind == kind]
        work = sum(lane.count * stage.work for lane, stage in mine)
        number = sum(lane.count * len(stage.devices) for lane, stage in mine)
        counts, samples = {len(stage.tiles) for _, stage in mine}, {lane.samples for lane, _ in mine}
        fullest = max((stage for _, stage in mine), key=lambda stage: stage.fullness or 0.0)
        found.append(
            f"{counted(number, 'device')} of type {kind or 'unknown'} {'do' if number > 1 else 'does'} "
            f"{percent(work)} of the work: {_span(counts)} of {layers} layers and {_span(samples)} of {total} "
            f"samples each{_because(scene, fullest, fastest)}."
        )
    return found


def _span(values: set[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)} to {max(values)}"


def _because(scene: Scene, stage: StageScene, fastest: str) -> str:
    reasons = []
    if stage.kind in scene.speeds and len(scene.speeds) > 1:
        times = scene.speeds[stage.kind] / scene.speeds[fastest] if scene.speeds[fastest] > 0 else 1.0
        slower = f"{stage.kind} takes {three_digits(times)} × as long as {fastest} for the same work"
        reasons.append(f"{stage.kind} is the fastest type" if stage.kind == fastest or times < 1.005 else slower)
    if stage.fullness is not None and stage.fullness >= TIGHT:
        reasons.append(f"its memory is {percent(stage.fullness)} full")
    return f", because {' and '.join(reasons)}" if reasons else ""
