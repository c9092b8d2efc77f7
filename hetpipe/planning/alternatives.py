"""What else could be: the plans of other rules, of other clusters, and with a cut elsewhere; each simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hetpipe.files.messages import InputError
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.planning.planner import make_plan, with_prediction
from hetpipe.predict.simulator import simulate
from hetpipe.spec.cluster import Cluster, Link, Node
from hetpipe.spec.options import PlanOptions
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile

EQUAL = ("even", "even-data-parallel")
RULES = (*EQUAL, "even-pipelines", "uneven-data-parallel", "fasop", "memory-layers", "type-blind", "torchgpipe-balance",
         "equal-parameters", "chain")  # fmt: skip
QUICK = ("even-pipelines", "fasop", "memory-layers", "uneven-data-parallel")
FEW_DEVICES = 8  # up to which `auto` plans a changed cluster; above, the best of QUICK
SECONDS = 4.0  # for each of these
FARTHEST, MOST_ACTIONS = 8, 1_500_000  # layers by which a cut is moved; actions simulated for all of them
Progress = Callable[[str], None]
L = TypeVar("L", bound=Link)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What it is called, and its plan; or, where it has none, why."""

    name: str
    plan: Plan | None = None
    reason: str = ""

    @property
    def step_seconds(self) -> float:
        """Of the plan; infinite where there is none."""
        return self.plan.predicted.step_seconds if self.plan is not None and self.plan.predicted is not None else float("inf")


@dataclass(frozen=True, kw_only=True)
class MovedCut:
    """A plan with one cut moved: the cut behind stage `stage` of these replicas, by `layers` to the right; what a step of it
    takes, the greatest bytes of the two stages beside it, and whether all devices have room."""

    replicas: tuple[int, ...]
    stage: int
    layers: int
    step_seconds: float
    peak_bytes: tuple[int, int]
    fits: bool


def plan_with(name: str, label: str, profile: Profile, cluster: Cluster, batch: int, **options: Any) -> Alternative:
    """The plan of one partitioner, under this label."""
    try:
        return Alternative(name=label, plan=make_plan(profile, cluster, batch, partitioner=name, **options))
    except (PartitionError, InputError) as error:
        return Alternative(name=label, reason=str(error))


def other_rules(plan: Plan, profile: Profile, cluster: Cluster, names: Sequence[str] = RULES) -> list[Alternative]:
    """What the simple rules make of the plan's problem."""
    return [plan_with(name, name, profile, cluster, plan.global_batch, backend=plan.backend) for name in names]


def equal_split(found: Sequence[Alternative]) -> Alternative | None:
    """The fastest of the rules that treat all devices alike, of those that fit."""
    equal = [one for one in found if one.name in EQUAL and one.plan is not None]
    return min(equal, key=lambda one: one.step_seconds, default=None)


def what_if(plan: Plan, profile: Profile, cluster: Cluster, progress: Progress = lambda _: None) -> tuple[str, list[Alternative]]:
    """How the changes of `changed_clusters` are planned, and the plans; first that of the cluster as it is, planned in the same
    way. The plan itself is a candidate wherever it still runs, so that a change is not worse for want of time."""
    linked, plain = profile.joined(cluster), profile.model_copy(update={"links": (), "adapters": ()})
    clusters = [("as it is", linked), *changed_clusters(linked)]
    few = cluster.device_count <= FEW_DEVICES
    how = f"auto within {SECONDS:g} s" if few else f"the best of the quick rules {', '.join(QUICK)}"
    found = []
    for i, (name, changed) in enumerate(clusters):
        progress(f"what if {name} ({i} of {len(clusters)})")
        options: dict[str, Any] = {"backend": plan.backend, "time_limit_seconds": SECONDS if few else None}
        rules = ("auto",) if few else QUICK
        tried = [plan_with(rule, name, plain, changed, plan.global_batch, **options) for rule in rules]
        tried += same_plan(plan, linked, name, plain, changed, memory_reserve=0.0)
        found.append(min(tried, key=lambda one: one.step_seconds))
    return how, found


def same_plan(plan: Plan, before: Cluster, name: str, profile: Profile, cluster: Cluster, **options: Any) -> list[Alternative]:
    """The plan of one cluster on another, each device replaced by one of its type on its node there, if it runs."""
    carried = carried_plan(plan, before, cluster)
    if carried is None:
        return []
    chosen = PlanOptions().changed({"backend": plan.backend, **options})
    try:
        problem = Problem.of(profile, cluster, plan.global_batch, chosen)
        return [Alternative(name=name, plan=with_prediction(Solution(plan=carried), problem))]
    except (PartitionError, InputError):
        return []


def carried_plan(plan: Plan, before: Cluster, after: Cluster) -> Plan | None:
    """The plan on another cluster, each device replaced by one of its type on its node there; None where these are too few. Its
    prediction stays what it was, but for bounds, which are of the other cluster."""
    used, there = set(plan.device_ids), defaultdict[tuple[str, str], list[str]](list)
    for device in after.devices:
        there[device.node, device.type].append(device.id)
    ids = {}
    for device in before.devices:
        if device.id in used:
            if not there[device.node, device.type]:
                return None
            ids[device.id] = there[device.node, device.type].pop(0)
    replicas = []
    for replica in plan.replicas:
        stages = [stage.model_copy(update={"devices": tuple(ids[d] for d in stage.devices)}) for stage in replica.stages]
        replicas.append(replica.model_copy(update={"stages": tuple(stages)}))
    predicted = plan.predicted
    if predicted is not None:
        peaks = {ids[device]: peak for device, peak in predicted.peak_bytes.items()}
        unknown = dict.fromkeys(("lower_bound_seconds", "fluid_bound_seconds", "gap", "proof"))
        predicted = predicted.model_copy(update={"peak_bytes": peaks, **unknown})
    return plan.model_copy(update={"replicas": tuple(replicas), "predicted": predicted})


