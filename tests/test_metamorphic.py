"""What must hold between two problems, whatever the right answer to either is: better hardware never makes the best
plan slower, and names, orders and units mean nothing. A fault of the cost model that `auto` and its oracle share
shows here.

Every relation is a theorem of the plan class, by one argument: each plan of the first problem has a plan of the
second that takes no longer (the simulated step is a longest path, monotone in every duration). Some that sound alike
are none, and are not tested:

- A link of measured `points` that is faster at one size only. Its seconds at zero bytes are latency and the rest
  occupies the wire, so less latency at the same time for large transfers means more occupation, and a slower step.
  Points are scaled as a whole.
- Times that fall for one micro-batch size below the measured ones: extrapolation on the first slope then rises.
- A bigger batch is never faster only where times rise with the micro-batch, and where links are affine: one sample
  less may leave a replica without work, and two owners instead of three exchange larger pieces, which a steep measured
  curve may make slower.
- Deeper warm-up is not always faster for fixed cuts (the order of actions changes), and `_large` promises no
  monotone plan, since it rounds a linear program; its bound is monotone up to the accuracy of its bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.bound.lower import BOUND_END, Lower
from hetpipe.partitioners.chain import Chain
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.stage_kinds.plan_class import require_stage_kinds
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Partitioner, PartitionError, Problem
from hetpipe.predict.simulator import simulate
from tests.support.plans import ROUNDING
from tests.support.strategies import UNHURRIED, problems
from tests.test_bounds import plans

Document = dict[str, Any]


def changed(
    problem: Problem, cluster: Callable[[Document], None] | None = None, profile: Callable[[Document], None] | None = None
) -> Problem:
    """The problem with its files edited."""
    documents = problem.cluster.model_dump(), problem.profile.model_dump()
    for document, edit in zip(documents, (cluster, profile), strict=True):
        if edit is not None:
            edit(document)
    return replace(
        problem,
        cluster=Cluster.parse(documents[0], "the changed cluster"),
        profile=Profile.parse(documents[1], "the changed profile"),
    )


def all_links(cluster: Document) -> list[Document]:
    """Every link of a cluster document."""
    found = [cluster["link"], *(node["link"] for node in cluster["nodes"]), *cluster["links"]]
    return [link for link in found if link is not None]


def scale_link(link: Document, latency: float, rate: float) -> None:
    """Multiply a link's seconds: the latency, and those of each byte; of points all alike, by the larger."""
    if link["points"] is not None:
        link["points"] = [[size, seconds * max(latency, rate)] for size, seconds in link["points"]]
        return
    link["latency"] *= latency
    link["bandwidth"] /= rate


def step(problem: Problem, partitioner: Partitioner) -> float | None:
    """The simulated step of its plan; None if nothing fits."""
    try:
        plan = partitioner(problem).plan
    except PartitionError:
        return None
    return simulate(plan, problem.profile, problem.cluster).step_seconds


def no_slower(better: float | None, worse: float | None) -> None:
    """A plan stays possible, and is no slower."""
    if worse is not None:
        assert better is not None
        assert better <= worse * ROUNDING


def same(a: float | None, b: float | None, factor: float = 1.0) -> None:
    """Both possible, `a` in `factor` times the seconds of `b`; or neither."""
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert a == pytest.approx(b * factor, rel=1e-9)


@st.composite
def better_times(draw: st.DrawFn, problem: Problem) -> Problem:
    """One device type faster: some layers' forward, backward or optimizer seconds, by a factor for each layer."""
    kind = draw(st.sampled_from(sorted({d.type for d in problem.cluster.devices})))
    rows = draw(st.lists(st.sampled_from(["forward_seconds", "backward_seconds", "optimizer_seconds"]), min_size=1, unique=True))
    factors = draw(st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.1]), min_size=8, max_size=8))

    def edit(profile: Document) -> None:
        for m in (m for m in profile["measurements"] if m["device_type"] == kind):
            for name in rows:
                if name == "optimizer_seconds":
                    m[name] = [t * f for t, f in zip(m[name], factors, strict=False)]
                else:
                    m[name] = [[t * f for t, f in zip(row, factors, strict=False)] for row in m[name]]

    return changed(problem, profile=edit)


