"""Owner groups and gradient sums of unlike replicas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bench.reference import ReferenceEngine
from hetpipe.documents.plan import Plan
from hetpipe.layers.model import Loss, as_tuple, mse
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.split import tied_layers
from hetpipe.runtime.replicas import PlanGroups, local_groups, plan_groups
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.replica_programs import refusals, twenty_steps


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One to four replicas of one to five stages over up to nine layers."""
    layers = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        inner = draw(st.lists(st.integers(1, layers - 1), unique=True, max_size=4)) if layers > 1 else []
        cuts = [0, *sorted(inner), layers]
        rows.append({"cuts": [b - a for a, b in pairwise(cuts)], "sizes": [1]})
    return make_plan(rows)


def ranks_of(plan: Plan, order: list[str]) -> dict[str, int]:
    return {device: rank for rank, device in enumerate(order)}


def test_segments_of_two_unlike_replicas() -> None:
    #            layer 0 1 2 3 4 5 6 7 8 9
    # ranks of A       0 0 0 0 1 1 1 2 2 2
    # ranks of B       3 3 3 3 3 3 4 4 4 4
    plan = make_plan([{"cuts": [4, 3, 3], "sizes": [4]}, {"cuts": [6, 4], "sizes": [4]}])
    groups = plan_groups(plan, ranks_of(plan, ["n0/0", "n0/1", "n0/2", "n1/0", "n1/1"]), {"0.weight": (0, 9)})
    assert groups == [
        ("layers 7:10", (2, 4)),
        ("layers 6:7", (1, 4)),
        ("layers 4:6", (1, 3)),
        ("layers 0:4", (0, 3)),
        ("tied 0.weight", (0, 2, 3, 4)),
    ]


