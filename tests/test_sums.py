"""Sums of gradients: how they are cut, when a bucket is ready, and that the price is what the engine does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetpipe.documents.plan import Backend, Plan, ReplicaPlan, StagePlan
from hetpipe.predict.cost import Costs
from hetpipe.predict.simulator import simulate
from hetpipe.predict.sums import gradients_ahead, sync_segments
from hetpipe.predict.timeline import Timeline
from hetpipe.runtime import gradients
from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.replicas import OwnerGroup
from tests.support.strategies import make_cluster, make_profile

MIB = 2**20
LINK = {"bandwidth": 25.0 * MIB, "latency": 0.0}  # a bucket of 25 MiB by two owners takes a second


def layers_of(*sizes: int) -> list[dict[str, Any]]:
    return [{"parameter_bytes": size * MIB} for size in sizes]


def plan_of(
    *replicas: list[tuple[str, int, int]], sizes: tuple[int, ...] = (1,), backend: Backend = "torch", recompute: bool = False
) -> Plan:
    """Replicas of stages (device, lo, hi)."""
    found = tuple(
        ReplicaPlan(
            microbatch_sizes=sizes,
            stages=tuple(StagePlan(layers=(lo, hi), devices=(d,), recompute=recompute) for d, lo, hi in stages),
        )
        for stages in replicas
    )
    return Plan(model="test", global_batch=len(found) * sum(sizes), replicas=found, backend=backend)


def sums(timeline: Timeline) -> list[tuple[float, float]]:
    return sorted({(span.start, span.end) for span in timeline.spans if span.kind == "sync"})


def test_buckets_end_where_the_next_layer_would_bring_them_over_25_mib() -> None:
    """From the last layer down: 5 + 20, then 6, as 20 more would be too much; 30 by itself; nothing for a layer without any."""
    profile = make_profile({"a": [1.0] * 7}, layers=layers_of(0, 2, 30, 20, 6, 20, 5))
    plan = plan_of([("n0/0", 0, 7)], [("n0/1", 0, 7)])
    found = [(x.lo, x.hi, x.size_bytes / MIB) for x in sync_segments(plan, Costs(profile, make_cluster([{"a": 2}])))]
    assert found == [(5, 7, 25), (4, 5, 6), (3, 4, 20), (2, 3, 30), (1, 2, 2)]
    whole = plan.model_copy(update={"backend": "fairscale"})
    found = [(x.lo, x.hi, x.size_bytes / MIB) for x in sync_segments(whole, Costs(profile, make_cluster([{"a": 2}])))]
    assert found == [(1, 7, 83)]


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=12), st.integers(1, 60))
def test_the_cut_is_the_engines_where_a_layer_is_one_parameter(rows: list[tuple[int, bool]], limit: int) -> None:
    """Frozen layers are in no bucket."""
    layers = [
        nn.ParameterList([nn.Parameter(nn.Linear(size, 1, bias=False).weight.detach(), trains)] if size else [])
        for size, trains in rows
    ]
    parameters = [p for layer in layers for p in layer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "BUCKET_BYTES", 4 * limit)
        sync = GradientSync([OwnerGroup("layers", (0, 1), tuple(parameters))], {}, 0)
    bytes_ = [{"parameter_bytes": 4 * size, **({} if trains else {"trained_bytes": 0})} for size, trains in rows]
    profile = make_profile({"a": [1.0] * len(rows)}, layers=bytes_)
    found = Costs(profile, make_cluster([{"a": 2}])).buckets(frozenset({("", 1)}), 0, len(rows), 1, 4.0 * limit)
    assert [x.size_bytes for x in found] == [sum(4 * p.numel() for p in bucket.parameters) for bucket in sync._buckets]


def test_frozen_layers_are_in_no_bucket_and_no_sum() -> None:
    """Of seven layers of 10 MiB the second, the fourth half and the last train."""
    layers = layers_of(*[10] * 7)
    for i, trained in enumerate((0, 10, 0, 5, 0, 0, 10)):
        layers[i] |= {"trained_bytes": trained * MIB}
    profile = make_profile({"a": [1.0] * 7}, layers=layers)
    for ends, buckets in (([7], [(1, 7, 25)]), ([2, 6, 7], [(6, 7, 10), (3, 4, 5), (1, 2, 10)]), ([1, 7], [(1, 7, 25)])):
        stages = [(f"n0/{i}", lo, hi) for i, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False))]
        plan = plan_of(stages, [(d.replace("n0", "n1"), lo, hi) for d, lo, hi in stages])
        costs = Costs(profile, make_cluster([{"a": 3}, {"a": 3}]))
        assert [(x.lo, x.hi, x.size_bytes / MIB) for x in sync_segments(plan, costs)] == buckets


@pytest.mark.parametrize("recompute", [False, True])
def test_a_bucket_is_ready_when_the_last_backward_has_come_down_to_it(recompute: bool) -> None:
    """
    three layers of 1 s forward and 2 s backward (3 s with recompute), a bucket each; the last of two micro-batches counts

        backward   2 2 1 1 0 0
        sums           2   1   0
    """
    profile = make_profile({"a": [1.0] * 3}, layers=layers_of(25, 25, 25))
    plan = plan_of([("n0/0", 0, 3)], [("n1/0", 0, 3)], sizes=(1, 1), recompute=recompute)
    found = simulate(plan, profile, make_cluster([{"a": 1}, {"a": 1}], link=LINK))
    end, each = (24.0, 3.0) if recompute else (18.0, 2.0)
    assert found.pipeline_seconds == end
    assert sums(found) == [(end - n * each, end - n * each + 1) for n in (2, 1, 0)]
    assert found.sync_seconds == 1


def test_sums_that_take_longer_than_backward_come_one_after_the_other() -> None:
    profile = make_profile({"a": [0.1] * 3}, layers=layers_of(25, 25, 25))
    found = simulate(plan_of([("n0/0", 0, 3)], [("n1/0", 0, 3)]), profile, make_cluster([{"a": 1}, {"a": 1}], link=LINK))
    assert sums(found) == [pytest.approx((0.5 + n, 1.5 + n)) for n in range(3)]


@pytest.mark.parametrize("backend", ["torch", "fairscale"])
def test_without_buckets_sums_begin_after_the_last_backward(backend: Backend) -> None:
    """Where the cluster file says so, and where a library leaves no place to begin: each segment at once."""
    profile = make_profile({"a": [1.0] * 3}, layers=layers_of(25, 25, 25))
    overhead = {"bucket_bytes": 0} if backend == "torch" else {}
    cluster = make_cluster([{"a": 1}, {"a": 1}], link=LINK, overhead=overhead)
    found = simulate(plan_of([("n0/0", 0, 3)], [("n1/0", 0, 3)], backend=backend), profile, cluster)
    assert sums(found) == [(9, 12)]


def test_stages_of_other_cuts_wait_for_the_slower_one() -> None:
    """Replica 1 holds layers 1 and 2 on n1/1 from the beginning; n0/0 makes layer 2's gradients 4 s before its end."""
    profile = make_profile({"a": [1.0] * 3}, layers=layers_of(25, 25, 25))
    plan = plan_of([("n0/0", 0, 3)], [("n1/0", 0, 1), ("n1/1", 1, 3)], sizes=(1, 1))
    found = simulate(plan, profile, make_cluster([{"a": 1}, {"a": 2}], link=LINK, inside={"bandwidth": 1e15, "latency": 0.0}))
    assert sums(found) == [(14, 15), (16, 17), (18, 19)]


