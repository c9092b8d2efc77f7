"""Tensor-parallel stages: who sums which shard, with how many bytes; what goes over the wire; and the framework's section."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.documents.seats import pieces_of
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Partitioner, PartitionError
from hetpipe.predict.cost import Costs
from hetpipe.predict.simulator import replica_costs, simulate
from hetpipe.predict.sums import sync_segments
from tests.support.strategies import make_cluster, make_problem, make_profile

WIRE = {"bandwidth": 100.0, "latency": 0.5}
NODE = {"bandwidth": 1000.0, "latency": 0.125}


def profile(tied: bool = False) -> Profile:
    """Two layers of 800 parameter bytes; at degree 2 a device holds 440 (40 are not split), at degree 4 260."""
    layer: dict[str, Any] = {"parameter_bytes": 800, "output_bytes_per_sample": 400, "saved_bytes_per_sample": 1000}
    if tied:
        layer |= {"tied": "wte", "tied_parameter_bytes": 400}
    document = make_profile({"a": [1.0, 1.0]}, layer=layer).model_dump()
    one = document["measurements"][0]
    shards = [
        one | {"tensor_parallel": t, "parameter_bytes": [b, b], "saved_bytes_per_sample": [600, 600]}
        for t, b in ((2, 440), (4, 260))
    ]
    return Profile.parse(document | {"measurements": [one, *shards]}, "profile")


def cluster(**overhead: Any) -> Cluster:
    found = make_cluster([{"a": 4}] * 2, link=WIRE, inside=NODE).model_dump()
    return Cluster.parse(found | {"runtime_overhead": overhead}, "cluster")


def plan(*replicas: list[list[str]], sizes: tuple[int, ...] = (1,)) -> Plan:
    """A replica is its stages, a stage its devices; two layers, one each or both in the one stage."""

    def stages(groups: list[list[str]]) -> list[dict[str, Any]]:
        step = 2 // len(groups)
        return [{"layers": [s * step, (s + 1) * step], "devices": group} for s, group in enumerate(groups)]

    content = [{"microbatch_sizes": list(sizes), "stages": stages(groups)} for groups in replicas]
    batch = len(replicas) * sum(sizes)
    return Plan.parse({"format": "hetpipe.plan/1", "model": "test", "global_batch": batch, "replicas": content}, "plan")


def stage(*devices: str) -> StagePlan:
    return StagePlan(layers=(0, 1), devices=devices)


def test_shards_of_equal_degrees() -> None:
    assert pieces_of([stage("n0/0", "n0/1"), stage("n1/0", "n1/1")]) == (("n0/0", "n1/0"), ("n0/1", "n1/1"))


def test_shards_of_unlike_degrees() -> None:
    #   n0:  0 0 0 1 1 1      of 2
    #   n1:  0 0 1 1 2 2      of 3
    found = pieces_of([stage("n0/0", "n0/1"), stage("n1/0", "n1/1", "n1/2")])
    assert [a[-1] + b[-1] for a, b in found] == ["00", "00", "01", "11", "12", "12"]


def test_each_shard_is_summed_with_its_owners_and_its_bytes() -> None:
    costs = Costs(profile(), cluster())
    segments = sync_segments(plan([["n0/0", "n0/1"]], [["n1/0", "n1/1"]]), costs)
    assert [(s.owners, s.size_bytes) for s in segments] == [(("n0/0", "n1/0"), 880), (("n0/1", "n1/1"), 880)]


def test_the_shards_of_unlike_degrees_are_the_finer_ones() -> None:
    costs = Costs(profile(), cluster())
    segments = sync_segments(plan([["n0/0", "n0/1"]], [["n1/0", "n1/1", "n1/2", "n1/3"]]), costs)
    assert [s.owners for s in segments] == [("n0/0", "n1/0"), ("n0/0", "n1/1"), ("n0/1", "n1/2"), ("n0/1", "n1/3")]
    assert {s.size_bytes for s in segments} == {2 * 260}


def test_one_replica_sums_nothing() -> None:
    assert sync_segments(plan([["n0/0", "n0/1"]]), Costs(profile(), cluster())) == []


def test_degree_one_is_as_before() -> None:
    segments = sync_segments(plan([["n0/0"]], [["n1/0"]]), Costs(profile(), cluster()))
    assert [(s.owners, s.size_bytes) for s in segments] == [(("n0/0", "n1/0"), 1600)]


def test_tied_shards_of_two_stages() -> None:
    costs = Costs(profile(tied=True), cluster())
    segments = sync_segments(plan([["n0/0", "n0/1"], ["n1/0", "n1/1"]]), costs)
    assert [(s.tied, s.owners, s.size_bytes) for s in segments] == [
        ("wte", ("n0/0", "n1/0"), 200),
        ("wte", ("n0/1", "n1/1"), 200),
    ]
    assert costs.parameter_bytes("a", 0, 2, 2) == (440 + 440 - 200,) * 2


def test_of_a_shard_as_large_a_part_trains_as_of_its_layer() -> None:
    """Layer 0: 100 of 800 bytes train, so of a shard of 440 55, and of one of 260 32 whole ones; all of layer 1."""
    document = profile().model_dump()
    document["layers"][0]["trained_bytes"] = 100
    costs = Costs(Profile.parse(document, "profile"), cluster())
    assert [costs.parameter_bytes("a", 0, 2, t) for t in (1, 2, 4)] == [(1600, 900), (880, 55 + 440), (520, 32 + 260)]
    segments = sync_segments(plan([["n0/0", "n0/1"]], [["n1/0", "n1/1"]]), costs)
    assert [(s.owners, s.size_bytes) for s in segments] == [(("n0/0", "n1/0"), 495), (("n0/1", "n1/1"), 495)]


def test_what_trains_of_a_shard_is_what_its_measurement_says() -> None:
    """As of adapters, of which a split layer has one matrix whole: 60 of 440 bytes, and not the 55 of its part."""
    document = profile().model_dump()
    document["layers"][0]["trained_bytes"] = 100
    split = next(m for m in document["measurements"] if m["tensor_parallel"] == 2)
    split["trained_bytes"] = [60, 440]
    costs = Costs(Profile.parse(document, "profile"), cluster())
    assert costs.parameter_bytes("a", 0, 2, 2) == (880, 60 + 440)
    split["trained_bytes"] = [441, 440]
    with pytest.raises(InputError, match="has 441 trained_bytes, more than its 440 parameter_bytes"):
        Profile.parse(document, "profile")


@pytest.mark.parametrize(("adapters", "sharing"), [(1, 2), (2, 1), ("per_device", 1)])
def test_shards_are_summed_at_the_same_time(adapters: int | str, sharing: int) -> None:
    """They share a node's adapter, or have one each."""
    document = cluster().model_dump()
    document["nodes"] = [node | {"adapters": adapters} for node in document["nodes"]]
    wide = Cluster.parse(document, "cluster")
    found = simulate(plan([["n0/0", "n0/1"]], [["n1/0", "n1/1"]]), profile(), wide)
    (times,) = {(span.start, span.end) for span in found.spans if span.kind == "sync"}
    assert times == pytest.approx((6.0, 6.0 + 2 * (0.5 + sharing * 440 / 100)))