@st.composite
def better_links(draw: st.DrawFn, problem: Problem) -> Problem:
    """One link, or all: lower latency, more bandwidth, or both."""
    latency, rate = draw(st.sampled_from([(0.5, 1.0), (1.0, 0.5), (0.0, 0.1), (0.3, 0.3)]))
    which = draw(st.integers(-1, 3))

    def edit(cluster: Document) -> None:
        links = all_links(cluster)
        for link in links if which < 0 else [links[which % len(links)]]:
            scale_link(link, latency, rate)

    return changed(problem, cluster=edit)


@st.composite
def better_memory(draw: st.DrawFn, problem: Problem) -> Problem:
    """More memory on one type, fewer bytes that the framework takes, or no reserve."""
    what = draw(st.sampled_from(["memory", "memory", "runtime", "reserve"]))
    kind = draw(st.sampled_from(sorted(problem.cluster.device_types)))
    more = draw(st.sampled_from([1, 500, 4_000, 50_000]))

    def edit(cluster: Document) -> None:
        if what == "memory":
            cluster["device_types"][kind]["memory"] += more
        elif what == "runtime":
            own = ("overlap_transfers", "action_seconds", "bucket_bytes")
            cluster["runtime_overhead"] = {key: cluster["runtime_overhead"][key] for key in own}

    better = changed(problem, cluster=edit)
    return replace(better, memory_reserve=0.0) if what == "reserve" else better


@st.composite
def better_choice(draw: st.DrawFn, problem: Problem) -> Problem:
    """One more device, more freedom, or less overhead for each action."""
    what = draw(st.sampled_from(["device", "device", "node", "recompute", "schedule", "backend", "overhead"]))
    if what in ("device", "node"):
        kind = draw(st.sampled_from(sorted({d.type for d in problem.cluster.devices})))

        def edit(cluster: Document) -> None:
            if what == "device":
                devices = cluster["nodes"][0]["devices"]
                devices[kind] = devices.get(kind, 0) + 1
            else:
                cluster["nodes"] += ({"name": "more", "devices": {kind: 1}},)

        return changed(problem, cluster=edit)
    if what == "overhead":

        def faster(cluster: Document) -> None:
            cluster["runtime_overhead"]["action_seconds"] = 0.0

        return changed(problem, cluster=faster)
    freer: dict[str, dict[str, Any]] = {
        "recompute": {"allow_recompute": True},
        "schedule": {"schedule": "auto"},
        "backend": {"backend": "torch"},
    }
    return replace(problem, **freer[what])


BETTER = st.sampled_from([better_times, better_links, better_memory, better_choice])
ORIGINAL = problems(most_devices=3, most_layers=5, most_batch=6)


def measured(problem: Problem) -> bool:
    """Whether some stage can be put somewhere: a node may have fewer devices than every measured degree."""
    try:
        require_stage_kinds(problem)
    except PartitionError:
        return False
    return True


SMALL = st.booleans().flatmap(lambda split: problems(most_devices=4, most_layers=6, tensor_parallel=split).filter(measured))


