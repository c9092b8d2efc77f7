"""Pipelines of a large cluster, and what bounds them, against the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.partitioners._chains import Gaps
from hetpipe.partitioners._columns import Column, Columns, Effort, Step
from hetpipe.partitioners._enumerate import EARLY, FIRST, LO, SINCE, WHOLE, reach
from hetpipe.partitioners._fleet import Fleet, Group
from hetpipe.partitioners._kinds import Array, Kinds
from hetpipe.partitioners._loads import Loads, first_samples
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._paths import Path, Paths, Pipeline
from hetpipe.partitioners._space import allowed_families, depth_of
from hetpipe.partitioners._stages import Stages
from hetpipe.planning.partition import Problem
from hetpipe.predict.cost import Costs, sync_segments
from hetpipe.predict.simulator import pipeline_times, replica_costs, simulate, sync_times
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan
from tests.plans import ROUNDING, drawn_path, drawn_replicas, lies_in, open_gaps
from tests.strategies import UNHURRIED, mixed, problems


class TestTheBoundOfAPipeline:
    @settings(max_examples=120, **UNHURRIED)
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
        L, degree_one = columns.L, np.flatnonzero(columns.degree == 1).tolist()
        assume(columns.kinds.between and len(degree_one))
        common = tuple(sorted(data.draw(st.sets(st.integers(1, L - 1), max_size=2)))) if L > 1 else ()
        groups = []
        for number in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
            more = data.draw(st.sets(st.integers(1, L - 1))) if L > 1 else set()
            cuts = tuple(sorted({0, *more, *common, L}))
            ready = tuple(data.draw(st.floats(0, 10)) for _ in cuts[1:])
            kinds = tuple(data.draw(st.sampled_from(degree_one)) for _ in ready)
            replica = ReplicaPlan(microbatch_sizes=(1,), stages=(StagePlan(layers=(0, L), devices=("n0/0",)),))
            groups.append(Group(number, Pipeline(Path(kinds, cuts), (1,), 0, 1, replica, ready, 0.5)))
        R = sum(g.number for g in groups)
        assume(columns.kinds.largest_node < R)
        cuts = tuple(sorted({x for g in groups for x in g.pipeline.path.cuts}))
        sums = columns.cut_at(cuts, common).sums(R)
        step = Fleet(Master(columns), Paths(columns)).step(groups)
        assert step <= max(g.pipeline.end(sums) for g in groups) * ROUNDING
        assert step >= max(g.pipeline.end(columns.sums(R)) for g in groups) / ROUNDING

    @settings(max_examples=100, **UNHURRIED)
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

    @settings(max_examples=80, **UNHURRIED)
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
        fields: dict[str, Any] = {"model": problem.profile.model, "schedule": "1f1b", "partitioner": "none"}
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
            [gaps] = [x for x in parts if lies_in(x, opened, columns)]

    def test_pipelines_are_cut_where_all_are(self) -> None:
        columns = Columns(Stages(Kinds(mixed(3, 60)))).cut_at((0, 2, 3, 5, 6), (3,))
        found = Paths(columns).search(1e9, 3, (2, 1), 0, 20)
        assert found
        for path in found:
            assert 3 in path.cuts
            assert set(path.cuts) <= {0, 2, 3, 5, 6}


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


class TestPaths:
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