def changed_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """One device more of each type, one less, and links of twice the bandwidth. `cluster` has the measured links. One more goes
    to the first node that has its type and a known link inside, else to a node of its own."""
    kinds = list(dict.fromkeys(device.type for device in cluster.devices))
    for kind in kinds:
        if (more := _one_more(cluster, kind)) is not None:
            yield f"one {kind} more", more
    for kind in kinds:
        if cluster.device_count > 1:
            yield f"one {kind} less", _one_less(cluster, kind)
    if cluster.device_count > 1:
        yield "twice the link bandwidth", _twice(cluster)


def _changed(cluster: Cluster, **changes: Any) -> Cluster:
    """A new cluster, with nothing kept of what was computed of the old one."""
    return Cluster(**({name: getattr(cluster, name) for name in Cluster.model_fields} | changes))


def _one_more(cluster: Cluster, kind: str) -> Cluster | None:
    for i, node in enumerate(cluster.nodes):
        if kind in node.devices and _link_inside(cluster, node):
            grown = node.model_copy(update={"devices": node.devices | {kind: node.devices[kind] + 1}})
            return cluster.with_nodes([*cluster.nodes[:i], grown, *cluster.nodes[i + 1 :]])
    if cluster.link is None:
        return None
    name = next(f"new{i}" for i in range(len(cluster.nodes) + 1) if f"new{i}" not in {node.name for node in cluster.nodes})
    return cluster.with_nodes([*cluster.nodes, Node(name=name, devices={kind: 1})])


def _link_inside(cluster: Cluster, node: Node) -> bool:
    try:
        cluster.link_between(node.name, node.name)
    except InputError:
        return False
    return True


def _one_less(cluster: Cluster, kind: str) -> Cluster:
    """Without one device of the type: of the node that has the fewest of it."""
    least = min((node for node in cluster.nodes if kind in node.devices), key=lambda node: node.devices[kind])
    left = {name: count - (name == kind) for name, count in least.devices.items() if count > (name == kind)}
    kept = [least.model_copy(update={"devices": left}) if node is least else node for node in cluster.nodes]
    return cluster.with_nodes([node for node in kept if node is not least and node.devices])


def _twice(cluster: Cluster) -> Cluster:
    nodes = [_faster_node(node) for node in cluster.nodes]
    link = _faster(cluster.link) if cluster.link is not None else None
    links = tuple(_faster(one) for one in cluster.links)
    return _changed(cluster, nodes=tuple(nodes), link=link, links=links)


def _faster_node(node: Node) -> Node:
    link, adapter = node.link, node.adapter
    if adapter is not None:
        out, into = (2 * rate for rate in adapter.rates)
        adapter = adapter.model_copy(update={"bandwidth": out, "bandwidth_in": into})
    return node.model_copy(update={"link": None if link is None else _faster(link), "adapter": adapter})


def _faster(link: L) -> L:
    """Half the seconds for each byte, the same latency."""
    if link.bandwidth is not None:
        return link.model_copy(update={"bandwidth": 2 * link.bandwidth})
    start = link.seconds(0)
    points = tuple((size, start + (seconds - start) / 2) for size, seconds in link.points or ())
    return link.model_copy(update={"points": points})


def moved_cuts(plan: Plan, profile: Profile, cluster: Cluster, alike: Sequence[tuple[int, ...]]) -> list[MovedCut]:
    """Each cut of each group of alike replicas, moved by up to FARTHEST layers either way (fewer where simulating all of them
    would take too long), the plan as it is among them."""
    actions = 2 * sum(len(replica.stages) * len(replica.microbatch_sizes) for replica in plan.replicas)
    cuts = [(group, s) for group in alike for s in range(len(plan.replicas[group[0]].stages) - 1)]
    farthest = max(1, min(FARTHEST, MOST_ACTIONS // max(1, 2 * actions * len(cuts))))
    found = []
    for group, s in cuts:
        a, b = plan.replicas[group[0]].stages[s : s + 2]
        steps = [d for d in range(-farthest, farthest + 1) if a.layers[0] < a.layers[1] + d < b.layers[1]]
        found += [_moved(plan, profile, cluster, group, s, layers) for layers in steps]
    return found


def moved_plan(plan: Plan, group: Sequence[int], s: int, layers: int) -> Plan:
    """The plan with the cut behind stage `s` of these replicas moved by so many layers."""
    replicas = list(plan.replicas)
    for r in group:
        stages = list(replicas[r].stages)
        (lo, cut), (_, hi) = stages[s].layers, stages[s + 1].layers
        stages[s] = stages[s].model_copy(update={"layers": (lo, cut + layers)})
        stages[s + 1] = stages[s + 1].model_copy(update={"layers": (cut + layers, hi)})
        replicas[r] = replicas[r].model_copy(update={"stages": tuple(stages)})
    return plan.model_copy(update={"replicas": tuple(replicas), "predicted": None})


def _moved(plan: Plan, profile: Profile, cluster: Cluster, group: tuple[int, ...], s: int, layers: int) -> MovedCut:
    changed = moved_plan(plan, group, s, layers)
    timeline = simulate(changed, profile, cluster)
    beside = [stage.device for stage in changed.replicas[group[0]].stages[s : s + 2]]
    return MovedCut(
        replicas=group, stage=s, layers=layers, step_seconds=timeline.step_seconds,
        peak_bytes=(timeline.peak_bytes[beside[0]], timeline.peak_bytes[beside[1]]),
        fits=all(peak <= cluster.type_of(device).memory for device, peak in timeline.peak_bytes.items()),
    )  # fmt: skip