def test_a_tied_parameter_is_ready_with_its_lowest_layer_of_the_stage_and_comes_last() -> None:
    """Layers 0 and 2 share 25 MiB: a stage that holds both waits for layer 0; one of the last alone for nothing below."""
    layers = layers_of(25, 25, 25)
    for i in (0, 2):
        layers[i] |= {"tied": "wte", "tied_parameter_bytes": 25 * MIB}
    profile = make_profile({"a": [1.0] * 3}, layers=layers)
    cluster = make_cluster([{"a": 2}, {"a": 2}], link=LINK, inside=LINK)
    both = simulate(plan_of([("n0/0", 0, 3)], [("n1/0", 0, 3)]), profile, cluster)
    assert sums(both) == [(7, 8), (9, 10)]
    one = simulate(plan_of([("n0/0", 0, 2), ("n0/1", 2, 3)]), profile, cluster)  # the first stage ends at 9
    assert sums(one) == [(9, 10)]


def test_a_gradient_that_blocks_is_sent_after_the_stage_has_made_its_own() -> None:
    """The last gradient takes 3 s to n0/0, and blocks both ends: that is a part of the last backward, and sums need not wait."""
    layer = {"parameter_bytes": 100, "output_bytes_per_sample": 10}
    profile = make_profile({"a": [1.0, 1.0]}, layer=layer)
    link = {"bandwidth": 5.0, "latency": 1.0}
    for overlap, sent in ((True, 0.0), (False, 3.0)):
        cluster = make_cluster([{"a": 2}], link=link, inside=link, overhead={"overlap_transfers": overlap})
        (replica,) = plan_of([("n0/0", 0, 1), ("n0/1", 1, 2)]).replicas
        assert gradients_ahead(Costs(profile, cluster), replica) == [0.0, sent]
