from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.schedule import default_depths
from hetpipe.partitioners.compositions.composition_bounds import composition_sizes, compositions
from hetpipe.partitioners.compositions.symmetry import Symmetry
from hetpipe.partitioners.exact.listing import rows_below
from hetpipe.partitioners.exact.plans import build_plan
from hetpipe.partitioners.exact.pricing import priced
from hetpipe.partitioners.stage_kinds.plan_class import load_of
from hetpipe.partitioners.stage_kinds.space import Space
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.predict.pipeline import PipelineCosts, pipeline_times, stage_ends
from hetpipe.predict.simulator import optimizers_of, replica_costs, simulate
from hetpipe.predict.sums import gradients_ahead
from hetpipe.predict.timeline import Timeline
from tests.support.strategies import UNHURRIED, make_cluster, make_profile, problems

FREE = {"bandwidth": 1e300, "latency": 0.0}


def pipeline(*forward: float, m: int, occupied: float = 0.0, latency: float = 0.0) -> PipelineCosts:
    """Backward takes twice as long as forward."""
    n = len(forward)
    column = np.array(forward)[:, None]
    return PipelineCosts(
        forward=column,
        backward=2 * column,
        occupied=np.full((n - 1, 1), occupied),
        latency=np.full(n - 1, latency),
        which=np.zeros(m, np.int64),
    )


def makespan(costs: PipelineCosts, depths: tuple[int, ...]) -> float:
    return max(stage.backward[-1] for stage in pipeline_times(costs, depths))


class TestPipeline:
    def test_two_stages_two_microbatches(self) -> None:
        """
        stage 0  F0 F1 .. .. B0 B0 .. B1 B1
        stage 1  .. F0 B0 B0 F1 B1 B1
        """
        first, second = pipeline_times(pipeline(1, 1, m=2), (2, 1))
        assert first.forward == [1, 2]
        assert second.forward == [2, 5]
        assert second.backward == [4, 7]
        assert first.backward == [6, 9]

    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
    @pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (4, 8), (5, 3)])
    def test_bubble_of_equal_stages(self, schedule: str, n: int, m: int) -> None:
        """(m + n - 1)(F + B), Huang et al. 2019 and Narayanan et al. 2021, for both schedules."""
        depths = default_depths(schedule, n, m)  # type: ignore[arg-type]
        assert makespan(pipeline(*[1.0] * n, m=m), depths) == 3 * (m + n - 1)

    def test_latency_is_hidden_by_deeper_warm_up(self) -> None:
        slow = pipeline(1, 1, 1, 1, m=16, latency=3.0)
        assert makespan(slow, (7, 5, 3, 1)) < makespan(slow, (4, 3, 2, 1))

    def test_transfers_wait_for_each_other(self) -> None:
        """The link takes 5 s a micro-batch: the second activation arrives at 1 + 5 + 5."""
        _, second = pipeline_times(pipeline(1, 1, m=2, occupied=5.0), (2, 1))
        assert second.forward == [7, 12]

    def test_latency_does_not_occupy_the_link(self) -> None:
        _, second = pipeline_times(pipeline(1, 1, m=2, latency=5.0), (2, 2))
        assert second.forward == [7, 8]


@settings(max_examples=30, **UNHURRIED)
@given(problems(most_devices=3, most_layers=5, tensor_parallel=True), st.data())
def test_pipelines_of_the_exact_search_are_the_same_bits(problem: Problem, data: st.DataObject) -> None:
    """When stages are ready and gradients made, in its compiled loop over rows."""
    try:
        space = Space(problem)
    except PartitionError:  # no device can have a stage
        assume(False)
    comp = data.draw(st.sampled_from(compositions(Symmetry(space), 100)[0]))
    load = load_of(problem.global_batch, data.draw(st.sampled_from(sorted(composition_sizes(space, comp)))))
    family = data.draw(st.sampled_from(space.families))
    rows, _ = rows_below(space, comp, family, load, math.inf, 0.0, 20)
    found = priced(space, rows, family, load, 1)
    for i in range(found.number):
        plan = build_plan(space, [found.pick(slice(i, i + 1))], "test")
        (replica,) = plan.replicas
        begin = max(optimizers_of(space.costs, replica))
        ready = [begin + end for end in stage_ends(replica_costs(space.costs, replica), replica.depths(plan.schedule))]
        assert found.ready[i].tolist() == ready
        ends = [end for end, stage in zip(ready, replica.stages, strict=True) for _ in range(*stage.layers)]
        ahead = gradients_ahead(space.costs, replica) if problem.sums_early else [0.0] * len(ends)
        assert found.made[i].tolist() == [end - before for end, before in zip(ends, ahead, strict=True)]


def two_replicas(optimizer: float = 0.0, link: dict[str, float] = FREE) -> Timeline:
    """Device n0/0 does 3 samples alone; n0/1 and n0/2 do 2 in a pipeline, cut behind layer 0."""
    profile = make_profile({"a": [1.0, 1.0]}, layer={"parameter_bytes": 100}, optimizer=optimizer)
    alone = ReplicaPlan(microbatch_sizes=(1, 1, 1), stages=(StagePlan(layers=(0, 2), devices=("n0/0",)),))
    both = ReplicaPlan(
        microbatch_sizes=(1, 1), stages=(StagePlan(layers=(0, 1), devices=("n0/1",)), StagePlan(layers=(1, 2), devices=("n0/2",)))
    )
    return simulate(Plan(model="test", global_batch=5, replicas=(alone, both)), profile, make_cluster([{"a": 3}], link=link))


