"""The rules of Zorse and Cephalo, and the cut of a graph that Zorse's rests on."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.partitioners.cephalo import Cephalo, least_maximum
from hetpipe.partitioners.rules.min_cut import min_cut, splits
from hetpipe.partitioners.zorse import Zorse
from hetpipe.planning.partition import PartitionError
from tests.support.plans import cuts
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile


def brute_cut(weights: np.ndarray, parts: int) -> float:
    """The least weight between so many parts that are not empty, by trying all."""
    n = len(weights)
    best = np.inf
    for where in product(range(parts), repeat=n):
        if len(set(where)) == parts:
            best = min(best, sum(weights[i, j] for i, j in combinations(range(n), 2) if where[i] != where[j]))
    return float(best)


def cut_weight(weights: np.ndarray, parts: list[list[int]]) -> float:
    where = {x: k for k, part in enumerate(parts) for x in part}
    return float(sum(weights[i, j] for i, j in combinations(range(len(weights)), 2) if where[i] != where[j]))


@st.composite
def graphs(draw: st.DrawFn) -> np.ndarray:
    n = draw(st.integers(2, 6))
    upper = np.triu(np.array(draw(st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n))), 1)
    weights: np.ndarray = (upper + upper.T).astype(float)
    return weights


class TestMinCut:
    @settings(**UNHURRIED)
    @given(graphs())
    def test_it_is_the_least(self, weights: np.ndarray) -> None:
        value, side = min_cut(weights)
        assert 0 < len(side) < len(weights)
        assert value == brute_cut(weights, 2)
        assert value == cut_weight(weights, [side, [x for x in range(len(weights)) if x not in side]])

    @settings(max_examples=50, **UNHURRIED)
    @given(graphs())
    def test_splits_are_parts_within_their_promise(self, weights: np.ndarray) -> None:
        found = splits(weights)
        assert [len(parts) for parts in found] == list(range(1, len(weights) + 1))
        for k, parts in enumerate(found[:4], 1):
            assert sorted(x for part in parts for x in part) == list(range(len(weights)))
            assert cut_weight(weights, parts) <= (2 - 2 / k if k > 1 else 0) * brute_cut(weights, k) + 1e-9


class TestCephalo:
    @settings(**UNHURRIED)
    @given(st.data())
    def test_shares_have_the_least_maximum(self, data: st.DataObject) -> None:
        kinds, total = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
        counts = [data.draw(st.integers(1, 2)) for _ in range(kinds)]
        steps = st.lists(st.sampled_from([0.0, 1.0, 2.0, np.inf]), min_size=total, max_size=total)
        times = np.array([np.cumsum([0.0, *data.draw(steps)]) for _ in range(kinds)])
        devices = [k for k, count in enumerate(counts) for _ in range(count)]
        deals = [deal for deal in product(range(total + 1), repeat=len(devices)) if sum(deal) == total]
        best = min(max(times[k, share] for k, share in zip(devices, deal, strict=True)) for deal in deals)
        found = least_maximum(times, np.array(counts), total)
        if found is None:
            assert best == np.inf
            return
        assert max(times[k, share] for k, share, _ in found.tolist()) == best
        assert sum(share * count for _, share, count in found.tolist()) == total
        for k, count in enumerate(counts):
            assert sum(own for kind, _, own in found.tolist() if kind == k) <= count

    def test_shares_and_sizes_are_a_devices_own(self) -> None:
        """Half of a micro-batch's time is fixed, so as large ones as fit: 4 on a (7.5 s), 2 on b (2.7 s)."""
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 450, "b": 250})
        profile = make_profile({"a": [1.0], "b": [0.6]}, sizes=(1, 2, 4), fixed=0.5, layer={"saved_bytes_per_sample": 100})
        plan = Cephalo()(make_problem(cluster, profile, 14, allow_recompute=False)).plan
        assert [r.microbatch_sizes for r in plan.replicas] == [(4, 2), (2, 2, 2, 2)]  # 12 s and 10.8 s

    def test_a_device_without_room_has_no_share(self) -> None:
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 1_000, "b": 100})
        problem = make_problem(cluster, make_profile({"a": [1.0], "b": [1.0]}, layer={"parameter_bytes": 100}), 4)
        assert Cephalo()(problem).plan.device_ids == ("n0/0",)


class TestZorse:
    def test_groups_follow_links_and_layers_follow_groups(self) -> None:
        """Two boxes on a slow wire, the second three times as fast and with no room for the whole model: a stage each, of two
        replicas; the layers 1 : 3 and the quick box first, as its devices sum faster."""
        cluster = make_cluster([{"a": 2}, {"b": 2}], memory=2_800, link={"bandwidth": 1e3}, inside={"bandwidth": 1e6})
        profile = make_profile({"a": [3.0] * 8, "b": [1.0] * 8}, layer={"parameter_bytes": 100, "output_bytes_per_sample": 1})
        plan = Zorse()(make_problem(cluster, profile, 8)).plan
        assert len(plan.replicas) == 2
        assert {tuple(b - a for a, b in cuts(plan, r)) for r in range(2)} == {(2, 6)}
        assert {stage.device.split("/")[0] for r in plan.replicas for stage in r.stages[:1]} == {"n0"}

    def test_micro_batches_follow_the_slowest_stage_of_a_replica(self) -> None:
        """One box of a quick and a slow device, whole models: 3 : 1."""
        cluster = make_cluster([{"a": 1, "b": 1}])
        plan = Zorse()(make_problem(cluster, make_profile({"a": [1.0] * 2, "b": [3.0] * 2}), 8)).plan
        assert sorted(r.samples for r in plan.replicas) == [2, 6]

    def test_one_team_where_memory_is_short(self) -> None:
        """A box whose devices hold half of the model each is one replica of two stages."""
        cluster = make_cluster([{"a": 2}], memory=2_000)
        plan = Zorse()(make_problem(cluster, make_profile({"a": [1.0] * 8}, layer={"parameter_bytes": 100}), 4)).plan
        assert [cuts(plan, r) for r in range(len(plan.replicas))] == [[(0, 4), (4, 8)]]

    def test_many_nodes_are_refused(self) -> None:
        problem = make_problem(make_cluster([{"a": 1}] * 33), make_profile({"a": [1.0]}), 33)
        with pytest.raises(PartitionError, match="zorse: the links of more than 32 nodes"):
            Zorse()(problem)
