"""Transfers and sums that share adapters, against a model that goes from event to event in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.predict import flows
from hetpipe.predict.simulator import simulate
from tests.support.sharing import busy_plans, played
from tests.support.strategies import UNHURRIED, make_cluster, make_profile


@settings(max_examples=150, **UNHURRIED)
@given(busy_plans())
def test_all_ends_are_those_of_the_oracle(case: tuple[Plan, Profile, Cluster]) -> None:
    plan, profile, cluster = case
    assume(cluster.runtime_overhead.overlap_transfers)
    expected = played(plan, profile, cluster)
    timeline = simulate(plan, profile, cluster)
    for span in timeline.spans:
        if span.microbatch is not None:
            r, s, i = span.replica, span.stage, span.microbatch
            names = [(">", r, s, i), ("<", r, s - 1, i)] if span.kind == "send" else [(span.kind, r, s, i)]
            begun_and_ended = [expected[name] for name in names if name in expected]
            assert any((span.start, span.end) == pytest.approx(x, rel=1e-9, abs=1e-9) for x in begun_and_ended)
    sums = sorted(x for key, x in expected.items() if key[0] == "sum")
    found = sorted({(span.start, span.end) for span in timeline.spans if span.kind == "sync"})
    for begin, end in found:
        assert any((begin, end) == pytest.approx(x, rel=1e-9, abs=1e-9) for x in sums)
    last = max(end for key, (_, end) in expected.items() if key[0] in ("B", "sum"))
    assert timeline.step_seconds == pytest.approx(last, rel=1e-9)


@settings(max_examples=60, **UNHURRIED)
@given(busy_plans())
def test_python_and_what_is_compiled_find_the_same_bits(case: tuple[Plan, Profile, Cluster]) -> None:
    """Few tasks are left to Python, which need not read what is compiled."""
    handed, ends = list[tuple[flows.Tasks, flows.Flows]](), flows.ends

    def copied(tasks: flows.Tasks) -> flows.Tasks:
        return tasks._replace(begin=tasks.begin.copy())

    def kept(tasks: flows.Tasks, of: flows.Flows, effort: float) -> flows.Array:
        handed.append((copied(tasks), of))
        return ends(tasks, of, effort)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows, "ends", kept)
        simulate(*case)
    for tasks, of in handed:
        for effort in (math.inf, 3.0):
            python, compiled = (run(copied(tasks), of, flows._way(of), effort) for run in (flows._run, flows.ready()))
            assert np.array_equal(python, compiled, equal_nan=True)
        if np.isnan(python).any():
            with pytest.raises(flows.EffortError, match="more than 3 speeds"):
                ends(tasks, of, 3.0)


def seconds(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[float, float]:
    """Of the pipelines and of the step."""
    found = simulate(plan, profile, cluster)
    return found.pipeline_seconds, found.step_seconds


@settings(max_examples=60, **UNHURRIED)
@given(busy_plans())
def test_sharing_is_never_faster_than_being_alone(case: tuple[Plan, Profile, Cluster]) -> None:
    plan, profile, cluster = case
    document = cluster.model_dump()
    document["nodes"] = [node | {"adapter": {"bandwidth": 1e15}} for node in document["nodes"]]
    alone = seconds(plan, profile, Cluster.parse(document, "wide"))
    assert all(a <= b * (1 + 1e-9) for a, b in zip(alone, seconds(*case), strict=True))


@settings(max_examples=60, **UNHURRIED)
@given(busy_plans(), st.randoms(use_true_random=False))
def test_the_order_of_replicas_and_nodes_does_not_matter(case: tuple[Plan, Profile, Cluster], draw: Any) -> None:
    plan, profile, cluster = case
    replicas, document = list(plan.replicas), cluster.model_dump()
    draw.shuffle(replicas)
    document["nodes"] = draw.sample(document["nodes"], len(document["nodes"]))
    other = seconds(plan.model_copy(update={"replicas": tuple(replicas)}), profile, Cluster.parse(document, "shuffled"))
    assert other == pytest.approx(seconds(*case), rel=1e-9)


@settings(max_examples=60, **UNHURRIED)
@given(busy_plans())
def test_units_of_bytes_do_not_matter(case: tuple[Plan, Profile, Cluster]) -> None:
    plan, profile, cluster = case
    assume(not any(link.points for link in (*cluster.links, cluster.link) if link is not None))
    assume(not any(x.tied_parameter_bytes % m.tensor_parallel for m in profile.measurements for x in profile.layers))
    content, document = profile.model_dump(), cluster.model_dump()
    for rows in (content["layers"], content["measurements"]):
        for row in rows:
            for key in (key for key in row if "bytes" in key and row[key] is not None):
                row[key] = [1000 * x for x in row[key]] if isinstance(row[key], tuple | list) else 1000 * row[key]
    for node in document["nodes"]:
        for part in [node["link"]] + ([node["adapter"]] if node["adapter"] else []):
            part |= {key: 1000 * part[key] for key in part if "bandwidth" in key and part[key] is not None}
    for link in (document["link"], *document["links"]):
        link["bandwidth"] *= 1000
    document["runtime_overhead"]["bucket_bytes"] *= 1000
    found = seconds(plan, Profile.parse(content, "more"), Cluster.parse(document, "faster"))
    assert found == pytest.approx(seconds(*case), rel=1e-9)


def pipelines(count: int) -> Plan:
    """
    n0   n1      each boundary's output takes 2 s alone; a forward 1 s, a backward 2 s
    0 ── 0
    1 ── 1
    """
    replicas = [
        ReplicaPlan(
            microbatch_sizes=(1,),
            stages=(StagePlan(layers=(0, 1), devices=(f"n0/{r}",)), StagePlan(layers=(1, 2), devices=(f"n1/{r}",))),
        )
        for r in range(count)
    ]
    return Plan(model="test", global_batch=count, replicas=tuple(replicas))


@pytest.mark.parametrize(("adapters", "transfer"), [(1, 6.0), (2, 3.0), (3, 2.0), ("per_device", 2.0)])
def test_pipelines_side_by_side(adapters: int | str, transfer: float) -> None:
    """Three transfers at a time over so many adapters, there and back: each gets its part."""
    document = make_cluster([{"a": 3}, {"a": 3}], link={"bandwidth": 50.0}).model_dump()
    document["nodes"] = [node | {"adapters": adapters} for node in document["nodes"]]
    profile = make_profile({"a": [1.0, 1.0]}, layer={"output_bytes_per_sample": 100})
    found = simulate(pipelines(3), profile, Cluster.parse(document, "the test's cluster"))
    assert found.step_seconds == pytest.approx(1 + transfer + 1 + 2 + transfer + 2)


def test_out_and_in_are_apart() -> None:
    """n1 receives at 25 bytes/s, and sends at 100: 4 s there, 2 s back, over a link of 50."""
    document = make_cluster([{"a": 1}, {"a": 2}], link={"bandwidth": 50.0}).model_dump()
    document["nodes"][1]["adapter"] = {"bandwidth": 100.0, "bandwidth_in": 25.0}
    profile = make_profile({"a": [1.0, 1.0]}, layer={"output_bytes_per_sample": 100})
    found = simulate(pipelines(1), profile, Cluster.parse(document, "the test's cluster"))
    assert found.step_seconds == pytest.approx(1 + 4 + 1 + 2 + 2 + 2)
