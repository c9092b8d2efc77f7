from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.equal_parameters import EqualParameters, balanced
from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.partitioners.fasop import Fasop, greedy, placements
from hetpipe.partitioners.memory_layers import MemoryLayers
from hetpipe.partitioners.rules.grids import in_proportion, layouts
from hetpipe.partitioners.torchgpipe_balance import TorchgpipeBalance, block_partition
from hetpipe.partitioners.type_blind import TypeBlind
from hetpipe.partitioners.uneven_data_parallel import UnevenDataParallel, limited_shares
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Partitioner, PartitionError, Problem
from hetpipe.planning.registry import partitioner, partitioner_names, rules
from hetpipe.predict.simulator import simulate
from tests.support.plans import checked, cuts
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems

costs_lists = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def sizes(ends: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(ends)]


def step(problem: Problem, plan: Plan) -> float:
    return simulate(plan, problem.profile, problem.cluster).step_seconds


class TestEveryBaseline:
    @pytest.mark.parametrize("baseline", rules(), ids=lambda b: str(b.name))
    @settings(max_examples=12, **UNHURRIED)
    @given(problem=problems(most_devices=4, most_layers=6))
    def test_plans_are_valid_fit_and_obey_the_bound(self, baseline: Partitioner, problem: Problem) -> None:
        plan: Plan | None
        try:
            plan, message = baseline(problem).plan, ""
        except PartitionError as error:
            plan, message = None, str(error)
        if plan is None:
            assert baseline.name in message or "micro-batch size" in message
            return
        assert fluid_bound(problem) <= checked(problem, plan).step_seconds * (1 + 1e-12)
        if problem.schedule == "gpipe" or problem.backend != "torch":
            assert plan.schedule == "gpipe"
        if problem.backend != "torch":
            nodes = [{s.device.split("/")[0] for s in replica.stages} for replica in plan.replicas]
            assert all(len(found) == 1 for found in nodes)
        assert problem.allow_recompute or not any(s.recompute for r in plan.replicas for s in r.stages)

    @pytest.mark.parametrize("baseline", rules(), ids=lambda b: str(b.name))
    def test_is_found_by_name_and_refuses_prices(self, baseline: Partitioner) -> None:
        assert baseline.name in partitioner_names()
        assert partitioner(baseline.name) == baseline
        problem = make_problem(make_cluster([{"a": 1}]), make_profile({"a": [1.0]}), 2, max_price_per_hour=1.0)
        with pytest.raises(InputError, match=f"'{baseline.name}'.*cannot honour --max-price-per-hour"):
            baseline(problem)

    @pytest.mark.parametrize("baseline", rules(), ids=lambda b: str(b.name))
    def test_says_what_does_not_fit(self, baseline: Partitioner) -> None:
        """One layer of 100 parameter bytes needs 400 (gradient, AdamW): 100 more than b has."""
        profile = make_profile({"a": [1.0] * 2, "b": [1.0] * 2}, layers=[{"parameter_bytes": 75}, {"parameter_bytes": 100}])
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 300, "b": 300})
        with pytest.raises(PartitionError, match=r"layer.*'layer.1'.*type '[ab]', which has 300 bytes: \d+ bytes"):
            baseline(make_problem(cluster, profile, 4))


class TestEqualParameters:
    def test_equal_weights_give_equal_counts(self) -> None:
        assert sizes(balanced([1.0] * 9, 3)) == [3, 3, 3]
        assert sizes(balanced([0.0] * 6, 3)) == [2, 2, 2]

    @given(costs_lists, st.integers(1, 4))
    def test_largest_block_is_least(self, weights: list[int], n: int) -> None:
        if n > len(weights):
            with pytest.raises(ValueError, match=f"{n} blocks of {len(weights)} elements"):
                balanced(weights, n)
            return
        found = balanced(weights, n)
        every = [[0, *inner, len(weights)] for inner in combinations(range(1, len(weights)), n - 1)]
        assert found in every
        least = min(max(sum(weights[a:b]) for a, b in pairwise(ends)) for ends in every)
        assert max(sum(weights[a:b]) for a, b in pairwise(found)) == least

    def test_speed_is_ignored(self) -> None:
        layers = [{"parameter_bytes": size} for size in (600, 100, 100, 100, 300)]
        profile = make_profile({"a": [1.0] * 5, "b": [9.0] * 5}, layers=layers)
        plan = EqualParameters()(make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 4)).plan
        assert cuts(plan) == [(0, 1), (1, 5)]

    def test_what_does_not_train_weighs_nothing(self) -> None:
        layers: list[dict[str, Any]] = [{"parameter_bytes": size} for size in (600, 100, 100, 100, 300)]
        layers[0] |= {"trained_bytes": 10}
        profile = make_profile({"a": [1.0] * 5, "b": [9.0] * 5}, layers=layers)
        plan = EqualParameters()(make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 4)).plan
        assert cuts(plan) == [(0, 4), (4, 5)]


