"""Offload as a kind of stage: what `auto` and `chain` find beside every plan there is, on drawn problems of a few devices."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.partitioners import auto, exhaustive
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.predict.simulator import simulate
from tests.support.strategies import make_cluster, make_problem, make_profile


def drawn(seed: int) -> Problem:
    """Two types on two nodes, three or four layers that save much, memory for some of it, and hosts that lend some or none."""
    dice = random.Random(seed)
    layers = [
        {
            "parameter_bytes": dice.randint(10, 200),
            "output_bytes_per_sample": dice.randint(5, 200),
            "saved_bytes_per_sample": dice.randint(200, 2000),
        }
        for _ in range(dice.randint(3, 4))
    ]
    work = [dice.uniform(0.5, 3) for _ in layers]
    own = make_profile({"a": work, "b": [dice.uniform(1, 2) * x for x in work]}, (1, 2), layers=layers, optimizer=0.1)
    rates = {"a": dice.choice([600.0, 5e3, 5e4]), "b": dice.choice([None, 5e3])}
    hidden = dice.choice([None, 0.5, 1.0])
    own = own.model_copy(
        update={
            "overheads": tuple(
                DeviceOverhead(device_type=kind, host_bytes_per_second=rate, host_copy_overlap=hidden)
                for kind, rate in rates.items()
            )
        }
    )
    saved = sum(x["saved_bytes_per_sample"] for x in layers)
    memory = int(dice.uniform(0.35, 1.0) * saved + 3 * sum(x["parameter_bytes"] for x in layers))
    on = make_cluster(dice.choice([[{"a": 1, "b": 1}], [{"a": 1}, {"b": 1}], [{"a": 2}, {"b": 1}]]), memory=memory)
    lent = [int(dice.choice([0.5, 1.5, 10]) * saved) for _ in on.nodes]
    nodes = [node.model_copy(update={"host_memory": host}) for node, host in zip(on.nodes, lent, strict=True)]
    return make_problem(on.with_nodes(nodes), own, 4, allow_offload=True)


@pytest.mark.parametrize("seed", range(12))
def test_auto_finds_what_every_plan_says_is_best(seed: int) -> None:
    problem = drawn(seed)
    try:
        best = exhaustive.partitioner(problem)
    except PartitionError:
        with pytest.raises(PartitionError):
            auto.partitioner(problem)
        return
    found = auto.partitioner(problem)
    least = simulate(best.plan, problem.profile, problem.cluster).step_seconds  # refuses what hosts have no memory for
    assert simulate(found.plan, problem.profile, problem.cluster).step_seconds == pytest.approx(least, rel=1e-9)
    assert found.lower_bound_seconds is not None
    assert found.lower_bound_seconds <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 6, 7, 35])
def test_with_the_host_memory_that_is_named_there_is_a_plan(seed: int) -> None:
    """Hosts lend a part of what stages offload that may not recompute."""

    def lending(more: Mapping[str, int]) -> Problem:
        own = [(node, more.get(node.name, int(0.06 * (node.host_memory or 0)))) for node in problem.cluster.nodes]
        nodes = [node.model_copy(update={"host_memory": lent}) for node, lent in own]
        return replace(problem, cluster=problem.cluster.with_nodes(nodes))

    problem = replace(drawn(seed), allow_recompute=False)
    with pytest.raises(PartitionError, match="no plan that fits the memory of the cluster's hosts was found") as caught:
        exhaustive.partitioner(lending({}))
    with pytest.raises(PartitionError, match=re.escape(str(caught.value))):
        auto.partitioner(lending({}))
    named = {node: int(size) for node, size in re.findall(r"host_memory of node '(\w+)' to (\d+) bytes", str(caught.value))}
    assert named
    auto.partitioner(lending(named))


def test_draws_offload_and_recompute_and_keep() -> None:
    """The draws of the test above have all of them."""
    seen = set[tuple[bool, bool]]()
    for seed in range(12):
        try:
            plan = exhaustive.partitioner(drawn(seed)).plan
        except PartitionError:
            continue
        seen |= {(stage.recompute, stage.offload) for replica in plan.replicas for stage in replica.stages}
    assert seen == {(False, False), (True, False), (False, True)}


def test_a_kind_that_offloads_is_there_only_where_a_stage_could_need_it() -> None:
    problem = drawn(0)
    types = Types(problem)
    assert {kind.type for kind in types.kinds if kind.offload} <= {"a", "b"}
    ample = {name: kind.model_copy(update={"memory": 10**9}) for name, kind in problem.cluster.device_types.items()}
    easy = Types(replace(problem, cluster=problem.cluster.model_copy(update={"device_types": ample})))
    without = Types(replace(problem, allow_offload=False))
    assert easy.kinds == without.kinds == [kind for kind in types.kinds if not kind.offload]
    assert (easy.ways, without.ways) == (1, 1)
    assert EFFORTS["quick"].times(easy.ways) is EFFORTS["quick"]


def test_copies_are_within_what_searches_count() -> None:
    """Of layer by layer hidden copies a stage takes no more, and no less than what bounds count."""
    for seed in range(12):
        problem = drawn(seed)
        types = Types(problem)
        for v, kind in enumerate(types.kinds):
            if not kind.offload:
                continue
            most = types.times(v, 2).sum(axis=0)
            least = np.append(0.0, np.cumsum(types.layer_times(v, 2, 2).sum(axis=0)))
            for lo in range(types.L):
                for hi in range(lo + 1, types.L + 1):
                    taken = sum(types.costs.stage_seconds(kind.type, lo, hi, 2, offload=True))
                    assert least[hi] - least[lo] <= taken * (1 + 1e-9)
                    assert taken <= (most[hi] - most[lo]) * (1 + 1e-9)
