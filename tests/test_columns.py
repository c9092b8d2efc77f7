"""The counted planner for large clusters, forced on small ones, where the oracle knows the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hetpipe.cost import Costs, sync_segments
from hetpipe.formats import InputError
from hetpipe.partition import Partitioner, PartitionError, Problem, Solution
from hetpipe.partitioners._bound import Bound
from hetpipe.partitioners._chains import Gaps
from hetpipe.partitioners._columns import Column, Columns, Effort, Step
from hetpipe.partitioners._enumerate import EARLY, FIRST, LO, SINCE, WHOLE, reach
from hetpipe.partitioners._fleet import Fleet, Group
from hetpipe.partitioners._kinds import Array, Kinds
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._loads import Loads, first_samples
from hetpipe.partitioners._master import NARROW, Master, Prices, Range
from hetpipe.partitioners._paths import Path, Paths, Pipeline
from hetpipe.partitioners._space import allowed_families, depth_of
from hetpipe.partitioners._stages import Stages
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.fasop import Fasop
from hetpipe.partitioners.memory_layers import MemoryLayers
from hetpipe.partitioners.type_blind import TypeBlind
from hetpipe.partitioners.uneven_data_parallel import UnevenDataParallel
from hetpipe.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.profiles import Profile
from hetpipe.simulator import pipeline_times, replica_costs, simulate, sync_times
from tests.strategies import make_cluster, make_problem, make_profile, problems

UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}
ROUNDING = 1 + 1e-9


def checked(problem: Problem, solution: Solution) -> float:
    """The step of a plan that fits and does the whole batch."""
    plan = solution.plan
    plan.check(cluster=problem.cluster, profile=problem.profile, global_batch=problem.global_batch)
    timeline = simulate(plan, problem.profile, problem.cluster)
    for device, peak in timeline.peak_bytes.items():
        assert peak <= problem.cluster.type_of(device).memory * (1 - problem.memory_reserve)
    return timeline.step_seconds


class TestAgainstTheOracle:
    @settings(max_examples=25, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5))
    def test_bound_optimum_plan(self, problem: Problem) -> None:
        assume(problem.backend == "torch")
        try:
            best = checked(problem, Exhaustive()(problem))
        except PartitionError:
            with pytest.raises(PartitionError):
                Large(problem, "auto").run()
            return
        solution = Large(problem, "auto").run()
        assert solution.lower_bound_seconds is not None
        assert solution.lower_bound_seconds <= best * ROUNDING
        assert checked(problem, solution) >= best / ROUNDING

    @settings(max_examples=25, **UNHURRIED)
    @given(problems(most_devices=5, most_layers=5), st.data())
    def test_no_prices_rule_the_optimum_out(self, problem: Problem, data: st.DataObject) -> None:
        """A plan that is there is worth at least what its devices cost, whatever the prices."""
        assume(problem.backend == "torch")
        try:
            solution = Exhaustive()(problem)
        except PartitionError:
            return
        best, R = checked(problem, solution), len(solution.plan.replicas)
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
        assume(problem.backend == "torch")
        try:
            solution = Exhaustive()(problem)
        except PartitionError:
            return
        best, R = checked(problem, solution), len(solution.plan.replicas)
        master = Master(Columns(Stages(Kinds(problem))))
        bound = Bound(master, best / 2, best, best * 1.02, min(expected, master.kinds.most), lambda: False)
        assert bound.run() <= best * ROUNDING
        counts = {r for x in bound.parts for r in range(x.R.low, x.R.high + 1)}
        assert counts == {*range(1, master.kinds.most + 1)}
        gaps = open_gaps(master.columns, solution.plan.replicas)
        [part] = [x for x in bound.parts if x.R.low <= R <= x.R.high and within(x.gaps, gaps, master.columns)]
        assert part.shown <= best * ROUNDING
        program = bound.masters[part.gaps]
        assert not program.impossible(best * ROUNDING, part.R, master.prices)[0]

    @settings(max_examples=15, **UNHURRIED)
    @given(problems(most_devices=3, most_layers=5))
    def test_a_path_is_simulated_as_the_plan_would_be(self, problem: Problem) -> None:
        assume(problem.backend == "torch" and len(problem.cluster.nodes) == 1)
        columns = Columns(Stages(Kinds(problem)))
        paths, used = Paths(columns), tuple(columns.kinds.counts)
        for size, b in enumerate(columns.stages.sizes):
            n = problem.global_batch
            if n < first_samples(columns.stages, size):
                continue
            for path in paths.search(1e9, 1, used, size, n):
                found = paths.simulated(path, size, n)
                if found is not None:
                    assert found.used == used
                    assert found.replica.samples == n
                    assert max(found.replica.microbatch_sizes) <= max(b, n)


def drawn_replicas(data: st.DataObject, columns: Columns) -> list[ReplicaPlan]:
    """Of any devices, one or a measured number of them a stage, and any cuts."""
    kinds, replicas = columns.kinds, []
    free = {(node.name, kind): list(kinds.ids[node.name, kind]) for node in kinds.problem.cluster.nodes for kind in node.devices}
    for _ in range(data.draw(st.integers(2, 4))):
        stages, lo = [], 0
        while lo < columns.L:
            fits = [(place, k) for place, ids in free.items() for k in kinds.kinds if k.type == place[1] and k.degree <= len(ids)]
            if not fits:
                return replicas
            place, k = data.draw(st.sampled_from(fits))
            devices = tuple(free[place].pop() for _ in range(k.degree))
            hi = data.draw(st.sampled_from([*range(lo + 1, columns.L), *[columns.L] * 3]))
            stages.append(StagePlan(layers=(lo, hi), devices=devices))
            lo = hi
        replicas.append(ReplicaPlan(microbatch_sizes=(1,), stages=tuple(stages)))
    return replicas


def open_gaps(columns: Columns, replicas: Sequence[ReplicaPlan]) -> tuple[int, ...]:
    """Those of which no single device of these has both layers."""
    layers = columns.chains.layers.tolist()
    single = [stage.layers for replica in replicas for stage in replica.stages if len(stage.devices) == 1]
    pairs = enumerate(pairwise(layers), 1)
    return tuple(gap for gap, (a, b) in pairs if not any(lo <= a and b < hi for lo, hi in single))


def within(gaps: Gaps, opened: tuple[int, ...], columns: Columns) -> bool:
    """Whether plans with these open gaps are among them."""
    following = (*opened, columns.chains.all.high)[len(gaps.open)] if len(gaps.open) <= len(opened) else -1
    return opened[: len(gaps.open)] == gaps.open and gaps.low <= following <= gaps.high


def drawn_path(data: st.DataObject, columns: Columns) -> Path:
    """Of kinds of stage of which there are devices enough, and any cuts."""
    free, kinds, cuts = list(columns.kinds.counts), list[int](), [0]
    while cuts[-1] < columns.L:
        fits = [v for v, kind in enumerate(columns.kinds.kinds) if kind.degree <= free[kind.at]]
        kinds.append(data.draw(st.sampled_from(fits)))
        free[columns.at[kinds[-1]]] -= columns.degree[kinds[-1]]
        more = any(kind.degree <= free[kind.at] for kind in columns.kinds.kinds)
        cuts.append(min(cuts[-1] + data.draw(st.sampled_from([1, 1, 2, columns.L])), columns.L) if more else columns.L)
    return Path(tuple(kinds), tuple(cuts))


class TestTheBoundOfAPipeline:
    @settings(max_examples=200, **UNHURRIED)
    @given(st.booleans().flatmap(lambda x: problems(7, 7, 60, least_devices=3, tensor_parallel=x)), st.data())
    def test_each_value_against_the_simulator(self, problem: Problem, data: st.DataObject) -> None:
        """At every stage of any pipeline of any samples, whichever depths it has; and within its own time it is kept."""
        assume(problem.backend == "torch")
        types = {name: t.model_copy(update={"memory": data.draw(st.sampled_from([1, 4, 1000])) * t.memory})
                 for name, t in problem.cluster.device_types.items()}  # fmt: skip
        problem = replace(problem, cluster=problem.cluster.model_copy(update={"device_types": types}))
        kinds = Kinds(problem)
        assume(kinds.V)
        columns = Columns(Stages(kinds))
        paths, path = Paths(columns), drawn_path(data, columns)
        size = len(columns.stages.sizes) - data.draw(st.sampled_from([1, 1, 1, len(columns.stages.sizes)]))
        b, low = columns.stages.sizes[size], first_samples(columns.stages, size)
        assume(low <= problem.global_batch and all(columns.stages.usable[size, v] for v in path.kinds))
        samples = data.draw(st.integers(low, problem.global_batch))
        samples -= b > 1 and samples > low and samples % b == 0 and data.draw(st.booleans())
        fewest = data.draw(st.sampled_from([samples, max(low, int(samples / 1.1))]))
        load = Loads(*(np.array([x]) for x in (size, fewest, samples, columns.coarse.row(size, fewest))))
        values, ends = bounds_along(columns, columns.step(1e9, 1, load), path), list[float]()
        sizes = (b,) * (samples // b) + ((samples % b,) if samples % b else ())
        for family in allowed_families(problem):
            depths = tuple(depth_of(family, len(path.kinds) - s, len(sizes)) for s in range(len(path.kinds)))
            replica = paths._replica(path, sizes, depths)
            if replica is None:
                continue
            costs = replica_costs(paths.costs, replica)
            times = pipeline_times(costs, depths)
            end = max(t.backward[-1] for t in times) + paths._optimizer(path)
            assert len(bounds_along(columns, columns.step(end * ROUNDING, 1, load), path)) == len(path.kinds)
            ends.append(end)
            for s, (row, time) in enumerate(zip(values[::-1], times, strict=True)):
                if s and not problem.cluster.runtime_overhead.overlap_transfers:
                    continue  # actions are longer by their transfers, of which bounds know none inside
                begin = [end - seconds for end, seconds in zip(time.forward, costs.forward[s], strict=True)]
                m = fewest // b
                assert row[WHOLE] <= (time.backward[-1] - begin[0]) * ROUNDING
                if m:
                    assert row[FIRST] <= (time.backward[m - 1] - begin[0]) * ROUNDING
                for y, early in enumerate(EARLY, SINCE):
                    if early < m:
                        assert row[y] <= (time.backward[-1] - begin[early]) * ROUNDING
                        assert row[y + len(EARLY)] <= (time.backward[m - 1 - early] - begin[0]) * ROUNDING
        if ends:  # and found at any prices that it is worth
            used, worth = paths._used(path), np.array([data.draw(st.floats(0.01, 1)) for _ in columns.kinds.classes])
            worth *= samples * (1 - 1e-9) / (worth @ np.array(used))
            T = min(ends) * ROUNDING
            assert used in [c.used for c in columns.search(columns.step(T, 1, load), worth, 0.0, Effort())[0]]
            assert columns.done(T, 1, [Column(used, samples, size)])
            assert paths.search(T, 1, used, size, samples)


class TestReach:
    @settings(max_examples=60, **UNHURRIED)
    @given(st.booleans().flatmap(lambda x: problems(4, 6, 40, tensor_parallel=x)), st.data())
    def test_each_stage_by_itself(self, problem: Problem, data: st.DataObject) -> None:
        """No stage is left out that can do its own work, or could with fewer samples of the same size; outputs may be large."""
        sizes = [data.draw(st.sampled_from([0, 1, 30])) for _ in problem.profile.layers]
        layers = tuple(
            x.model_copy(update={"output_bytes_per_sample": x.output_bytes_per_sample * size})
            for x, size in zip(problem.profile.layers, sizes, strict=True)
        )
        problem = replace(problem, profile=problem.profile.model_copy(update={"layers": layers}))
        kinds = Kinds(problem)
        assume(kinds.V)
        columns = Columns(Stages(kinds))
        parts = columns.chains.parts(columns.chains.all)
        columns = columns.within(data.draw(st.sampled_from([columns.chains.all, *parts])))
        loads, _ = columns.loads(1.0)
        step = columns.step(data.draw(st.floats(1, 100)), data.draw(st.integers(1, 9)), loads)
        alone = np.zeros((len(loads.low), columns.kinds.V, columns.L + 1, columns.L + 1), dtype=bool)
        for hi in range(1, columns.L + 1):
            for lo in range(hi):
                for g in range(len(loads.low)):
                    (loads_, given_, end, _), ends = step.pick(slice(g, g + 1)), np.array([lo, hi])
                    found = reach(columns.tables, given_, end, columns.held, loads_.held, ends, columns.begin)
                    alone[g, :, hi, lo] = found[0, :, hi] == lo
        for g, v, hi in np.ndindex(*step.reach.shape):
            first, fewer = step.reach[g, v, hi], (loads.size == loads.size[g]) & (loads.low <= loads.low[g])
            assert first > columns.L or alone[g, v, hi, first]
            assert not alone[fewer, v, hi, : min(first, columns.L)].all(axis=0).any()


def bounds_along(columns: Columns, step: Step, path: Path) -> list[Array]:
    """Values of each partial pipeline of a path, from the last stage to the first; fewer if one is given up."""
    rows, values, found = *columns.nothing(step), list[Array]()
    free, most = np.zeros(columns.kinds.K), np.zeros((1, columns.L + 1, 1))
    for place, (v, lo) in enumerate(zip(path.kinds[::-1], path.cuts[-2::-1], strict=True), 1):
        rows, values, _ = columns.extended(step, np.array(columns.kinds.counts), rows, values, place, free, most)
        one = np.flatnonzero((rows[:, LO] == lo) & (rows[:, 3] == v))
        if not len(one):
            break
        rows, values = rows[one], values[one]
        found.append(values[0])
    return found


class TestSumsInChains:
    @settings(max_examples=60, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6), st.data())
    def test_replicas_that_keep_to_them_do_not_wait_for_each_other(self, problem: Problem, data: st.DataObject) -> None:
        """No step is longer than its own sums, and all below them in the chain, make any replica's."""
        columns = Columns(Stages(Kinds(problem)))
        L, degree_one = columns.L, np.flatnonzero(columns.degree == 1)
        assume(columns.kinds.between and len(degree_one))
        common = tuple(sorted(data.draw(st.sets(st.integers(1, L - 1), max_size=2)))) if L > 1 else ()
        groups = []
        for number in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
            more = data.draw(st.sets(st.integers(1, L - 1))) if L > 1 else set()
            cuts = tuple(sorted({0, *more, *common, L}))
            ready = tuple(data.draw(st.floats(0, 10)) for _ in cuts[1:])
            kinds = tuple(int(data.draw(st.sampled_from(degree_one))) for _ in ready)
            replica = ReplicaPlan(microbatch_sizes=(1,), stages=(StagePlan(layers=(0, L), devices=("x",)),))
            groups.append(Group(number, Pipeline(Path(kinds, cuts), (1,), 0, 1, replica, ready, 0.5)))
        R = sum(g.number for g in groups)
        assume(columns.kinds.largest_node < R)
        cuts = tuple(sorted({x for g in groups for x in g.pipeline.path.cuts}))
        sums = columns.cut_at(cuts, common).sums(R)
        step = Fleet(Master(columns), Paths(columns)).step(groups)
        assert step <= max(g.pipeline.end(sums) for g in groups) * ROUNDING
        assert step >= max(g.pipeline.end(columns.sums(R)) for g in groups) / ROUNDING

    @settings(max_examples=200, **UNHURRIED)
    @given(st.booleans().flatmap(lambda x: problems(7, 6, least_devices=4, tensor_parallel=x)), st.data())
    def test_a_stage_ends_before_its_own_sums(self, problem: Problem, data: st.DataObject) -> None:
        """In the simulator, whatever the replicas and whenever their stages are ready."""
        columns = Columns(Stages(Kinds(problem)))
        replicas, ready = drawn_replicas(data, columns), dict[str, float]()
        assume(len(replicas) > 1)
        plan = Plan(model="m", global_batch=len(replicas), schedule="1f1b", partitioner="none", replicas=tuple(replicas))
        for replica in replicas:
            for stage in replica.stages:
                ready |= dict.fromkeys(stage.devices, data.draw(st.floats(0, 1)))
        late = data.draw(st.sampled_from([stage for replica in replicas for stage in replica.stages]))
        ready |= dict.fromkeys(late.devices, 1e3)
        costs = Costs(problem.profile, problem.cluster)
        end = max([1e3, *(end for _, _, end in sync_times(sync_segments(plan, costs), ready, costs))])
        kind = problem.cluster.device(late.devices[0]).type, len(late.devices)
        sums, chains, (lo, hi) = columns.sums(len(replicas)), columns.chains, late.layers
        least = min(sums[v, lo, hi] for v, k in enumerate(columns.kinds.kinds) if (k.type, k.degree) == kind)
        gaps = Gaps(open_gaps(columns, replicas), chains.all.high, chains.all.high)
        last = chains.below(gaps)[lo]
        if columns.kinds.summed[lo:hi].any() and last <= lo:
            least += chains.seconds(len(replicas))[lo, last]
        assert end >= (1e3 + least) / ROUNDING

    @settings(max_examples=150, **UNHURRIED)
    @given(st.booleans().flatmap(lambda x: problems(7, 6, least_devices=4, tensor_parallel=x)), st.data())
    def test_pipelines_of_a_plan_are_found_within_its_step(self, problem: Problem, data: st.DataObject) -> None:
        """Whatever is known of its gaps."""
        types = {name: t.model_copy(update={"memory": 1000 * t.memory}) for name, t in problem.cluster.device_types.items()}
        problem = replace(problem, cluster=problem.cluster.model_copy(update={"device_types": types}))
        assume(problem.backend == "torch" and "1f1b" in allowed_families(problem))
        columns = Columns(Stages(Kinds(problem)))
        drawn = drawn_replicas(data, columns)
        assume(len(drawn) > 1)
        size = data.draw(st.integers(0, len(columns.stages.sizes) - 1))
        drawn_on = {(problem.cluster.device(s.device).type, len(s.devices)) for replica in drawn for s in replica.stages}
        kinds = enumerate(columns.kinds.kinds)
        assume(all(columns.stages.usable[size, v] for v, k in kinds if (k.type, k.degree) in drawn_on))
        b, number = columns.stages.sizes[size], [data.draw(st.integers(1, 4)) for _ in drawn]
        sizes = [{"microbatch_sizes": (b,) * m} for m in number]
        replicas = tuple(replica.model_copy(update=x) for replica, x in zip(drawn, sizes, strict=True))
        fields = {"model": problem.profile.model, "schedule": "1f1b", "partitioner": "none"}
        plan = Plan(**fields, global_batch=b * sum(number), replicas=replicas)
        T, gaps = simulate(plan, problem.profile, problem.cluster).step_seconds, columns.chains.all
        opened = open_gaps(columns, replicas)
        while True:
            for replica, m in zip(replicas, number, strict=True):
                used, stages = [0] * columns.kinds.K, [(problem.cluster.device(s.device), s) for s in replica.stages]
                for device, stage in stages:
                    shape = next(node for node in problem.cluster.nodes if node.name == device.node)
                    [k] = [k for k, c in enumerate(columns.kinds.classes) if c.type == device.type and shape in c.nodes]
                    used[k] += len(stage.devices)
                assume(b * m <= problem.global_batch and b * m >= first_samples(columns.stages, size))
                load = Loads(*(np.array([x]) for x in (size, b * m, b * m, columns.coarse.row(size, b * m))))
                prices = np.full(columns.kinds.K, b * m * (1 - 1e-9) / sum(used))
                step = columns.within(gaps).step(T * ROUNDING, len(replicas), load)
                assert tuple(used) in [c.used for c in columns.search(step, prices, 0.0, Effort())[0]]
                column = Column(tuple(used), b * m, size)
                assert columns.within(gaps).done(T * ROUNDING, len(replicas), [column]) == [column]
            parts = columns.chains.parts(gaps)
            if not parts:
                break
            [gaps] = [x for x in parts if within(x, opened, columns)]

    def test_pipelines_are_cut_where_all_are(self) -> None:
        columns = Columns(Stages(Kinds(mixed(3, 60)))).cut_at((0, 2, 3, 5, 6), (3,))
        found = Paths(columns).search(1e9, 3, (2, 1), 0, 20)
        assert found
        for path in found:
            assert 3 in path.cuts
            assert set(path.cuts) <= {0, 2, 3, 5, 6}


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
        assert low <= checked(problem, Exhaustive()(problem)) * ROUNDING


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
        assert low <= checked(large, solution) * ROUNDING
        others: list[Partitioner] = [Fasop(), MemoryLayers(), TypeBlind(), UnevenDataParallel()]
        for other in others:
            try:
                plan = other(large)
            except PartitionError:
                continue
            assert low <= checked(large, plan) * ROUNDING


