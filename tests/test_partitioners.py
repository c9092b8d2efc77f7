from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.chain import Chain
from hetpipe.partitioners.compositions import groupings
from hetpipe.partitioners.even import Even
from hetpipe.partitioners.even_data_parallel import EvenDataParallel
from hetpipe.partitioners.exact import best_first, listing
from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.search.floor import simple_plans
from hetpipe.partitioners.stage_kinds.plan_class import microbatch_sizes
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Partitioner, PartitionError, Problem, Solution
from hetpipe.predict.simulator import simulate
from tests.support.plans import checked
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems


def step(problem: Problem, plan: Plan) -> float:
    return simulate(plan, problem.profile, problem.cluster).step_seconds


def solve(partitioner: Callable[[Problem], Solution], problem: Problem) -> tuple[float, Plan] | None:
    """Step and plan, checked against the problem; None if nothing fits."""
    try:
        solution = partitioner(problem)
    except PartitionError:
        return None
    plan = solution.plan
    seconds = checked(problem, plan).step_seconds
    if problem.schedule == "gpipe" or problem.backend != "torch":
        assert all(
            replica.depths(plan.schedule) == (len(replica.microbatch_sizes),) * len(replica.stages) for replica in plan.replicas
        )
    if solution.lower_bound_seconds is not None:
        assert solution.lower_bound_seconds <= seconds * (1 + 1e-12)
    return seconds, plan


def same(a: tuple[float, Plan] | None, b: tuple[float, Plan] | None) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert a[0] == pytest.approx(b[0], rel=1e-12)


def agree(problem: Problem) -> tuple[float, Plan] | None:
    """The search finds the best plan of its class, and proves it; the fluid bound is no larger."""
    best = solve(Exhaustive(max_plans=1e12), problem)
    same(solve(searched, problem), best)
    assert fluid_bound(problem) <= (math.inf if best is None else best[0] * (1 + 1e-12))
    return best


def searched(problem: Problem) -> Solution:
    """The search alone, from nothing."""
    solution = ExactSearch(problem, "auto").run()
    assert problem.deadline_seconds_per_step is not None or solution.proof == "exhaustive"
    return solution


class TestAutoIsTheOracle:
    @pytest.mark.timeout(600)
    @settings(max_examples=20, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6))
    def test_four_devices(self, problem: Problem) -> None:
        agree(problem)

    @pytest.mark.timeout(600)
    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6, tensor_parallel=True))
    def test_tensor_parallel(self, problem: Problem) -> None:
        agree(problem)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5))
    def test_bounds_on_a_grid(self, problem: Problem) -> None:
        """Where there are too many loads to bound each: the same plan."""
        with patch.object(groupings, "FINE", 100):
            agree(problem)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5), st.integers(1, 4))
    def test_what_is_left_out_is_not_claimed(self, problem: Problem, room: int) -> None:
        """Where rows, shares or combinations are too many: a plan that fits, and a bound that the best plan respects."""
        best = solve(Exhaustive(), problem)
        with patch.multiple(best_first, ROWS=room), patch.multiple(listing, STEPS=200 * room):
            try:
                solution = ExactSearch(problem, "auto").run()
            except PartitionError:
                return  # the rows that fit were not among the first
        assert best is not None
        assert step(problem, solution.plan) >= best[0] * (1 - 1e-12)
        least = solution.lower_bound_seconds
        assert least is None or least <= best[0] * (1 + 1e-12)

    @settings(max_examples=10, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6))
    def test_auto(self, problem: Problem) -> None:
        """The best plan of the class, or one still faster of those that it starts from."""
        best, found = agree(problem), solve(Auto(), problem)
        simple = [step(problem, plan) for plan in simple_plans(problem)]
        assert (found is None) == (best is None and not simple)
        if found is not None:
            least = min([*simple, *([] if best is None else [best[0]])])
            sizes = {size for replica in found[1].replicas for size in replica.microbatch_sizes[:1]}
            of_class = sizes <= {*microbatch_sizes(problem)} or all(len(r.microbatch_sizes) == 1 for r in found[1].replicas)
            assert found[0] == pytest.approx(least, rel=1e-12) if of_class else found[0] <= least * (1 + 1e-12)

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    @settings(max_examples=8, **UNHURRIED)
    @given(problems(most_devices=5, most_layers=7))
    def test_five_devices_seven_layers(self, problem: Problem) -> None:
        agree(problem)

    @pytest.mark.thorough
    @pytest.mark.timeout(1800)
    @settings(max_examples=8, **UNHURRIED)
    @given(problems(most_devices=6, most_layers=6, most_batch=5, least_devices=6))
    def test_six_devices(self, problem: Problem) -> None:
        agree(problem)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=3, most_layers=4), st.data())
    def test_with_prices(self, problem: Problem, data: st.DataObject) -> None:
        free = solve(Exhaustive(), problem)
        assume(free is not None and problem.schedule == "auto")
        assert free is not None
        options = {"backend": problem.backend, "allow_recompute": problem.allow_recompute}
        if data.draw(st.booleans()):
            limits = {"max_price_per_hour": data.draw(st.sampled_from([0.4, 0.5, 1.0, 2.0, 3.5]))}
        else:
            limits = {"deadline_seconds_per_step": free[0] * data.draw(st.sampled_from([0.9, 1.0, 1.3, 3.0]))}
        priced = make_problem(problem.cluster, problem.profile, problem.global_batch, **options, **limits)
        a, b = solve(searched, priced), solve(Exhaustive(), priced)
        if "max_price_per_hour" in limits:
            same(a, b)
            return
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert price(priced, a) == pytest.approx(price(priced, b), rel=1e-12)