class TestBetterIsNeverSlower:
    @settings(max_examples=12, **UNHURRIED)
    @given(st.data())
    def test_auto_and_chain(self, data: st.DataObject) -> None:
        problem = data.draw(SMALL)
        better = data.draw(data.draw(BETTER)(problem))
        for partitioner in (Auto(), Chain()):
            no_slower(step(better, partitioner), step(problem, partitioner))

    @settings(max_examples=8, **UNHURRIED)
    @given(st.data())
    def test_exhaustive(self, data: st.DataObject) -> None:
        problem = data.draw(ORIGINAL)
        better = data.draw(data.draw(BETTER)(problem))
        no_slower(step(better, Exhaustive()), step(problem, Exhaustive()))

    @settings(max_examples=8, **UNHURRIED)
    @given(st.data())
    def test_the_bound_of_the_search(self, data: st.DataObject) -> None:
        """It is bisected: exact but for the last part, and for the ranges of samples that are not divided further."""
        problem = replace(data.draw(ORIGINAL), backend="torch", deadline_seconds_per_step=None)
        better = data.draw(data.draw(BETTER)(problem))
        first, second = (Lower(Types(x), fluid_bound(x)).run(math.inf, 300_000_000) for x in (better, problem))
        assert first <= second * BOUND_END * 1.02

    @settings(max_examples=60)
    @given(st.data())
    def test_fluid_bound(self, data: st.DataObject) -> None:
        problem = data.draw(SMALL)
        better = data.draw(data.draw(BETTER)(problem))
        assert fluid_bound(better) <= fluid_bound(problem) * ROUNDING

    @settings(max_examples=80)
    @given(st.data())
    def test_simulated_step_of_a_fixed_plan(self, data: st.DataObject) -> None:
        problem = data.draw(problems(most_devices=5, most_layers=6, most_batch=12))
        better = data.draw(data.draw(st.sampled_from([better_times, better_links]))(problem))
        plan = data.draw(plans(problem))
        times = [simulate(plan, p.profile, p.cluster) for p in (better, problem)]
        assert times[0].pipeline_seconds <= times[1].pipeline_seconds * ROUNDING
        assert times[0].step_seconds <= times[1].step_seconds * ROUNDING
        assert times[0].peak_bytes == times[1].peak_bytes


def another_order(problem: Problem, data: st.DataObject) -> Problem:
    """Nodes, types, measurements and the devices within nodes in another order, under other names."""
    types = sorted(problem.cluster.device_types)
    nodes = [node.name for node in problem.cluster.nodes]
    new = dict(zip(types, data.draw(st.permutations(["zulu", "b", "alpha"][: len(types)])), strict=True))
    name = dict(zip(nodes, data.draw(st.permutations(["n9", "m", "n0"][: len(nodes)])), strict=True))

    def shuffled(items: Any) -> Any:
        drawn = data.draw(st.permutations(list(items.items() if isinstance(items, dict) else items)))
        return dict(drawn) if isinstance(items, dict) else drawn

    def edit_cluster(cluster: Document) -> None:
        kinds = {new[kind]: value for kind, value in cluster["device_types"].items()}
        cluster["device_types"] = shuffled(kinds)
        for node in cluster["nodes"]:
            node["name"] = name[node["name"]]
            node["devices"] = shuffled({new[kind]: count for kind, count in node["devices"].items()})
        cluster["nodes"] = shuffled(cluster["nodes"])
        for link in cluster["links"]:
            link["between"] = [name[end] for end in reversed(link["between"])]

    def edit_profile(profile: Document) -> None:
        profile["measurements"] = [m for m in profile["measurements"] if m["device_type"] in new]
        for m in profile["measurements"]:
            m["device_type"] = new[m["device_type"]]
        profile["measurements"] = shuffled(profile["measurements"])

    return changed(problem, edit_cluster, edit_profile)


def with_own_links(problem: Problem, data: st.DataObject) -> Problem:
    """Sometimes a link of its own for a pair of nodes."""
    names = [node.name for node in problem.cluster.nodes]
    if len(names) < 2 or data.draw(st.booleans()):
        return problem
    pair = data.draw(st.permutations(names))[:2]

    def edit(cluster: Document) -> None:
        cluster["links"] = [{"between": pair, "bandwidth": 5e3, "latency": 2e-3}]

    return changed(problem, cluster=edit)


def in_other_units(problem: Problem, seconds: float, size: int) -> Problem:
    """All times and all bytes multiplied."""

    def edit_cluster(cluster: Document) -> None:
        for link in all_links(cluster):
            if link["points"] is not None:
                link["points"] = [[x * size, t * seconds] for x, t in link["points"]]
            else:
                link["latency"] *= seconds
                link["bandwidth"] *= size / seconds
        for kind in cluster["device_types"].values():
            kind["memory"] *= size
        cluster["runtime_overhead"]["action_seconds"] *= seconds
        cluster["runtime_overhead"]["device_bytes"] *= size
        cluster["runtime_overhead"]["bucket_bytes"] *= size

    def edit_profile(profile: Document) -> None:
        for m in profile["measurements"]:
            for key in ("forward_seconds", "backward_seconds"):
                m[key] = [[t * seconds for t in row] for row in m[key]]
            m["optimizer_seconds"] = [t * seconds for t in m["optimizer_seconds"]]
            for key in ("parameter_bytes", "saved_bytes_per_sample"):
                m[key] = m[key] and [x * size for x in m[key]]
        for layer in profile["layers"]:
            for key in (key for key in layer if "bytes" in key):
                layer[key] = layer[key] and layer[key] * size

    return changed(problem, edit_cluster, edit_profile)


