"""What comes of a plan whose transfers share adapters, step by step in plain Python: the oracle of `test_contention`, and random
plans for it. Nothing here is taken from `hetpipe.predict.flows` or `.contention`."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.documents.schedule import pipeline_actions
from hetpipe.predict.cost import Costs, occupied_seconds
from hetpipe.predict.sums import sync_segments
from tests.support.strategies import profiles, split

Key = tuple[object, ...]


class Transfer(NamedTuple):
    """Bytes/s alone of each of some members, and the adapters that they cross."""

    rate: float
    members: int
    adapters: frozenset[tuple[str, str]]


class Task:
    """Something that takes time: `seconds` alone, `latency` behind it; `after` has what it waits for, and whether until that has
    arrived."""

    def __init__(self, seconds: float, latency: float, after: list[tuple[Key, bool]], flow: Transfer | None = None) -> None:
        self.left, self.latency, self.after, self.flow = seconds, latency, after, flow
        self.begin = self.end = math.nan


def alone(link: Link, size: float) -> float:
    """Bytes/s of a transfer that has the link for itself."""
    seconds = occupied_seconds(link, size)
    return min(size / seconds, link.peak) if seconds > 0 else 0.0


def tasks_of(plan: Plan, costs: Costs) -> dict[Key, Task]:
    """All actions, transfers and sums by name."""
    node = {device.id: device.node for device in costs.cluster.devices}
    found: dict[Key, Task] = {}
    for r, replica in enumerate(plan.replicas):
        m, stages = len(replica.microbatch_sizes), replica.stages
        kinds = [costs.cluster.device(stage.device).type for stage in stages]
        found["O", r] = Task(
            max(
                costs.optimizer_seconds(kind, *stage.layers, len(stage.devices))
                for kind, stage in zip(kinds, stages, strict=True)
            ),
            0.0,
            [],
        )
        trained = with_backward(costs, replica)
        for s, actions in enumerate(pipeline_actions(replica.depths(plan.schedule), m)):
            kind, degree = costs.cluster.device(stages[s].device).type, len(stages[s].devices)
            before: Key = ("O", r)
            for _, what, i in actions if trained[s] else [(s, "F", i) for i in range(m)]:
                forward, backward = costs.stage_seconds(
                    kind, *stages[s].layers, replica.microbatch_sizes[i], recompute=stages[s].recompute, degree=degree
                )
                after: list[tuple[Key, bool]] = [(before, False)]
                after += [((">", r, s - 1, i), True)] if what == "F" and s else []
                after += [(("<", r, s, i), True)] if what == "B" and s + 1 < len(stages) else []
                before = (what, r, s, i)
                found[before] = Task(forward if what == "F" else backward, 0.0, after)
                if what == "B" and i == m - 1:
                    found |= layer_by_layer(costs, replica, r, s, after)
        for s, (a, b) in enumerate(pairwise(stages)):
            degrees = len(a.devices), len(b.devices)
            latency = max(costs.transfer(a.device, b.device, a.layers[1], size, degrees)[1] for size in replica.microbatch_sizes)
            for i, size in enumerate(replica.microbatch_sizes):
                seconds, _ = costs.transfer(a.device, b.device, a.layers[1], size, degrees)
                rate = alone(costs.link(a.device, b.device), costs.profile.output_bytes[a.layers[1] - 1] * size / min(degrees))
                both = ((">", ("F", r, s, i), (a, b)), ("<", ("B", r, s + 1, i), (b, a)))
                for way, source, (x, y) in both if trained[s] else both[:1]:
                    ends = frozenset([(node[x.device], "out"), (node[y.device], "in")])
                    flow = Transfer(rate, min(degrees), ends) if node[x.device] != node[y.device] and rate > 0 else None
                    waits: list[tuple[Key, bool]] = [(source, False)]
                    waits += [((way, r, s, i - 1), False)] if i else []
                    found[way, r, s, i] = Task(seconds, latency, waits, flow)
    last: dict[str, tuple[Key, bool]] = {}
    where = {d: (r, s) for r, one in enumerate(plan.replicas) for s, stage in enumerate(one.stages) for d in stage.devices}
    for number, segment in enumerate(sync_segments(plan, costs)):
        owners = {plan.process_of[device] for device in segment.owners}
        made = list[tuple[Key, bool]]()
        for device, (r, s) in where.items():
            lo, hi = plan.replicas[r].stages[s].layers
            held = [i for i, x in enumerate(costs.profile.layers) if x.tied == segment.tied] if segment.tied else [segment.lo]
            whole = plan.backend != "torch" and plan.process_of[device] in owners
            if whole or (device in segment.owners and costs.cluster.runtime_overhead.bucket_bytes == 0):
                last_one = len(plan.replicas[r].microbatch_sizes) - 1
                made.append((("B" if ("B", r, s, last_one) in found else "F", r, s, last_one), False))
            elif device in segment.owners:
                made.append((("made", r, s, min(i for i in held if lo <= i < hi)), False))
        nodes, k = Counter(node[d] for d in segment.owners), len(segment.owners)
        link = max(costs.links_among(nodes), key=lambda x: (x.seconds(segment.size_bytes / k), x.seconds(0)))
        latency = 2 * (k - 1) * link.seconds(0) if segment.size_bytes > 0 else 0.0
        rate = alone(link, segment.size_bytes / k)
        seconds = 2 * (k - 1) * link.seconds(segment.size_bytes / k) - latency if segment.size_bytes > 0 else 0.0
        ends = frozenset((name, way) for name in nodes for way in ("in", "out"))
        flow = Transfer(rate, 1, ends) if len(nodes) > 1 and rate > 0 else None
        found["sum", number] = Task(seconds, latency, made + [last[owner] for owner in owners if owner in last], flow)
        last |= dict.fromkeys(owners, (("sum", number), True))
    return found


def with_backward(costs: Costs, replica: ReplicaPlan) -> list[bool]:
    """Of each stage whether something in it or before it trains; of all, where nothing does."""
    found = [any(layer.trained for layer in costs.profile.layers[: stage.layers[1]]) for stage in replica.stages]
    return found if any(found) else [True] * len(found)


def layer_by_layer(costs: Costs, replica: ReplicaPlan, r: int, s: int, after: list[tuple[Key, bool]]) -> dict[Key, Task]:
    """The last backward of a stage, which waits for these, as tasks of one layer each, the last layer first."""
    stage, size, found = replica.stages[s], replica.microbatch_sizes[-1], dict[Key, Task]()
    measured = costs.profile.measurement(costs.cluster.device(stage.device).type, len(stage.devices))
    forward, backward = measured.times(size)
    more = costs.cluster.runtime_overhead.action_seconds
    for layer in reversed(range(*stage.layers)):
        again = stage.recompute and layer >= costs.profile.first_trained
        seconds = backward[layer] + (forward[layer] if again else 0.0) + more
        found["made", r, s, layer] = Task(float(seconds), 0.0, after)
        after, more = [(("made", r, s, layer), False)], 0.0
    return found


def fair_rates(flows: list[Transfer], capacity: dict[tuple[str, str], float]) -> list[float]:
    """Max-min fair bytes/s of each member: the adapter, or the flow itself, at which least is to be had comes first."""
    rates, room = dict[int, float](), dict(capacity)
    while len(rates) < len(flows):
        waiting = [i for i in range(len(flows)) if i not in rates]
        share = {
            adapter: room[adapter] / count
            for adapter in room
            if (count := sum(flows[i].members for i in waiting if adapter in flows[i].adapters))
        }
        tightest = min(share, key=lambda adapter: share[adapter])
        slow = [i for i in waiting if flows[i].rate <= share[tightest]]
        fixed = slow or [i for i in waiting if tightest in flows[i].adapters]
        for i in fixed:
            rates[i] = flows[i].rate if slow else share[tightest]
            for adapter in flows[i].adapters:
                room[adapter] -= rates[i] * flows[i].members
    return [rates[i] for i in range(len(flows))]


def played(plan: Plan, profile: Profile, cluster: Cluster) -> dict[Key, tuple[float, float]]:
    """When each action, transfer and sum begins, and when it has ended and arrived."""
    costs = Costs(profile, cluster)
    tasks = tasks_of(plan, costs)
    capacity = {
        (name, way): rate for name, rates in cluster.adapter_rates.items() for way, rate in zip(("out", "in"), rates, strict=True)
    }
    now, waiting, running = 0.0, dict(tasks), dict[Key, Task]()
    while waiting or running:
        begins = {key: begin(task, tasks) for key, task in waiting.items()}
        for key in [key for key, when in begins.items() if when <= now]:
            running[key] = waiting.pop(key)
            running[key].begin = now
        shared = [task for task in running.values() if task.flow is not None]
        rates = fair_rates([task.flow for task in shared if task.flow is not None], capacity)
        speed = {id(task): 1.0 for task in running.values()}
        speed |= {id(task): min(1.0, rate / task.flow.rate) for task, rate in zip(shared, rates, strict=True) if task.flow}
        following = [when for key, when in begins.items() if key in waiting and when < math.inf]
        ahead = min([task.left / speed[id(task)] for task in running.values()] + [when - now for when in following])
        now += ahead
        for key, task in list(running.items()):
            task.left -= ahead * speed[id(task)]
            if task.left <= 1e-12 * max(1.0, now):
                task.end = now
                del running[key]
        for when in following:
            now = when if abs(when - now) <= 1e-12 * max(1.0, now) else now
    return {key: (task.begin, task.end + task.latency) for key, task in tasks.items()}


def begin(task: Task, tasks: dict[Key, Task]) -> float:
    """When it begins, if that is known: infinite else."""
    found = [tasks[key].end + (tasks[key].latency if arrival else 0.0) for key, arrival in task.after]
    return math.inf if any(math.isnan(x) for x in found) else max(found, default=0.0)


@st.composite
def busy_clusters(draw: st.DrawFn, most_nodes: int = 4, most_devices: int = 3) -> Cluster:
    """Nodes that are joined by links from slow to fast; some with adapters of their own."""
    speeds = st.sampled_from([500.0, 1e3, 2e3, 1e4])

    def link() -> dict[str, Any]:
        if draw(st.integers(0, 3)) == 0:
            y = sorted(draw(st.lists(st.floats(1e-3, 0.5), min_size=3, max_size=3)))
            return {"points": [[1, y[0]], [500, y[1] + 1e-3], [20_000, y[2] + 1.0]]}
        return {"bandwidth": draw(speeds), "latency": draw(st.sampled_from([0.0, 1e-2, 0.1]))}

    nodes = []
    for i in range(draw(st.integers(2, most_nodes))):
        node: dict[str, Any] = {"name": f"n{i}", "devices": {draw(st.sampled_from("ab")): draw(st.integers(1, most_devices))}}
        adapter = {"bandwidth": draw(speeds)} | draw(st.sampled_from([{}, {"bandwidth_in": 700.0}, {"latency": 0.05}]))
        node |= draw(st.sampled_from([{}, {"adapters": 2}, {"adapters": "per_device"}, {"adapter": adapter}]))
        nodes.append(node | {"link": {"bandwidth": 1e4, "latency": 1e-3}})
    names = [node["name"] for node in nodes]
    pairs = [[a, b] for a in names for b in names if a < b and draw(st.integers(0, 3)) == 0]
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {kind: {"memory": 10**12} for kind in "ab"},
            "nodes": nodes,
            "link": link(),
            "links": [{"between": pair} | link() for pair in pairs],
            "runtime_overhead": {
                "overlap_transfers": draw(st.sampled_from([True, True, True, False])),
                "bucket_bytes": draw(st.sampled_from([600, 600, 10**9, 0])),
            },
        },
        "the test's cluster",
    )


@st.composite
def busy_plans(draw: st.DrawFn) -> tuple[Plan, Profile, Cluster]:
    """Some replicas of some stages on devices in any order; some stages split over two devices."""
    cluster = draw(busy_clusters())
    profile = draw(profiles(kinds="ab", most_layers=4))
    profile = draw(split(profile)) if draw(st.booleans()) else profile
    pairs = {m.device_type for m in profile.measurements if m.tensor_parallel == 2}
    single = {m.device_type for m in profile.measurements if m.tensor_parallel == 1}
    L, free = len(profile.layers), draw(st.permutations(cluster.devices))
    replicas = list[ReplicaPlan]()
    while free and len(replicas) < 4:
        n, stages = draw(st.integers(1, min(L, len(free)))), list[tuple[str, ...]]()
        while free and len(stages) < n:
            one = free.pop()
            other = next((d for d in free if (d.node, d.type) == (one.node, one.type)), None)
            if other is not None and one.type in pairs and draw(st.booleans()):
                free.remove(other)
                stages.append((one.id, other.id))
            elif one.type in single:
                stages.append((one.id,))
        if not stages:
            break
        cuts = sorted(draw(st.sets(st.integers(1, L - 1), min_size=len(stages) - 1, max_size=len(stages) - 1)) if L > 1 else ())
        ends = [0, *cuts, L]
        replicas.append(
            ReplicaPlan(
                microbatch_sizes=tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))),
                stages=tuple(StagePlan(layers=(ends[s], ends[s + 1]), devices=own) for s, own in enumerate(stages)),
            )
        )
    if not replicas:
        return draw(busy_plans())
    plan = Plan(
        model="test",
        global_batch=sum(r.samples for r in replicas),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        backend=draw(st.sampled_from(["torch", "torch", "fairscale"])),
        replicas=tuple(replicas),
    )
    return plan, profile, cluster