def price(problem: Problem, found: tuple[float, Plan]) -> float:
    """Price of one step."""
    return found[0] * sum(problem.cluster.type_of(d).price_per_hour for d in found[1].device_ids)


class TestOrder:
    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6, most_batch=8))
    def test_bound_auto_chain_baselines(self, problem: Problem) -> None:
        best = solve(Auto(), problem)
        chain = solve(Chain(), problem)
        baselines = [solve(Even(), problem), solve(EvenDataParallel(), problem)]
        if best is None:
            assert chain is None
            return
        assert fluid_bound(problem) <= best[0] * (1 + 1e-12)
        if chain is not None:
            assert best[0] <= chain[0] * (1 + 1e-12)
            assert len(chain[1].replicas) == 1
        for found in baselines:
            assert found is None or fluid_bound(problem) <= found[0] * (1 + 1e-12)
        if baselines[0] is not None and chain is not None:
            assert chain[0] <= baselines[0][0] * (1 + 1e-12)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6), st.sampled_from(["speed", "memory"]))
    def test_better_devices_are_never_slower(self, problem: Problem, what: str) -> None:
        assume("a" in problem.cluster.device_types)
        before = solve(Auto(), problem)
        assume(before is not None)
        assert before is not None
        cluster, profile = problem.cluster, problem.profile
        document = cluster.model_dump()
        if what == "memory":
            document["device_types"]["a"]["memory"] *= 2
        else:
            measured = profile.model_dump()
            for m in measured["measurements"]:
                if m["device_type"] == "a":
                    for key in ("forward_seconds", "backward_seconds"):
                        m[key] = [[t * 0.5 for t in row] for row in m[key]]
            profile = type(profile).parse(measured, "faster")
        after = solve(
            Auto(),
            Problem.create(
                cluster=Cluster.parse(document, "better"),
                profile=profile,
                global_batch=problem.global_batch,
                schedule=problem.schedule,
                backend=problem.backend,
                allow_recompute=problem.allow_recompute,
                memory_reserve=problem.memory_reserve,
            ),
        )
        assert after is not None
        assert after[0] <= before[0] * (1 + 1e-12)

    @settings(max_examples=8, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6))
    def test_renaming_changes_nothing(self, problem: Problem) -> None:
        text = problem.cluster.to_json().replace('"n0"', '"zeta"').replace('"a"', '"zulu"')
        cluster = Cluster.model_validate_json(text)
        profile = type(problem.profile).model_validate_json(problem.profile.to_json().replace('"a"', '"zulu"'))
        renamed = Problem.create(
            cluster=cluster,
            profile=profile,
            global_batch=problem.global_batch,
            schedule=problem.schedule,
            backend=problem.backend,
            allow_recompute=problem.allow_recompute,
            memory_reserve=problem.memory_reserve,
        )
        same(solve(Auto(), renamed), solve(Auto(), problem))


