"""Seats: who holds which shard, and owns which gradients, in prediction, at run time and in the norm; and the peers of each."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.seats import Owners, Seat
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.shards.layout import Cut
from hetpipe.predict.cost import Costs
from hetpipe.predict.sums import sync_segments
from hetpipe.runtime.gradients import square_norm
from hetpipe.runtime.replicas import WHOLE, Sharing, local_groups, plan_groups
from tests.support.strategies import make_cluster, make_profile

Stages = list[tuple[int, int]]  # of a replica: (layers, degree) of each stage
TIES = {"b": (0, 2), "a": (1, 3)}


def plan_of(*replicas: Stages) -> Plan:
    """Replica r's devices are those of node r, in order."""
    rows = []
    for r, stages in enumerate(replicas):
        at, device, row = 0, 0, []
        for count, degree in stages:
            row.append({"layers": [at, at + count], "devices": [f"n{r}/{device + i}" for i in range(degree)]})
            at, device = at + count, device + degree
        rows.append({"microbatch_sizes": [1], "stages": row})
    return Plan.parse({"format": "hetpipe.plan/1", "model": "test", "global_batch": len(rows), "replicas": rows}, "a plan")


def ranks_of(plan: Plan) -> dict[str, int]:
    return {device: rank for rank, device in enumerate(plan.device_ids)}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One to three replicas over four layers, of stages on one to four devices."""
    replicas = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = [0, *sorted(draw(st.lists(st.integers(1, 3), unique=True, max_size=3))), 4]
        replicas.append([(b - a, draw(st.integers(1, 4))) for a, b in pairwise(cuts)])
    return plan_of(*replicas)


def costs(*, tied: bool) -> Costs:
    """Four layers, which are one bucket, on devices that were measured at degrees 1 to 4."""
    layers: list[dict[str, Any]] = [{"parameter_bytes": 2400} for _ in range(4)]
    for name, members in TIES.items() if tied else ():
        for i in members:
            layers[i] |= {"tied": name, "tied_parameter_bytes": 240}
    document = make_profile({"a": [1.0] * 4}, layers=layers).model_dump()
    one = document["measurements"][0]
    more = [
        one | {"tensor_parallel": t, "parameter_bytes": [2400 // t] * 4, "saved_bytes_per_sample": [0] * 4} for t in (2, 3, 4)
    ]
    return Costs(Profile.parse(document | {"measurements": [one, *more]}, "a profile"), make_cluster([{"a": 16}] * 3))


def test_each_device_of_a_stage_has_a_seat() -> None:
    plan = plan_of([(1, 2), (3, 1)], [(4, 1)])
    assert plan.seats() == (
        Seat(0, 0, 0, 2, "n0/0"),
        Seat(0, 0, 1, 2, "n0/1"),
        Seat(0, 1, 0, 1, "n0/2"),
        Seat(1, 0, 0, 1, "n1/0"),
    )
    assert plan.seats()[1].place == "replica 0 stage 0"
    assert set(plan.process_of) == {seat.device for seat in plan.seats()}


def test_a_seat_of_two_devices_beside_one_of_one() -> None:
    """
    replica 0   n0/0 and n0/1  | n0/2
    replica 1   n1/0
    """
    plan = plan_of([(2, 2), (2, 1)], [(4, 1)])
    assert plan.owners() == [
        Owners(2, 4, ((0, 1), (1, 0)), (("n0/2", "n1/0"),)),
        Owners(0, 2, ((0, 0), (1, 0)), (("n0/0", "n1/0"), ("n0/1", "n1/0"))),
    ]
    assert plan_groups(plan, ranks_of(plan), {"w": (0, 3)}) == [
        ("layers 2:4", (2, 3)),
        ("layers 0:2, piece 1 of 2", (0, 3)),
        ("layers 0:2, piece 2 of 2", (1, 3)),
        ("layers 0:2, what is not split", (0, 3, 1)),
        ("tied w, piece 1 of 2", (0, 2, 3)),
        ("tied w, piece 2 of 2", (1, 2, 3)),
        ("tied w, what is not split", (0, 2, 3, 1)),
    ]


def test_degree_three_against_two() -> None:
    #   n0:  0 0 1 1 2 2      of 3
    #   n1:  0 0 0 1 1 1      of 2
    (owners,) = plan_of([(4, 3)], [(4, 2)]).owners()
    assert [a[-1] + b[-1] for a, b in owners.pieces] == ["00", "00", "10", "11", "21", "21"]
    assert sorted(owners.everyone) == ["n0/0", "n0/1", "n0/2", "n1/0", "n1/1"]


@pytest.mark.parametrize("tied", [False, True])
@given(plan=plans())
def test_what_is_predicted_to_be_summed_is_what_the_runtime_sums(plan: Plan, tied: bool) -> None:
    """Piece by piece, in one order, by the same devices; a group of one owner has no sum. (What is not split is predicted with
    the pieces.)"""
    rank_of, predicted = ranks_of(plan), list[tuple[str, list[int], float]]()
    for x in sync_segments(plan, costs(tied=tied)):
        name = f"tied {x.tied}" if x.tied else f"layers {x.lo}:{x.hi}"
        predicted.append((name, sorted(rank_of[d] for d in x.owners), x.size_bytes))
    groups = [group for group in plan_groups(plan, rank_of, TIES if tied else {}) if not group[0].endswith(WHOLE)]
    assert [(name, ranks) for name, ranks, _ in predicted] == [
        (name.split(",")[0], sorted(ranks)) for name, ranks in groups if len(set(ranks)) > 1
    ]
    assert len({name for name, _ in groups}) == len(groups)
    if len(plan.replicas) > 1:
        least = 4 * 2400 - (4 * 240 if tied else 0) + (2 * 240 if tied else 0)
        assert sum(size for _, _, size in predicted) == pytest.approx(least)


@given(plans())
def test_each_seat_has_its_pieces_of_each_layer_of_its_stage(plan: Plan) -> None:
    """The local groups of a rank are groups of the plan in which it is, in their order. Of a weight that is split they have all
    pieces of its shard; a bias, and what layers share, is in one, and one device of each stage counts it."""
    rank_of, net = ranks_of(plan), nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    net[2].weight = net[0].weight
    ties = {"0.weight": (0, 2)}
    everywhere = plan_groups(plan, rank_of, ties)
    counting = dict[tuple[str, int, int], int]()
    for seat in plan.seats():
        lo, hi = plan.replicas[seat.replica].stages[seat.stage].layers
        part, rank = make_stage(net, lo, hi), rank_of[seat.device]
        cuts = {p: Cut(0) for name, p in part.named_parameters() if name.endswith("weight") and p is not net[0].weight}
        tied_names = {p: "0.weight" for p in part.parameters() if p is net[0].weight}
        found = local_groups(part, lo, hi, everywhere, plan, ties, tied_names, Sharing(seat.shard, seat.degree, cuts))
        places = [everywhere.index((group.name, group.ranks)) for group in found]
        assert places == sorted(places)
        assert all(rank in group.ranks for group in found)
        assert all(group.lead(seat.replica) in group.ranks for group in found if not group.tied)
        for name, parameter in part.named_parameters():
            own = [group for group in found if parameter in set(group.parameters)]
            whole = [group.name for group in own if group.piece == (0, 1)]
            assert [group.piece for group in own] == [(at, len(own)) for at in range(len(own))]
            if parameter in cuts:
                pieces = next(len(o.pieces) for o in plan.owners() if o.lo <= int(name[0]) < o.hi)
                assert len(own) == (pieces // seat.degree)
                assert not any(parameter in group.silent for group in own)
            else:
                assert len(whole) == 1
                key = name, seat.replica, seat.stage
                counting[key] = counting.get(key, 0) + (parameter not in own[0].silent)
    assert set(counting.values()) == {1}


@given(plans(), st.data())
def test_the_norm_counts_a_split_parameter_shard_by_shard_and_a_replicated_one_once(plan: Plan, data: st.DataObject) -> None:
    """Of each layer a weight that is split, and a bias that every shard has: over all ranks the square is that of the whole."""
    rank_of = ranks_of(plan)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    weights, biases = (torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (12**3, 3))
    found = 0.0
    for rank in rank_of.values():
        held = list[tuple[tuple[int, ...], list[Tensor]]]()
        for owners in plan.owners():
            layers = slice(owners.lo, owners.hi)
            for piece, part in zip(owners.pieces, weights[layers].tensor_split(len(owners.pieces), dim=1), strict=True):
                if rank in (ranks := tuple(rank_of[d] for d in piece)):
                    held.append((ranks, [part]))
            if rank in (ranks := tuple(rank_of[d] for d in owners.everyone)):
                held.append((ranks, [biases[layers]]))
        found += square_norm(held, rank)
    assert found == pytest.approx(float(weights.square().sum() + biases.square().sum()), rel=1e-12)


@given(plans())
def test_what_one_seat_sends_is_what_another_expects(plan: Plan) -> None:
    """The peers of both ends of a boundary name each other, as often; a message goes whole from one device to one."""
    sent, expected = list[tuple[str, str]](), list[tuple[str, str]]()
    for seat in plan.seats():
        before, after = plan.peers(seat)
        sent += [(seat.device, peer) for peer in after]
        expected += [(peer, seat.device) for peer in before]
        stages = plan.replicas[seat.replica].stages
        beside = [len(stages[s].devices) if 0 <= s < len(stages) else 0 for s in (seat.stage - 1, seat.stage + 1)]
        assert [len(before), len(after)] == [math.lcm(seat.degree, n) // seat.degree for n in beside]
    assert sorted(sent) == sorted(expected)