class TestTorchgpipeBalance:
    def test_known_results(self) -> None:
        """What torchgpipe 0.0.7 returns for these, and how far it is from the least possible."""
        assert sizes(block_partition([50] * 10 + [51] * 10, 2)) == [15, 5]  # 755, possible 510
        assert sizes(block_partition([100] * 12 + [104] * 12, 4)) == [15, 3, 3, 3]  # 1512, possible 624
        assert sizes(block_partition([0] * 26, 4)) == [6, 6, 6, 8]  # equal layers: where it starts
        assert sizes(block_partition([1, 2, 3, 4, 5, 6], 2)) == [4, 2]

    @given(costs_lists, st.integers(1, 5))
    def test_promise(self, costs: list[int], k: int) -> None:
        """On the normalised elements the largest block is at most 1 above the smallest."""
        if k > len(costs):
            with pytest.raises(ValueError, match=f"{k} blocks of {len(costs)} elements"):
                block_partition(costs, k)
            return
        ends = block_partition(costs, k)
        assert ends[0] == 0
        assert ends[-1] == len(costs)
        assert len(ends) == k + 1
        assert all(a <= b for a, b in pairwise(ends))
        low, span = min(costs), max(costs) - min(costs)
        normal = [(c - low) / span if span else 0.0 for c in costs]
        sums = [sum(normal[a:b]) for a, b in pairwise(ends)]
        assert max(sums) <= min(sums) + 1 + 1e-9

    def test_one_device_is_timed_and_gpipe_runs(self) -> None:
        """Timed on a, where the first layer is slow; b, where the last is, does not matter."""
        profile = make_profile({"a": [3.0, 1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0, 9.0]})
        plan = TorchgpipeBalance()(make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 4)).plan
        assert cuts(plan) == [(0, 2), (2, 4)]
        assert plan.schedule == "gpipe"


class TestGrids:
    def test_both_orders(self) -> None:
        """
        tp-dp-pp   stage 0  1      tp-pp-dp   stage 0  1
        replica 0        a  c      replica 0        a  b
        replica 1        b  d      replica 1        c  d
        """
        assert [["".join("abcd"[d] for d in row) for row in layout.rows().tolist()] for layout in layouts(4, 9)] == [
            ["abcd"],
            ["ac", "bd"],
            ["ab", "cd"],
            ["a", "b", "c", "d"],
        ]

    def test_from_any_device_on(self) -> None:
        """From c: c d a b."""
        assert [layout.rows(2).tolist() for layout in layouts(4, 9)][1:3] == [[[2, 0], [3, 1]], [[2, 3], [0, 1]]]

    def test_no_more_stages_than_layers(self) -> None:
        assert {layout.n for layout in layouts(4, 2)} == {1, 2}

    def test_no_grid_suits(self) -> None:
        """Three devices, two layers, two samples: three stages need three layers, three replicas three samples."""
        problem = make_problem(make_cluster([{"a": 3}]), make_profile({"a": [1.0] * 2}), 2)
        for baseline in (TypeBlind(), MemoryLayers(), Fasop()):
            with pytest.raises(PartitionError, match="3 devices.*2 layers, a global batch of 2"):
                baseline(problem)


class TestTypeBlind:
    def test_equal_stages_and_shares(self) -> None:
        """Memory for half of the layers on each device: two replicas of two equal stages."""
        cluster = make_cluster([{"a": 2}, {"b": 2}], memory=900)
        profile = make_profile({"a": [1.0] * 4, "b": [5.0] * 4}, layer={"parameter_bytes": 100})
        plan = TypeBlind()(make_problem(cluster, profile, 8)).plan
        assert [r.samples for r in plan.replicas] == [4, 4]
        assert cuts(plan, 0) == cuts(plan, 1) == [(0, 2), (2, 4)]

    def test_best_grid_wins(self) -> None:
        """Free links, equal devices, much memory: replicas alone have no bubble."""
        profile = make_profile({"a": [1.0] * 4})
        plan = TypeBlind()(make_problem(make_cluster([{"a": 4}]), profile, 8)).plan
        assert [len(r.stages) for r in plan.replicas] == [1] * 4