class TestStep:
    def test_replicas_run_side_by_side(self) -> None:
        timeline = two_replicas()
        assert timeline.pipeline_seconds == timeline.step_seconds == 18
        assert timeline.spans == tuple(timeline.spans) != timeline.spans[1:]
        assert timeline.spans != timeline.spans[1:]
        ends = {span.device: span.end for span in timeline.spans if span.kind == "B"}
        assert ends == {"n0/0": 18, "n0/1": 9, "n0/2": 7}

    def test_a_step_begins_with_optimizers_and_each_pipeline_with_its_longest(self) -> None:
        timeline = two_replicas(optimizer=0.5)
        assert (timeline.optimizer_seconds, timeline.pipeline_seconds, timeline.step_seconds) == (1.0, 18.0, 19.0)
        optimizers = {span.device: (span.start, span.end) for span in timeline.spans if span.kind == "optimizer"}
        assert optimizers == {"n0/0": (0.0, 1.0), "n0/1": (0.0, 0.5), "n0/2": (0.0, 0.5)}
        begins = {x.device: x.start for x in timeline.spans if (x.kind, x.microbatch) == ("F", 0)}
        assert begins == {"n0/0": 1.0, "n0/1": 0.5, "n0/2": 1.5}

    def test_no_replica_waits_for_the_optimizer_of_another(self) -> None:
        """Steps that follow each other, of a device that works 9 s and one that takes 3 s for its optimizer:

        time   0   1   2   3   4   5   6   7   8   9  9.5
        fast   O F F F B B B B B B               sum, O F …
        slow   O O O O O O F F F B …             sum, O O …
        """
        profile = make_profile({"fast": [1.0], "slow": [2.0]}, layer={"parameter_bytes": 100})
        seconds = {"fast": (0.5,), "slow": (3.0,)}
        rows = [m.model_copy(update={"optimizer_seconds": seconds[m.device_type]}) for m in profile.measurements]
        replicas = tuple(
            ReplicaPlan(microbatch_sizes=(1,) * m, stages=(StagePlan(layers=(0, 1), devices=(f"n0/{i}",)),))
            for i, m in enumerate((3, 1))
        )
        cluster = make_cluster([{"fast": 1, "slow": 1}], link=FREE)
        timeline = simulate(
            Plan(model="test", global_batch=4, replicas=replicas),
            profile.model_copy(update={"measurements": tuple(rows)}),
            cluster,
        )
        assert timeline.step_seconds == 9.5  # not 9 + 3
        assert (timeline.optimizer_seconds, timeline.pipeline_seconds) == (0.5, 9.0)

    def test_gradient_sums_one_after_another(self) -> None:
        """Two segments of 100 bytes, each 2 rounds of 50 bytes at 50 bytes/s. n0/0, for which both wait, has made the gradients
        of layer 1 two seconds before it ends."""
        timeline = two_replicas(link={"bandwidth": 50.0, "latency": 0.0})
        sums = sorted({(span.start, span.end) for span in timeline.spans if span.kind == "sync"})
        assert sums == [(16, 18), (18, 20)]
        assert timeline.sync_seconds == 2

    def test_busy_and_bubble(self) -> None:
        timeline = two_replicas()
        assert timeline.busy_seconds() == {"n0/0": 18, "n0/1": 6, "n0/2": 6}
        assert timeline.bubble_fraction()["n0/1"] == pytest.approx(2 / 3)

    def test_a_size_above_the_measured_ones_warns(self) -> None:
        stage = StagePlan(layers=(0, 1), devices=("n0/0",))
        plan = Plan(model="test", global_batch=4, replicas=(ReplicaPlan(microbatch_sizes=(4,), stages=(stage,)),))
        timeline = simulate(plan, make_profile({"a": [1.0]}, sizes=(1, 2)), make_cluster([{"a": 1}]))
        assert timeline.step_seconds == 12
        (warning,) = timeline.warnings
        assert "micro-batches of 4 samples on 'a' are above the largest measured, 2" in warning


def test_replicas_that_are_alike_but_for_a_link() -> None:
    """
    n0 | n1   n0 | n2   n0 | n1      the output takes 1 s to n1 each way, 5 s to n2
    """
    cluster = make_cluster([{"a": 3}, {"a": 2}, {"a": 1}], link={"bandwidth": 1e300, "latency": 1.0}).model_dump()
    cluster["links"] = [{"between": ["n0", "n2"], "bandwidth": 1e300, "latency": 5.0}]
    replicas = [
        ReplicaPlan(
            microbatch_sizes=(1,), stages=(StagePlan(layers=(0, 1), devices=(a,)), StagePlan(layers=(1, 2), devices=(b,)))
        )
        for a, b in (("n0/0", "n1/0"), ("n0/1", "n2/0"), ("n0/2", "n1/1"))
    ]
    plan = Plan(model="test", global_batch=3, replicas=tuple(replicas))
    timeline = simulate(plan, make_profile({"a": [1.0, 1.0]}), Cluster.parse(cluster, "the test's cluster"))
    ends = {span.device: (span.replica, span.end) for span in timeline.spans if span.kind == "B"}
    assert [ends[r.stages[0].device] for r in replicas] == [(0, 8.0), (1, 16.0), (2, 8.0)]
    assert set(timeline.peak_bytes) == set(plan.device_ids)