class TestByHand:
    def test_two_equal_devices_share_the_batch(self) -> None:
        """Free links, no memory limit: 4 micro-batches each, no bubble."""
        problem = make_problem(make_cluster([{"a": 2}]), make_profile({"a": [1.0, 1.0]}), 8)
        found = solve(Auto(), problem)
        assert found is not None
        assert [len(r.microbatch_sizes) for r in found[1].replicas] == [4, 4]
        assert found[0] == pytest.approx(4 * 2 * 3.0)

    def test_unequal_devices_get_unequal_shares(self) -> None:
        """Type b is three times slower: 6 and 2 of 8 samples, both done after 36 s."""
        problem = make_problem(make_cluster([{"a": 1, "b": 1}]), make_profile({"a": [2.0], "b": [6.0]}), 8)
        found = solve(Auto(), problem)
        assert found is not None
        assert sorted(r.samples for r in found[1].replicas) == [2, 6]
        assert found[0] == pytest.approx(36.0)

    def test_memory_forces_a_pipeline(self) -> None:
        """Neither device holds 3 layers of 100 bytes (with gradient and AdamW's state: 400); a holds two, b one."""
        cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 900, "b": 500})
        profile = make_profile({"a": [1.0] * 3, "b": [2.0] * 3}, layer={"parameter_bytes": 100})
        found = solve(Auto(), make_problem(cluster, profile, 4))
        assert found is not None
        (replica,) = found[1].replicas
        assert {stage.layers[1] - stage.layers[0] for stage in replica.stages} == {1, 2}
        assert [s.devices[0] for s in replica.stages if s.layers[1] - s.layers[0] == 2] == ["n0/0"]

    def test_a_device_that_would_slow_things_down_is_left_out(self) -> None:
        problem = make_problem(make_cluster([{"a": 1, "b": 1}]), make_profile({"a": [1.0], "b": [100.0]}), 4)
        found = solve(Auto(), problem)
        assert found is not None
        assert found[1].device_ids == ("n0/0",)

    def test_recompute_only_where_it_must(self) -> None:
        """Three layers leave 100 bytes each per sample; 150 are there: recompute keeps 2 inputs of 10 and one
        layer's 100."""
        layer = {"saved_bytes_per_sample": 100, "output_bytes_per_sample": 10}
        profile = make_profile({"a": [1.0] * 3}, layer=layer)
        tight = make_problem(make_cluster([{"a": 1}], memory=150), profile, 2)
        found = solve(Auto(), tight)
        assert found is not None
        assert found[1].replicas[0].stages[0].recompute
        assert found[0] == pytest.approx(2 * 3 * (1 + 2 + 1))
        ample = solve(Auto(), make_problem(make_cluster([{"a": 1}], memory=400), profile, 2))
        assert ample is not None
        assert not ample[1].replicas[0].stages[0].recompute

    @pytest.mark.parametrize(("trained", "cut", "step"), [(100, 4, 10.8), (0, 6, 5.4)])
    def test_the_first_device_has_more_layers_where_these_do_not_train(self, trained: int, cut: int, step: float) -> None:
        """Six of eight layers, one forward of 0.1 s each; backwards take twice as long. 8 samples in one pipeline."""
        layers = [{"parameter_bytes": 100, "trained_bytes": 100 if i >= 6 else trained} for i in range(8)]
        cluster = make_cluster([{"a": 2}], memory=2_700, link={"bandwidth": 1e9, "latency": 0.0})
        profile = make_profile({"a": [0.1] * 8}, layers=layers)
        found = solve(Chain(), make_problem(cluster, profile, 8))
        assert found is not None
        assert [stage.layers for stage in found[1].replicas[0].stages] == [(0, cut), (cut, 8)]
        assert found[0] == pytest.approx(step)

    def test_even_splits_layers_evenly(self) -> None:
        problem = make_problem(make_cluster([{"a": 1, "b": 2}]), make_profile({"a": [1.0] * 8, "b": [2.0] * 8}), 4)
        found = solve(Even(), problem)
        assert found is not None
        assert [stage.layers for stage in found[1].replicas[0].stages] == [(0, 3), (3, 6), (6, 8)]
        assert found[1].device_ids == ("n0/0", "n0/1", "n0/2")

    def test_even_data_parallel_gives_equal_shares(self) -> None:
        profile = make_profile({"a": [1.0], "b": [2.0]}, sizes=(1, 2, 4), fixed=0.5)
        found = solve(EvenDataParallel(), make_problem(make_cluster([{"a": 1, "b": 2}]), profile, 8))
        assert found is not None
        assert [r.samples for r in found[1].replicas] == [3, 3, 2]