class TestInProportion:
    @given(st.lists(st.integers(1, 80), min_size=1, max_size=6), st.integers(1, 40))
    def test_quotas(self, weights: list[int], total: int) -> None:
        counts = in_proportion(weights, total)
        assert sum(counts) == total
        quotas = [total * weight / sum(weights) for weight in weights]
        assert all(q - 1 < count < q + 2 for count, q in zip(counts, quotas, strict=True))

    def test_the_rest(self) -> None:
        assert in_proportion([1.0, 1.0, 1.0], 5) == [2, 2, 1]
        assert in_proportion([1.0, 9.0], 4) == [0, 4]


class TestMemoryLayers:
    def test_cuts_follow_memory_not_speed(self) -> None:
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 3_000, "b": 1_000})
        layer = {"parameter_bytes": 150}
        profile = make_profile({"a": [2.0] * 4, "b": [1.0] * 4}, layer=layer)
        plan = MemoryLayers()(make_problem(cluster, profile, 4)).plan
        assert cuts(plan) == [(0, 3), (3, 4)]

    def test_a_device_without_a_layer_is_left_out(self) -> None:
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 9_000, "b": 1_000})
        profile = make_profile({"a": [1.0] * 3, "b": [1.0] * 3}, layer={"parameter_bytes": 100})
        plan = MemoryLayers()(make_problem(cluster, profile, 4)).plan
        assert plan.device_ids == ("n0/0",)


class TestFasop:
    def test_layers_move_from_slow_to_fast(self) -> None:
        """Speeds 1 and 3: 4 + 4 layers of times 4, 12 → 5, 9 → 6, 6."""
        speed = [1.0, 3.0]
        assert greedy(lambda s, lo, hi: speed[s] * (hi - lo), 8, 2) == [0, 6, 8]

    def test_one_layer_is_kept(self) -> None:
        speed = [1.0, 100.0]
        assert greedy(lambda s, lo, hi: speed[s] * (hi - lo), 4, 2) == [0, 3, 4]

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=4), costs_lists)
    def test_never_worse_than_equal_counts(self, speeds: list[int], layers: list[int]) -> None:
        n = min(len(speeds), len(layers))

        def seconds(s: int, lo: int, hi: int) -> float:
            return speeds[s] * sum(layers[lo:hi])

        found = greedy(seconds, len(layers), n)
        counts = [len(layers) // n + (s < len(layers) % n) for s in range(n)]
        start = [sum(counts[:s]) for s in range(n + 1)]
        slowest = [max(seconds(s, ends[s], ends[s + 1]) for s in range(n)) for ends in (found, start)]
        assert slowest[0] <= slowest[1]
        assert all(a < b for a, b in pairwise(found))

    def test_rotations(self) -> None:
        """n0: a a, n1: b. Two sequences of types: aab and baa. With as many nodes again the second half is the same."""
        profile = make_profile({"a": [1.0], "b": [1.0]})
        for copies in (1, 2):
            assert placements(make_problem(make_cluster([{"a": 2}, {"b": 1}] * copies), profile, 2)) == [0, 2]

    def test_unequal_cuts_equal_shares(self) -> None:
        """Room for a pipeline only; a is three times as fast as b."""
        cluster = make_cluster([{"a": 1, "b": 1}], memory=3_000)
        profile = make_profile({"a": [1.0] * 8, "b": [3.0] * 8}, layer={"parameter_bytes": 100})
        plan = Fasop()(make_problem(cluster, profile, 8)).plan
        assert sorted(b - a for a, b in cuts(plan)) == [2, 6]


class TestUnevenDataParallel:
    def test_shares_follow_speed(self) -> None:
        profile = make_profile({"a": [2.0], "b": [6.0]})
        problem = make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 8)
        plan = UnevenDataParallel()(problem).plan
        assert [r.samples for r in plan.replicas] == [6, 2]
        assert step(problem, plan) == pytest.approx(36.0)

    def test_sizes_may_differ_between_devices(self) -> None:
        """Half of the time of a micro-batch is fixed, so one each is best: 6 samples on a, 2 on b."""
        profile = make_profile({"a": [1.0], "b": [3.0]}, sizes=(1, 2, 4, 8), fixed=0.5)
        plan = UnevenDataParallel()(make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 8)).plan
        assert [r.microbatch_sizes for r in plan.replicas] == [(6,), (2,)]

    def test_memory_limits_the_size_not_the_share(self) -> None:
        """a holds 4 samples at once: its 6 come in two micro-batches of 3."""
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 450, "b": 5_000})
        layer = {"saved_bytes_per_sample": 100}
        profile = make_profile({"a": [1.0], "b": [3.0]}, sizes=(1, 2, 4, 8), fixed=0.5, layer=layer)
        problem = make_problem(cluster, profile, 8, allow_recompute=False)
        plan = UnevenDataParallel()(problem).plan
        assert [r.microbatch_sizes for r in plan.replicas] == [(3, 3), (1, 1)]

    def test_overflow_goes_to_the_most_room(self) -> None:
        found = limited_shares(np.array([6, 2, 2]), np.array([4, 9, 9]), np.array([0, 5, 1]))
        assert found is not None
        assert found.tolist() == [4, 4, 2]
        assert limited_shares(np.array([6, 2]), np.array([4, 3]), np.array([0, 0])) is None

    def test_the_smallest_device_is_named(self) -> None:
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 1_000, "b": 500})
        profile = make_profile({"a": [1.0] * 2, "b": [2.0] * 2}, layer={"parameter_bytes": 100})
        with pytest.raises(PartitionError, match="device n0/1 of type 'b', which has 500 bytes: 300 bytes"):
            UnevenDataParallel()(make_problem(cluster, profile, 4))


