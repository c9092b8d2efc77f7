"""Other rules, other clusters, other cuts."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.files.messages import InputError
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from hetpipe.study.changes import carried_plan, make_changes
from hetpipe.study.clusters import changed_clusters
from hetpipe.study.cuts import moved_cuts, moved_plan
from hetpipe.study.rules import equal_names, equal_split, other_rules, rule_names
from hetpipe.study.study import Study
from tests.support.plans_shown import demo, many, three
from tests.support.strategies import LINK, UNHURRIED, clusters, make_cluster


def kinds(cluster: Cluster) -> Counter[str]:
    return Counter(device.type for device in cluster.devices)


@settings(**UNHURRIED, max_examples=60)
@given(clusters())
def test_each_change_is_one_device_or_twice_the_bandwidth(cluster: Cluster) -> None:
    before = kinds(cluster)
    names = [name for name, _ in changed_clusters(cluster)]
    alone = cluster.device_count == 1
    assert names == [f"one {kind} more" for kind in before] + (
        [] if alone else [*(f"one {kind} less" for kind in before), "twice the link bandwidth"]
    )
    for name, changed in changed_clusters(cluster):
        difference = {kind: kinds(changed)[kind] - count for kind, count in before.items()}
        if name.startswith("one "):
            _, kind, which = name.split()
            assert difference == dict.fromkeys(before, 0) | {kind: 1 if which == "more" else -1}
            for one_device in changed.devices:
                for other in changed.devices:
                    changed.link_between(one_device.node, other.node)  # none is unknown
        else:
            assert changed.devices == cluster.devices
            a, b = cluster.devices[0].node, cluster.devices[-1].node
            one, two = cluster.link_between(a, b), changed.link_between(a, b)
            for size in (0, 100, 5000, 10**6):
                assert two.seconds(size) - two.seconds(0) == pytest.approx((one.seconds(size) - one.seconds(0)) / 2)
            assert two.seconds(0) == pytest.approx(one.seconds(0))


def test_a_device_more_goes_where_a_link_is_known() -> None:
    inside = Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {"a": {"memory": 1}, "b": {"memory": 1}},
            "link": LINK,
            "nodes": [{"name": "n0", "devices": {"a": 1}}, {"name": "n1", "devices": {"b": 1}}],
        },
        "the cluster",
    )
    found = dict(changed_clusters(inside))
    assert found["one a more"].nodes[0].devices == {"a": 2}  # the cluster's link is inside nodes, too
    apart = inside.model_copy(update={"link": None, "links": ()})
    alone = Cluster(**{name: getattr(apart, name) for name in Cluster.model_fields})
    assert [name for name, _ in changed_clusters(alone)] == ["one a less", "one b less", "twice the link bandwidth"]
    with pytest.raises(InputError):
        alone.link_between("n0", "n0")


def test_the_equal_split_is_the_faster_of_those_that_fit() -> None:
    shown = demo()
    assert shown.problem is not None
    found = other_rules(shown.plan, *shown.problem, rule_names())
    equal = equal_split(found)
    assert equal is not None
    steps = {}
    for name in equal_names():
        try:
            predicted = make_plan(*shown.problem, shown.plan.global_batch, partitioner=name).predicted
            assert predicted is not None
            steps[name] = predicted.step_seconds
        except PartitionError:
            continue
    assert equal.step_seconds == min(steps.values())
    assert all((one.plan is None) == bool(one.reason) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("make", [three, many])
def test_a_change_that_leaves_the_plan_possible_is_never_slower(make: Callable[[], Study]) -> None:
    shown = make()
    assert shown.problem is not None
    own = simulate(shown.plan, *shown.problem).step_seconds
    told: list[str] = []
    changes = make_changes(shown.plan, *shown.problem, progress=told.append)
    found = changes.plans
    assert changes.how.startswith("auto within" if make is three else "the best of the quick rules")
    assert len(told) == len(found)
    assert found[0].name == "as it is"
    for one in found:
        if one.name == "as it is" or one.name.endswith("more") or one.name.startswith("twice"):
            assert one.step_seconds <= own * (1 + 1e-9)
        assert one.plan is None or one.plan.predicted is not None


@settings(**UNHURRIED, max_examples=3)
@given(st.sampled_from([three, demo, many]))
def test_every_moved_cut_is_what_the_simulator_says(make: Callable[[], Study]) -> None:
    shown = make()
    assert shown.problem is not None
    profile, cluster = shown.problem
    groups = [(r,) for r in range(2)] + [(2,)] if make is demo else [tuple(range(len(shown.plan.replicas)))]
    found = moved_cuts(shown.plan, profile, cluster, groups)
    assert {(one.replicas, one.stage) for one in found if one.layers == 0} == {
        (group, s) for group in groups for s in range(len(shown.plan.replicas[group[0]].stages) - 1)
    }
    for one in found:
        plan = moved_plan(shown.plan, one.replicas, one.stage, one.layers)
        plan.check(cluster=cluster, profile=profile)
        timeline = simulate(plan, profile, cluster)
        assert one.step_seconds == timeline.step_seconds
        fits = all(peak <= cluster.type_of(device).memory for device, peak in timeline.peak_bytes.items())
        assert one.fits == fits
        for r in one.replicas:
            cut = shown.plan.replicas[r].stages[one.stage].layers[1] + one.layers
            assert plan.replicas[r].stages[one.stage].layers[1] == plan.replicas[r].stages[one.stage + 1].layers[0] == cut


def test_a_measured_link_gets_twice_as_fast_too() -> None:
    points = ((0, 1.0), (100, 3.0))
    cluster = make_cluster([{"a": 2}], link={"points": [list(point) for point in points]})
    (changed,) = [found for name, found in changed_clusters(cluster) if name.startswith("twice")]
    assert changed.link == Link(points=((0, 1.0), (100, 2.0)))


@settings(**UNHURRIED, max_examples=40)
@given(clusters(), st.data())
def test_a_plan_is_carried_to_devices_of_the_same_type_and_node(cluster: Cluster, data: st.DataObject) -> None:
    """For each device of a plan another of its type on its node, none twice; none if they are too few."""
    used = data.draw(st.lists(st.sampled_from([d.id for d in cluster.devices]), min_size=1, unique=True))
    stages = tuple(StagePlan(layers=(i, i + 1), devices=(device,)) for i, device in enumerate(used))
    plan = Plan(model="test", global_batch=1, replicas=(ReplicaPlan(microbatch_sizes=(1,), stages=stages),))
    for _, changed in changed_clusters(cluster):
        found = carried_plan(plan, cluster, changed)
        before = [(d.node, d.type) for d in map(cluster.device, used)]
        there = Counter((d.node, d.type) for d in changed.devices)
        if any(count > there[place] for place, count in Counter(before).items()):
            assert found is None
        else:
            assert found is not None
            assert [(d.node, d.type) for d in map(changed.device, found.device_ids)] == before
            assert len(set(found.device_ids)) == len(used)