class TestNothingFits:
    CLUSTER = make_cluster([{"a": 1, "b": 1}], memory={"a": 1_000, "b": 500})

    def problem(self, parameters: list[int], **options: object) -> Problem:
        layers = [{"parameter_bytes": size} for size in parameters]
        profile = make_profile({"a": [1.0] * len(layers), "b": [2.0] * len(layers)}, layers=layers)
        return make_problem(self.CLUSTER, profile, 4, **options)

    @pytest.mark.parametrize("partitioner", [Auto(), Chain(), Exhaustive()])
    def test_one_layer_is_too_large(self, partitioner: Partitioner) -> None:
        with pytest.raises(PartitionError) as caught:
            partitioner(self.problem([10, 300, 10]))
        message = str(caught.value)
        assert "layer 1 ('layer.1') alone needs 1200 bytes on a 'a'" in message
        assert "200 bytes" in message
        assert "It would fit if you give each 'a' 240 bytes" in message or "give each 'a'" in message

    def test_the_bytes_it_asks_for_are_enough(self) -> None:
        """400 bytes per 100 of parameters: a holds two layers, b one; the fourth needs 200 more on a, or 300 on b."""
        problem = self.problem([100, 100, 100, 100])
        with pytest.raises(PartitionError, match="give each 'a' 200 bytes") as caught:
            Auto()(problem)
        assert "layer 0 ('layer.0') is left over" in str(caught.value)
        for more, fits in ((200, True), (199, False)):
            cluster = make_cluster([{"a": 1, "b": 1}], memory={"a": 1_000 + more, "b": 500})
            found = solve(Auto(), make_problem(cluster, problem.profile, 4))
            assert (found is not None) == fits

    def test_recompute_is_named_when_it_would_help(self) -> None:
        layer = {"saved_bytes_per_sample": 100, "output_bytes_per_sample": 10}
        profile = make_profile({"a": [1.0] * 3}, layer=layer)
        problem = make_problem(make_cluster([{"a": 1}], memory=150), profile, 2, allow_recompute=False)
        with pytest.raises(PartitionError, match="It would fit if you allow recompute"):
            Auto()(problem)

    def test_even_data_parallel_names_the_smallest_device(self) -> None:
        with pytest.raises(PartitionError, match=r"device n0/1 of type 'b', which has 500 bytes: 300 bytes are missing"):
            EvenDataParallel()(self.problem([100, 100]))

    def test_prices(self) -> None:
        cluster = make_cluster([{"a": 1}], price={"a": 2.0})
        problem = make_problem(cluster, make_profile({"a": [1.0]}), 2, max_price_per_hour=1.0)
        with pytest.raises(PartitionError, match=r"at most 1.0 per hour.*raise --max-price-per-hour to 2.0"):
            Auto()(problem)

    def test_baselines_refuse_prices(self) -> None:
        for partitioner in (Even(), EvenDataParallel()):
            with pytest.raises(InputError, match="cannot honour --max-price-per-hour"):
                partitioner(make_problem(self.CLUSTER, make_profile({"a": [1.0], "b": [1.0]}), 2, max_price_per_hour=1.0))


def test_exhaustive_refuses_many_devices() -> None:
    problem = make_problem(make_cluster([{"a": 9}]), make_profile({"a": [1.0] * 9}), 9)
    with pytest.raises(InputError, match="9 devices"):
        Exhaustive()(problem)


def test_progress_is_reported() -> None:
    said: list[str] = []
    Auto()(make_problem(make_cluster([{"a": 2}]), make_profile({"a": [1.0] * 4}), 4, progress=said.append))
    assert said


def test_six_devices_are_searched_to_the_end() -> None:
    """18 layers, 64 samples, three types with less memory the slower they are: the size of the demonstration. A search that
    takes more than its counted effort proves nothing."""
    cluster = make_cluster([{"a": 2, "b": 2, "c": 2}], memory={"a": 9_000, "b": 6_000, "c": 3_500})
    times = [0.3, *[1.0] * 16, 1.8]
    forward = {kind: [speed * t for t in times] for kind, speed in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    layer = {"parameter_bytes": 100, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 40}
    problem = make_problem(cluster, make_profile(forward, sizes=(1, 2, 4), layer=layer, fixed=0.3), 64)
    solution = Auto()(problem)
    assert solution.proof == "exhaustive"
    assert fluid_bound(problem) / step(problem, solution.plan) > 0.7


def test_many_devices_have_a_good_plan_by_a_counted_effort() -> None:
    problem = make_problem(make_cluster([{"a": 8}, {"b": 8}]), make_profile({"a": [1.0] * 8, "b": [2.0] * 8}), 64)
    found = solve(Auto(time_limit_seconds=5.0), problem)
    assert found is not None
    assert fluid_bound(problem) / found[0] > 0.85