def test_every_rank_connects_its_groups_in_the_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order on one of two ranks that share two groups, and each would wait for the other."""
    sent: list[tuple[Any, torch.device]] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: sent.append((group, tensor.device)))
    owners: dict[tuple[int, ...], Any] = {(2, 4): "a", (1, 4): "b", (0, 2, 3, 4): "c"}
    groups = PlanGroups(pipelines=(), owners=owners)
    for rank, wanted in enumerate(["c", "b", "ac", "c", "abc"]):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sent.clear()
        groups.warm_up(torch.device("meta"))
        assert sent == [(group, torch.device("meta")) for group in wanted]


@given(plans())
def test_segments_cover_the_layers_once_and_are_few(plan: Plan) -> None:
    segments = [(x.lo, x.hi, x.pieces[0]) for x in reversed(plan.owners())]
    assert [lo for lo, _, _ in segments] == [0, *(hi for _, hi, _ in segments[:-1])]
    assert segments[-1][1] == plan.layer_count
    assert len(segments) <= 1 + sum(len(replica.stages) - 1 for replica in plan.replicas)
    assert all(a[2] != b[2] for a, b in pairwise(segments)), "neighbours with the same owners are one segment"
    for lo, hi, owners in segments:
        for replica, owner in zip(plan.replicas, owners, strict=True):
            assert [s.device for s in replica.stages if s.layers[0] <= lo and hi <= s.layers[1]] == [owner]


@given(plans(), st.data())
def test_every_rank_sums_in_the_order_of_one_list(plan: Plan, data: st.DataObject) -> None:
    """An order that all ranks follow cannot close a circle, whatever groups overlap; and every parameter is in one group."""
    rank_of = ranks_of(plan, data.draw(st.permutations(plan.device_ids)))
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(plan.layer_count)])
    for _ in range(data.draw(st.integers(0, 2))):
        a, b = (data.draw(st.integers(0, plan.layer_count - 1)) for _ in range(2))
        net[b].weight = net[a].weight
    ties = tied_layers(net)
    everywhere = plan_groups(plan, rank_of, ties)
    assert everywhere == plan_groups(plan, dict(sorted(rank_of.items(), reverse=True)), ties)
    place = {name: position for position, (name, _) in enumerate(everywhere)}
    named = dict(net.named_parameters(remove_duplicate=False))
    counted = dict.fromkeys(net.parameters(), 0)
    for replica in plan.replicas:
        for stage in replica.stages:
            lo, hi = stage.layers
            part = make_stage(net, lo, hi)
            mine = set(part.parameters())
            tied_names = {named[name]: name for name in ties if named[name] in mine}
            groups = local_groups(part, lo, hi, everywhere, plan, ties, tied_names)
            assert [place[g.name] for g in groups] == sorted(place[g.name] for g in groups)
            assert all(rank_of[stage.device] in g.ranks and g.ranks == dict(everywhere)[g.name] for g in groups)
            inside = [p for g in groups for p in g.parameters]
            assert len(inside) == len(mine) == len(set(inside))
            for group in groups:
                for parameter in group.parameters:
                    counted[parameter] += min(group.ranks) == rank_of[stage.device]
    assert set(counted.values()) == {1}, "the norm counts each parameter once"


@pytest.fixture(scope="module")
def twenty() -> list[dict[str, Any]]:
    plan = make_plan([{"cuts": [4, 3, 3], "sizes": [4] * 6}, {"cuts": [6, 4], "sizes": [4, 4]}, {"cuts": [10], "sizes": [3, 2]}])
    return run_ranks(twenty_steps, cluster_of(3, 2, 1), plan)


def test_replicas_stay_equal_bit_for_bit(twenty: list[dict[str, Any]]) -> None:
    whole: dict[str, torch.Tensor] = twenty[5]["state"]
    assert all(value.dtype == torch.float32 for value in whole.values())
    held = dict.fromkeys(whole, 0)
    for result in twenty:
        for name, value in result["state"].items():
            assert torch.equal(value, whole[name]), name
            held[name] += 1
    assert held.pop("0.weight") == held.pop("9.weight") == 3
    assert set(held.values()) == {3}
    assert all(result["norms"] == twenty[0]["norms"] for result in twenty)
    assert min(twenty[0]["norms"]) > 0.1, "clipping at 0.05 did not bite"


def test_a_replica_that_was_changed_is_named(twenty: list[dict[str, Any]]) -> None:
    # owners of layer 5: rank 1 (replica 0 stage 1), rank 3 (replica 1 stage 0), rank 5; all others hear it, too
    told = {result["message"] for result in twenty}
    assert len(told) == 1
    assert str(told.pop()).startswith("the replicas of layers 4:6 (ranks [1, 3, 5]) hold different parameters")


@pytest.fixture(scope="module")
def refused() -> list[dict[str, Any]]:
    plan = make_plan([{"cuts": [4, 3, 3], "sizes": [4, 4]}, {"cuts": [6, 4], "sizes": [4]}])
    return run_ranks(refusals, cluster_of(3, 2), plan)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another plan on rank 2", "the ranks hold different plans: fingerprints {0: "),
        ("a device that is not there", "the plan uses ['n0/3'], but this job has only the devices ['n0/0', 'n0/1', 'n0/2', "),
        ("a model of nine layers", "its stages cover layers [0, 10), but the model has 9 layers"),
        ("unequal ends", "replica 0: its first stage was given 7 samples of inputs, its last stage 8 of targets"),
        ("too many samples", "replica 0 was given 9 samples, but the plan gives it at most 8"),
        ("other shapes", "replica 0: layer '0' (Block) does not run on the inputs: (4, 7) of float64"),
        ("more dimensions", "replica 0: a sample of its inputs has the shapes (1, 8), of the sample batch (8,); from step"),
        ("a larger sample", "replica 1: a sample of its inputs has the shapes (9,), of the sample batch (8,), by which"),
        ("unequal ends of an evaluation", "replica 1: its first stage was given 4 samples of inputs, its last stage 3"),
        ("too many samples for a whole replica", "replica 3 was given 4 samples, but the plan gives it at most 3; its memory"),
        ("unequal ends of a whole replica", "replica 1: its first stage was given 3 samples of inputs, its last stage 2"),
    ],
)
def test_every_rank_refuses_wrong_input(refused: list[dict[str, Any]], what: str, message: str) -> None:
    told = {result.get(what) for result in refused}
    assert len(told) == 1, "the ranks were told different things"
    assert message in str(told.pop())


def test_after_a_refusal_training_goes_on(refused: list[dict[str, Any]]) -> None:
    assert len({result["loss"] for result in refused}) == 1
    assert refused[0]["loss"] > 0


def test_whole_replicas_say_what_they_were_given_with_the_loss(refused: list[dict[str, Any]]) -> None:
    engine = ReferenceEngine(build("blocks"), Loss(function=mse))
    inputs, targets = (as_tuple(t)[0] for t in batch("blocks", 40, 0))
    losses = [engine.step(inputs[:15], targets[:15]), engine.step(inputs[:13], targets[:13])]
    norm = engine.clip_grad_norm_(1e9)
    for result in refused:
        assert result["gradient after a refusal"] is None
        assert result["sums"] == 3  # of the gradients, of what the targets weigh, and of all else
        assert [result["loss of whole replicas"], result["loss of a partial batch"]] == pytest.approx(losses, abs=1e-12)
        assert result["norm of a partial batch"] == pytest.approx(norm, abs=1e-12)