def test_a_group_sends_its_parts_side_by_side_and_gathers_them() -> None:
    costs = Costs(profile(), cluster())
    assert costs.transfer("n0/0", "n1/0", 1, 2) == (8.0, 0.5)
    occupied, latency = costs.transfer("n0/0", "n1/0", 1, 2, (2, 4))
    assert occupied == 4.0  # 800 bytes in two parts
    gathered = [1 * (0.125 + 400 / 1000), 3 * (0.125 + 200 / 1000)]  # the gradient, the output
    assert latency == pytest.approx(0.5 + sum(gathered) / 2)


def test_only_receivers_gather_where_transfers_block() -> None:
    """Forward and backward of both stages together: four times the wire, and each group's own gather once."""
    two = plan([["n0/0"], ["n1/0", "n1/1", "n1/2", "n1/3"]], sizes=(2,)).replicas[0]
    free = replica_costs(Costs(profile(), cluster()), two)
    held = replica_costs(Costs(profile(), cluster(overlap_transfers=False)), two)
    more = sum(
        blocking[0] - own[0]
        for blocking, own in zip([*held.forward, *held.backward], [*free.forward, *free.backward], strict=True)
    )
    wire, gathered = 8.0 + 0.5, 3 * (0.125 + 200 / 1000)
    assert more == pytest.approx(4 * wire + gathered)


def test_transfers_that_block_take_both_ends_time() -> None:
    two = plan([["n0/0"], ["n1/0"]], sizes=(2, 2)).replicas[0]
    free = replica_costs(Costs(profile(), cluster()), two)
    held = replica_costs(Costs(profile(), cluster(overlap_transfers=False)), two)
    assert free.which.tolist() == held.which.tolist() == [0, 0]
    assert (free.forward[0].tolist(), free.occupied.tolist(), free.latency.tolist()) == ([2.0], [[8.0]], [0.5])
    assert (held.forward.tolist(), held.backward.tolist()) == ([[10.5]] * 2, [[12.5]] * 2)
    assert (held.occupied.tolist(), held.latency.tolist()) == ([[0.0]], [0.0])