class TestNamesOrdersAndUnitsMeanNothing:
    @settings(max_examples=8, **UNHURRIED)
    @given(st.data())
    def test_names_and_orders(self, data: st.DataObject) -> None:
        problem = with_own_links(data.draw(SMALL), data)
        other = another_order(problem, data)
        assert fluid_bound(other) == pytest.approx(fluid_bound(problem), rel=1e-9)
        for partitioner in (Auto(), Chain()):
            same(step(other, partitioner), step(problem, partitioner))

    @settings(max_examples=8, **UNHURRIED)
    @given(st.data())
    def test_names_and_orders_for_the_oracle(self, data: st.DataObject) -> None:
        problem = with_own_links(data.draw(ORIGINAL), data)
        other = another_order(problem, data)
        same(step(other, Exhaustive()), step(problem, Exhaustive()))

    @settings(max_examples=12, **UNHURRIED)
    @given(st.data())
    def test_units(self, data: st.DataObject) -> None:
        """Seconds in other units; bytes too, but where a fraction of a byte is rounded."""
        problem = data.draw(SMALL)
        seconds, size = data.draw(st.sampled_from([(1024.0, 1), (1e-3, 1), (7.0, 8), (1.0, 1000)]))
        frozen = any(layer.trained_bytes is not None for layer in problem.profile.layers)
        parts = frozen and any(m.parameter_bytes is not None for m in problem.profile.measurements)
        exact = problem.cluster.runtime_overhead.allocator_factor == 1 and problem.memory_reserve == 0
        assume(size == 1 or (exact and not parts))
        other = in_other_units(problem, seconds, size)
        assert fluid_bound(other) == pytest.approx(fluid_bound(problem) * seconds, rel=1e-9)
        for partitioner in (Auto(), Chain()):
            same(step(other, partitioner), step(problem, partitioner), seconds)


def affine(problem: Problem) -> bool:
    """Whether no link is of measured points."""
    return all(link["points"] is None for link in all_links(problem.cluster.model_dump()))


class TestMoreWorkIsNeverFaster:
    @settings(max_examples=12, **UNHURRIED)
    @given(st.data())
    def test_a_bigger_batch(self, data: st.DataObject) -> None:
        problem = data.draw(SMALL)
        assume(affine(problem))
        smaller, more = problem, data.draw(st.integers(1, 3))
        bigger = replace(problem, global_batch=problem.global_batch + more)
        assert fluid_bound(smaller) <= fluid_bound(bigger) * ROUNDING
        for partitioner in (Auto(), Chain()):
            no_slower(step(smaller, partitioner), step(bigger, partitioner))

    @settings(max_examples=60)
    @given(st.data())
    def test_one_more_microbatch_for_a_fixed_plan(self, data: st.DataObject) -> None:
        problem = data.draw(problems(most_devices=5, most_layers=6, most_batch=12))
        plan = data.draw(plans(problem))
        r = data.draw(st.integers(0, len(plan.replicas) - 1))
        more = plan.replicas[r].microbatch_sizes[-1]
        replicas = [
            replica.model_copy(update={"microbatch_sizes": (*replica.microbatch_sizes, more)}) if i == r else replica
            for i, replica in enumerate(plan.replicas)
        ]
        longer = Plan.model_validate(
            plan.model_dump() | {"global_batch": plan.global_batch + more, "replicas": [x.model_dump() for x in replicas]}
        )
        before, after = (simulate(p, problem.profile, problem.cluster) for p in (plan, longer))
        assert before.pipeline_seconds <= after.pipeline_seconds * ROUNDING
        assert before.step_seconds <= after.step_seconds * ROUNDING
        assert all(before.peak_bytes[d] <= after.peak_bytes[d] for d in plan.device_ids)
