"""`even-pipelines`: the replicas that it tries, and what it finds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.even import Even
from hetpipe.partitioners.even_data_parallel import EvenDataParallel
from hetpipe.partitioners.even_pipelines import EvenPipelines
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.predict.simulator import simulate
from tests.support.plans import checked
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems


def found(problem: Problem) -> list[Candidate]:
    """What the rule yields; nothing where it refuses."""
    try:
        return list(EvenPipelines().candidates(Desk(problem)))
    except (PartitionError, InputError):  # no micro-batch size that all types have, or no link
        return []


@settings(max_examples=60, **UNHURRIED)
@given(problem=problems(most_devices=6, most_layers=6, most_batch=20))
def test_replicas_are_equal_and_each_plan_is_faster_than_those_before_it(problem: Problem) -> None:
    """Of each type a replica has as many devices as one of R equal replicas can have, half of them, or none."""
    desk, before, there = Desk(problem), float("inf"), Counter(device.type for device in problem.cluster.devices)
    for candidate in found(problem):
        if desk.missing(candidate):
            assert len(candidate.draft.rows) == 1, "nothing fits: one pipeline says what is missing"
            continue
        plan = candidate.draft.plan(problem)
        step = checked(problem, plan).step_seconds
        assert step < before
        before = step
        samples = [sum(replica.microbatch_sizes) for replica in plan.replicas]
        assert max(samples) - min(samples) <= 1
        kinds = {
            tuple((problem.cluster.device(stage.device).type, stage.layers, stage.recompute) for stage in replica.stages)
            for replica in plan.replicas
        }
        assert len(kinds) == 1
        used = Counter(kind for kind, _, _ in kinds.pop())
        parts = ({kind: count // R for kind, count in there.items()} for R in range(1, max(there.values()) + 1))
        assert any(all(used[kind] in (0, part // 2, part) for kind, part in each.items()) for each in parts)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 12])
def test_every_number_of_replicas_is_tried(stages: int) -> None:
    """Twelve devices, on each of which memory holds a part of twelve layers; over free links the shortest pipelines are best."""
    layers = make_profile({"a": [1.0] * 12}, layer={"parameter_bytes": 1000})
    state = 4 * 1000  # of a layer: parameters, gradients, and twice that of the optimizer
    problem = make_problem(make_cluster([{"a": 12}], memory=12 // stages * state), layers, 120)
    assert [len(replica.stages) for replica in EvenPipelines()(problem).plan.replicas] == [stages] * (12 // stages)


@pytest.mark.parametrize("fixed", [0.0, 0.5])
@pytest.mark.parametrize("layers", [3, 8, 11])
def test_no_slower_than_equal_stages_or_data_parallelism_on_devices_of_one_type(layers: int, fixed: float) -> None:
    times = [0.1 * (1 + i % 3) for i in range(layers)]
    layer = {"parameter_bytes": 10**6, "output_bytes_per_sample": 10**4}
    profile = make_profile({"a": times}, sizes=(1, 2, 4), layer=layer, fixed=fixed)
    problem = make_problem(make_cluster([{"a": 4}, {"a": 4}]), profile, 50)
    plans = [rule(problem).plan for rule in (EvenPipelines(), Even(), EvenDataParallel())]
    own, *others = (simulate(plan, problem.profile, problem.cluster).step_seconds for plan in plans)
    assert own <= min(others) * (1 + 1e-9)


def test_slow_devices_stay_out_and_slow_links_make_few_pipelines_or_owners_that_are_neighbours() -> None:
    """Sixteen fast devices beside sixteen that take a hundred times as long; gradients that cost more to sum than all else."""
    profile = make_profile({"fast": [0.1] * 16, "slow": [10.0] * 16}, sizes=(1, 2), layer={"parameter_bytes": 10**9})
    slow_link, fast_link = {"bandwidth": 1e9, "latency": 0.0}, {"bandwidth": 1e12, "latency": 0.0}

    def plan(per_node: int, link: dict[str, float]) -> Plan:
        nodes = [{"fast": per_node}] * (16 // per_node) + [{"slow": per_node}] * (16 // per_node)
        problem = make_problem(make_cluster(nodes, link=link, inside=fast_link), profile, 32)
        found = EvenPipelines()(problem).plan
        assert {problem.cluster.device(device).type for device in found.device_ids} == {"fast"}
        return found

    assert [len(replica.stages) for replica in plan(1, slow_link).replicas] == [16]
    assert len(plan(1, fast_link).replicas) > 1
    beside = plan(4, slow_link)
    assert len(beside.replicas) == 4
    for stages in zip(*(replica.stages for replica in beside.replicas), strict=True):
        assert len({stage.device.split("/")[0] for stage in stages}) == 1