def test_what_the_framework_takes() -> None:
    def peak(samples: int = 4, **overhead: Any) -> int:
        costs = Costs(profile(), cluster(**overhead))
        return costs.stage_memory("a", 0, 1, samples=samples).peak((2, 2), 1)

    plain = peak()
    assert plain == 4 * 800 + 2 * (1000 + 400) + 4 * 400
    assert peak(device_bytes=77) == plain + 77
    assert peak(parameter_copies=1.5) == plain + 1200
    assert peak(backward_workspace=0.5) == plain + 2 * 500
    assert peak(allocator_factor=1.25, device_bytes=77) == 1.25 * plain + 77
    assert peak(receive_buffers="one") == plain - 4 * 400 + 2 * 400
    assert peak(8, receive_buffers="one") == peak(4, receive_buffers="one")


def test_buffers_of_shards_are_as_they_were_measured() -> None:
    """A layer of 800 bytes in few bits, of which a device of two has 420, and one of four, where nobody measured it, all."""
    document = profile().model_dump()
    document["layers"][0]["buffer_bytes"] = 800
    document["measurements"][1]["buffer_bytes"] = [420, 0]
    costs, plain = Costs(Profile.parse(document, "profile"), cluster()), Costs(profile(), cluster())
    held = [[of.stage_memory("a", 0, 2, samples=1, degree=t).static for t in (1, 2, 4)] for of in (costs, plain)]
    assert [a - b for a, b in zip(*held, strict=True)] == [800, 420, 800]


def test_a_degree_that_was_not_measured_is_named() -> None:
    three = plan([["n0/0", "n0/1", "n0/2"]])
    with pytest.raises(InputError, match="no measurement of device type 'a' whose layers are split over 3 devices"):
        simulate(three, profile(), cluster())


def measured(*degrees: int, seconds: float = 1.0) -> Profile:
    """Two layers of 800 bytes at these degrees: t devices take a t-th of the time and hold a t-th of the bytes."""
    document = make_profile({"a": [seconds] * 2}, layer={"parameter_bytes": 800}).model_dump()
    one = document["measurements"][0]
    found = []
    for t in degrees:
        rows = {key: [[x / t for x in row] for row in one[key]] for key in ("forward_seconds", "backward_seconds")}
        found.append(one | rows | {"tensor_parallel": t, "parameter_bytes": [800 // t] * 2})
    return Profile.parse(document | {"measurements": found}, "profile")


@pytest.mark.parametrize("search", [Auto(), Exhaustive()], ids=["auto", "exhaustive"])
def test_a_group_where_one_device_does_not_fit(search: Partitioner) -> None:
    """4 bytes per parameter byte: a layer needs 3200 on one device, which has 2000, and 1600 on each of two."""
    problem = make_problem(make_cluster([{"a": 4}], memory=2_000), measured(1, 2), 4)
    found = search(problem).plan
    assert [s.devices for s in found.replicas[0].stages] == [("n0/0", "n0/1"), ("n0/2", "n0/3")]


def test_some_degree_is_enough() -> None:
    """Measured at degree 2 alone: two of three devices, as one stage."""
    problem = make_problem(make_cluster([{"a": 3}]), measured(2), 4)
    solution = Auto()(problem)
    assert [s.devices for s in solution.plan.replicas[0].stages] == [("n0/0", "n0/1")]
    assert fluid_bound(problem) <= simulate(solution.plan, problem.profile, problem.cluster).step_seconds


@pytest.mark.parametrize("search", [Auto(), Exhaustive()], ids=["auto", "exhaustive"])
def test_a_degree_that_no_node_has_devices_for(search: Partitioner) -> None:
    problem = make_problem(make_cluster([{"a": 3}] * 2), measured(4), 4)
    assert fluid_bound(problem) == math.inf
    message = r"only at tensor-parallel degrees \[4\], and the largest nodes have 3 'a'; measure degree 1"
    with pytest.raises(PartitionError, match=message):
        search(problem)


def test_one_process_splits_no_stage() -> None:
    problem = make_problem(make_cluster([{"a": 4}]), measured(2), 4, backend="fairscale")
    with pytest.raises(PartitionError, match=r"\[2\], and the back end 'fairscale' runs a stage on one device"):
        Auto()(problem)