class TestAutoIsNeverSlower:
    @pytest.mark.parametrize("baseline", rules(), ids=lambda b: str(b.name))
    @settings(max_examples=10, **UNHURRIED)
    @given(problem=problems(most_devices=3, most_layers=5))
    def test_it_starts_from_them(self, baseline: Partitioner, problem: Problem) -> None:
        """Whatever their class: micro-batches that no type was measured at, or of several sizes."""
        try:
            plan = baseline(problem).plan
        except PartitionError:
            return
        solution = Auto()(problem)
        assert solution.plan.partitioner == "auto"
        assert step(problem, solution.plan) <= step(problem, plan) * (1 + 1e-12)
        least = solution.lower_bound_seconds
        assert least is None or least <= step(problem, plan) * (1 + 1e-12)

    def test_remainders_in_several_replicas(self) -> None:
        """9 samples on three equal devices, half of a micro-batch's time fixed: (2, 1) each takes 7.5 s, not 9 s."""
        profile = make_profile({"a": [1.0]}, sizes=(1, 2), fixed=0.5)
        problem = make_problem(make_cluster([{"a": 3}]), profile, 9)
        plan = partitioner("even-data-parallel")(problem).plan
        assert step(problem, ExactSearch(problem, "auto").run().plan) <= step(problem, plan) * (1 + 1e-12)

    def test_a_micro_batch_size_per_replica(self) -> None:
        """b holds 2 samples at once, a 20: micro-batches of 6 on a and of 2 on b take 31.5 s, not 36 s."""
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 2_000, "b": 250})
        layer = {"saved_bytes_per_sample": 100}
        profile = make_profile({"a": [1.0], "b": [2.0]}, sizes=(1, 2, 4, 8), fixed=0.5, layer=layer)
        problem = make_problem(cluster, profile, 24, allow_recompute=False)
        plan = UnevenDataParallel()(problem).plan
        assert step(problem, ExactSearch(problem, "auto").run().plan) <= step(problem, plan) * (1 + 1e-12)


def test_bench_reports_ratios_and_violations() -> None:
    from bench.partitioners.clusters import CASES, LARGE, cluster
    from bench.partitioners.profiles import profile
    from bench.partitioners.run import BASELINES as NAMES
    from bench.partitioners.run import as_markdown, run_case, violations

    assert len(CASES) >= 20
    for case in (*CASES, *LARGE):
        assert sum(cluster(case).nodes[0].devices.values()) <= case.devices
    assert profile("vgg16", ["3090"]) is not None
    row = run_case(CASES[0]._replace(model="vgg16", batch=8), 10.0)
    assert row is not None
    assert violations([row]) == []
    assert len(as_markdown([row]).splitlines()) == 5
    row["results"][NAMES[0]]["ratio"] = 0.9
    assert NAMES[0] in violations([row])[0]