class TestGaps:
    @settings(max_examples=20, **UNHURRIED)
    @given(problems(7, 6, least_devices=4, tensor_parallel=True))
    def test_only_groups_hold_both_layers_of_an_open_gap(self, problem: Problem) -> None:
        columns = Columns(Stages(Kinds(problem)))
        chains, layers = columns.chains, columns.chains.layers
        assume(len(layers) > 1)
        begin = chains.begin(Gaps((1,), 2, chains.all.high))
        assert not begin[columns.degree > 1].any()
        assert not begin[:, : layers[1] + 1].any()
        assert (begin[columns.degree == 1, layers[1] + 1 :] == layers[0] + 1).all()


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


def mixed(copies: int, batch: int) -> Problem:
    """So many pairs of nodes, of two fast and of four slow devices; free links."""
    cluster = make_cluster([{"a": 2}, {"b": 4}] * copies, memory={"a": 9_000, "b": 5_000},
                           link={"bandwidth": 1e12, "latency": 0.0})  # fmt: skip
    times = [0.02, 0.03, 0.05, 0.04, 0.06, 0.03]
    layer = {"parameter_bytes": 400, "output_bytes_per_sample": 50, "saved_bytes_per_sample": 300}
    profile = make_profile({"a": times, "b": [2.3 * t for t in times]}, sizes=(1, 2), layer=layer, fixed=0.3)
    return make_problem(cluster, profile, batch)


