"""The bound of the counted planner for large clusters: forced on small ones, where the oracle knows the optimum, and against
other plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from hetpipe.partitioners._bound import Bound
from hetpipe.partitioners._columns import Column, Columns, Effort
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._master import NARROW, Master, Prices, Range
from hetpipe.partitioners._stages import Stages
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.fasop import Fasop
from hetpipe.partitioners.memory_layers import MemoryLayers
from hetpipe.partitioners.type_blind import TypeBlind
from hetpipe.partitioners.uneven_data_parallel import UnevenDataParallel
from hetpipe.planning.partition import Partitioner, PartitionError, Problem
from hetpipe.spec.plan import ReplicaPlan
from tests.plans import ROUNDING, checked, lies_in, open_gaps
from tests.strategies import UNHURRIED, make_cluster, make_problem, make_profile, mixed, problems


def optimum(problem: Problem) -> tuple[float, tuple[ReplicaPlan, ...]]:
    """The least step, and the replicas that have it; other problems are passed over."""
    assume(problem.backend == "torch")
    try:
        plan = Exhaustive()(problem).plan
    except PartitionError:
        reject()
    return checked(problem, plan).step_seconds, plan.replicas


class TestAgainstTheOracle:
    @settings(max_examples=15, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5))
    def test_bound_optimum_plan(self, problem: Problem) -> None:
        assume(problem.backend == "torch")
        try:
            best = checked(problem, Exhaustive()(problem).plan).step_seconds
        except PartitionError:
            with pytest.raises(PartitionError):
                Large(problem, "auto").run()
            return
        solution = Large(problem, "auto").run()
        assert solution.lower_bound_seconds is not None
        assert solution.lower_bound_seconds <= best * ROUNDING
        assert checked(problem, solution.plan).step_seconds >= best / ROUNDING

    @settings(max_examples=15, **UNHURRIED)
    @given(problems(most_devices=5, most_layers=5), st.data())
    def test_no_prices_rule_the_optimum_out(self, problem: Problem, data: st.DataObject) -> None:
        """A plan that is there is worth at least what its devices cost, whatever the prices."""
        best, replicas = optimum(problem)
        R = len(replicas)
        master = Master(Columns(Stages(Kinds(problem))))
        for _ in range(4):
            worth = [data.draw(st.floats(0, 1)) for _ in range(master.kinds.K + 1)]
            assume(sum(worth) > 0)
            prices = master.scaled(Prices(np.array(worth[:-1]), worth[-1]), R)
            found, all_of_them = master.found(best, Range(R, R), prices, Effort(), NARROW)
            assert found
            assert all_of_them
        assert not master.impossible(best, Range(R, R), master.prices)[0]

    @settings(max_examples=40, **UNHURRIED)
    @given(st.booleans().flatmap(lambda x: problems(most_devices=5 - x, most_layers=5, tensor_parallel=x)), st.integers(1, 4))
    def test_parts_of_all_plans(self, problem: Problem, expected: int) -> None:
        """The optimum is in one of them, whatever its replicas and cuts, and its step is not ruled out there."""
        best, replicas = optimum(problem)
        R = len(replicas)
        master = Master(Columns(Stages(Kinds(problem))))
        bound = Bound(master, best / 2, best, best * 1.02, min(expected, master.kinds.most), lambda: False)
        assert bound.run() <= best * ROUNDING
        counts = {r for x in bound.parts for r in range(x.R.low, x.R.high + 1)}
        assert counts == {*range(1, master.kinds.most + 1)}
        gaps = open_gaps(master.columns, replicas)
        [part] = [x for x in bound.parts if x.R.low <= R <= x.R.high and lies_in(x.gaps, gaps, master.columns)]
        assert part.shown <= best * ROUNDING
        program = bound.masters[part.gaps]
        assert not program.impossible(best * ROUNDING, part.R, master.prices)[0]


class TestFoundByTheOracle:
    def test_a_longer_stage_may_fit_where_a_shorter_one_does_not(self) -> None:
        """Layer 0 alone would have to keep the buffers of its large output."""
        cluster = make_cluster([{"a": 3, "c": 1}], memory={"a": 4_001, "c": 8_000})
        profile = make_profile({"a": [1.0, 0.33, 0.68], "c": [0.14, 0.91, 0.79]})
        bytes_of = [(669, 300, 790), (0, 0, 0), (0, 0, 0)]
        layers = [
            layer.model_copy(
                update={"parameter_bytes": p, "output_bytes_per_sample": o, "saved_bytes_per_sample": s}
            )
            for layer, (p, o, s) in zip(profile.layers, bytes_of, strict=True)
        ]
        problem = make_problem(cluster, profile.model_copy(update={"layers": tuple(layers)}), 7)
        low = Large(problem, "auto").run().lower_bound_seconds
        assert low is not None
        assert low <= checked(problem, Exhaustive()(problem).plan).step_seconds * ROUNDING


class TestAgainstOthers:
    @settings(max_examples=6, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6), st.integers(3, 5))
    def test_the_bound_is_below_every_plan(self, problem: Problem, copies: int) -> None:
        """On so many copies of a small cluster."""
        assume(problem.backend == "torch" and problem.max_price_per_hour is None)
        nodes = [
            node.model_copy(update={"name": f"{node.name}-{i}"}) for node in problem.cluster.nodes for i in range(copies)
        ]
        assume(problem.cluster.link is not None)
        fields = {name: getattr(problem.cluster, name) for name in type(problem.cluster).model_fields}
        cluster = type(problem.cluster)(**{**fields, "nodes": tuple(nodes), "links": ()})
        large = replace(problem, cluster=cluster, global_batch=problem.global_batch * copies)
        try:
            solution = Large(large, "auto", time_limit_seconds=5).run()
        except PartitionError:
            return
        low = solution.lower_bound_seconds
        assert low is not None
        assert low <= checked(large, solution.plan).step_seconds * ROUNDING
        others: list[Partitioner] = [Fasop(), MemoryLayers(), TypeBlind(), UnevenDataParallel()]
        for other in others:
            try:
                plan = other(large).plan
            except PartitionError:
                continue
            assert low <= checked(large, plan).step_seconds * ROUNDING


class TestPrices:
    @settings(max_examples=100, **UNHURRIED)
    @given(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 5)).filter(any), st.integers(1, 40)), st.data())
    def test_nearest(self, samples: dict[tuple[int, int], int], data: st.DataObject) -> None:
        """No known pipeline is worth more than its price, and all there is costs one batch; none where the batch can be done."""
        master = Master(Columns(Stages(Kinds(mixed(3, 60)))))
        R = Range(1, data.draw(st.integers(1, 18)))
        master.keep(1.0, R, [Column(used, n, 0) for used, n in samples.items()])
        a, b, replica = (data.draw(st.floats(0.01, 9)) for _ in range(3))
        last = master.scaled(Prices(np.array([a, b]), replica), R.high)
        comps, capacity = master._capacity(1.0, R)
        y = master.filled(comps, capacity, R.high, Prices(np.zeros(2), 0.0)) if samples else None
        most = float(capacity @ y[0]) if y is not None else 0.0
        found = master.nearest(1.0, R, last)
        if found is None:
            assert most >= master.batch * (1 - 1e-6)
            return
        assert most <= master.batch * (1 + 1e-6)
        assert all(n <= master.price(used, found) * (1 + 1e-5) for used, n in samples.items())
        assert float(found.device @ master.counts) + found.replica * R.high == pytest.approx(master.batch)

    def test_a_pipeline_that_costs_nothing(self) -> None:
        """Prices of all devices fall alike until they cost one batch; the one fast device is then worth nothing."""
        cluster = make_cluster([{"c": 1, "a": 3}, {"a": 1}])
        problem = make_problem(cluster, make_profile({"a": [1.0], "c": [0.25]}, backward=0.5), 1)
        best = checked(problem, Exhaustive()(problem).plan).step_seconds
        master = Master(Columns(Stages(Kinds(problem))))
        assert master.impossible(best, Range(1, 1), master.prices)[0] is False