class TestManyDevices:
    def test_twice_the_devices_and_the_batch_take_no_longer(self) -> None:
        steps = []
        for copies in (3, 6, 12, 24):
            problem = mixed(copies, 60 * copies)
            solution = Auto()(problem)
            steps.append(checked(problem, solution))
            assert solution.lower_bound_seconds is not None
            assert steps[-1] <= solution.lower_bound_seconds * 1.25
        for before, after in pairwise(steps):
            assert after <= before * 1.005

    def test_a_remainder_and_a_price(self) -> None:
        problem = mixed(4, 241)
        assert checked(problem, Auto()(problem)) > 0

    def test_one_class_per_type_and_shape(self) -> None:
        assert Kinds(mixed(5, 100)).counts == (10, 20)

    def test_only_long_pipelines_fit(self) -> None:
        cluster = make_cluster([{"a": 10}, {"b": 10}], memory=2_300)
        profile = make_profile({"a": [0.1] * 9, "b": [0.2] * 9},
                               layer={"parameter_bytes": 500, "saved_bytes_per_sample": 10})  # fmt: skip
        problem = make_problem(cluster, profile, 12)
        solution = Auto(time_limit_seconds=5)(problem)
        checked(problem, solution)
        assert all(len(replica.stages) == 9 for replica in solution.plan.replicas)

    def test_a_type_that_only_some_nodes_have_enough_devices_of(self) -> None:
        """Measured split in two only, so that the node with one such device is of no use."""
        profile = make_profile({"a": [0.1, 0.2], "b": [0.1, 0.2]})
        document = profile.model_dump()
        document["measurements"][0]["tensor_parallel"] = 2
        problem = make_problem(make_cluster([{"a": 1}, {"a": 4}, {"b": 8}, {"b": 8}]), Profile.parse(document, "the test's"), 40)
        assert Kinds(problem).counts == (4, 16)
        assert not any(device.startswith("n0/") for device in Auto()(problem).plan.device_ids)

    def test_with_little_time_simple_plans_come_last(self) -> None:
        """18 of 32 devices, each with the whole model and one sample, are what the counted planner does not find."""
        cluster = make_cluster([{"a": 8}] * 4, link={"bandwidth": 1e4, "latency": 0.05})
        layer = {"parameter_bytes": 1000, "output_bytes_per_sample": 100, "saved_bytes_per_sample": 500}
        problem = make_problem(cluster, make_profile({"a": [0.3, 0.2, 0.5]}, layer=layer), 18, time_limit_seconds=4)
        solution = Auto()(problem)
        assert checked(problem, solution) <= checked(problem, UnevenDataParallel()(problem)) * ROUNDING
        assert solution.plan.partitioner == "auto"
        assert solution.lower_bound_seconds is not None

    @pytest.mark.parametrize("devices", [2, 10, 20])
    def test_a_batch_below_the_smallest_measured_size(self, devices: int) -> None:
        problem = make_problem(make_cluster([{"a": devices}]), make_profile({"a": [0.1, 0.2]}, sizes=(4, 8)), 3)
        with pytest.raises(InputError, match="the global batch of 3 samples is below the smallest micro-batch .* 4; measure"):
            Auto()(problem)
