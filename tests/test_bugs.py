"""One test for each fault that was found and fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.measuring.discover import cluster_of
from hetpipe.partitioners.chain import Chain
from hetpipe.partitioners.memory_fit.obstacle import explain
from hetpipe.partitioners.memory_fit.packing import Packer, samples_of
from hetpipe.partitioners.search.planner import Planner
from hetpipe.predict.cost import Costs
from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.replicas import OwnerGroup
from tests.support.strategies import make_cluster, make_problem, make_profile

LAYER = {"parameter_bytes": 100, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 50}


def test_a_group_behind_one_device_gathers_too() -> None:
    """From one device to a group of 4 the activation was free to reach the other three."""
    measured = make_profile({"a": [1.0, 1.0]}, layer=LAYER).model_dump()
    one = measured["measurements"][0]
    profile = Profile.parse(measured | {"measurements": [one, one | {"tensor_parallel": 4}]}, "profile")
    inside = {"bandwidth": 100.0, "latency": 0.5}
    costs = Costs(profile, make_cluster([{"a": 1}, {"a": 4}], link={"bandwidth": 10.0, "latency": 1.0}, inside=inside))
    half = 3 * (0.5 + 10 / 4 / 100) / 2  # the output in the group of 4; its gradient, in the one device, is free
    assert costs.transfer("n0/0", "n1/0", 1, 1, (1, 4)) == pytest.approx((1.0, 1.0 + half))
    assert costs.transfer("n1/0", "n0/0", 1, 1, (4, 1)) == pytest.approx((1.0, 1.0 + half))


def test_a_backward_outside_a_step_launches_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on one model, the first not used yet: it took the gradients, and summed over ranks, in the other's step."""
    layer = nn.Linear(2, 1, bias=False)
    parameters = (layer.get_parameter("weight"),)
    sums: list[object] = []
    group: Any = object()
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, **_: sums.append(tensor))
    unused = GradientSync([OwnerGroup("layers 0:1", (0, 1), parameters)], {(0, 1): group}, 0)
    used = GradientSync([OwnerGroup("layers 0:1", (0,), parameters)], {}, 0)
    used.begin()
    for passes_left in (1, 0):
        if not passes_left:
            used.last_backward()
        layer(torch.ones(1, 2)).sum().backward()
    used.finish()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 2.0]]
    assert used.square_norm() == pytest.approx(8.0)
    assert not sums
    unused.close()


def test_unlike_gpus_in_alternation_are_refused() -> None:
    """The second GPU was taken for one of the first's type."""
    rows = [(0, 0, "a", 8), (0, 1, "b", 4), (1, 0, "b", 5), (0, 2, "b", 6)]
    cluster = cluster_of(rows)
    assert [(d.id, d.type) for d in cluster.devices] == [("n0/0", "a"), ("n0/1", "b"), ("n0/2", "b"), ("n1/0", "b")]
    assert cluster.device_types["b"].memory == 4
    with pytest.raises(InputError, match=r"agent 0 are, by local rank, \['a', 'b', 'b', 'a'\].*CUDA_VISIBLE_DEVICES"):
        cluster_of([*rows, (0, 3, "a", 8)])


def test_recompute_holds_the_input_of_a_stage_where_no_buffer_does() -> None:
    """With one receive buffer each way every micro-batch in flight keeps its own input."""

    def held(receive_buffers: str, lo: int) -> float:
        overhead: dict[str, Any] = {"receive_buffers": receive_buffers}
        costs = Costs(make_profile({"a": [1.0] * 3}, layer=LAYER), make_cluster([{"a": 1}], overhead=overhead))
        return costs.stage_memory("a", lo, 3, samples=4, recompute=True).held_per_sample

    assert (held("step", 1), held("one", 1)) == (10 + 10, 10 + 10 + 10)
    assert held("step", 0) == held("one", 0) == 20 + 10  # the first stage's input has no bytes here


def test_a_lighter_boundary_counts_where_nothing_fits() -> None:
    """
    layers    0   1   2     the output of layer 0 is heavy, those of 1 and 2 light; layer 2 has no parameters
    n0/0     |-------|
    n0/1             |---|  holds [1, 3) as well, but then the heavy output is received, and sent by a stage [0, 1)
    """
    layers = [LAYER | {"output_bytes_per_sample": size} for size in (100, 1, 1)]
    layers[2] |= {"parameter_bytes": 0}
    problem = make_problem(
        make_cluster([{"a": 2}], memory=1_040, overhead={"receive_buffers": "step"}),
        make_profile({"a": [1.0] * 3}, layers=layers),
        4,
    )
    packer = Packer(problem)
    last, before = (packer.fits(0, 4, place, 1) for place in (1, 2))
    assert (last[3, 1], before[1, 0]) == (True, False)
    assert samples_of(packer.packing(one_pipeline=True)) == 4
    assert [stage.layers for stage in Chain()(problem).plan.replicas[0].stages] == [(0, 2), (2, 3)]


def test_receive_buffers_of_a_whole_step_are_shared_by_pipelines() -> None:
    """One pipeline cannot receive 6 inputs of 100 bytes; two of 3 can, and the message counts both."""
    profile = make_profile({"a": [1.0]}, layer=LAYER).model_dump() | {"input_bytes_per_sample": 100}
    tight = make_problem(make_cluster([{"a": 2}], memory=760), Profile.parse(profile, "profile"), 7)
    message = str(explain(tight))
    assert "6 of the 7 samples of a step are the most that were found to fit (2 pipelines)" in message
    assert "use a global batch of 6 instead of 7" in message
    assert "give each 'a' 100 bytes" in message
    assert "add 1 'a'" in message


def test_a_copy_forgets_what_was_computed_of_the_original() -> None:
    """The times of a slower measurement were the old ones where they had been looked at before."""
    measured = make_profile({"a": [1.0], "b": [2.0]})
    one = measured.measurement("a")
    assert one.times(1)[0].tolist() == [1.0]
    assert one.slower(2.0).times(1)[0].tolist() == [2.0]
    fewer = measured.model_copy(update={"measurements": (one.model_copy(update={"device_type": "c"}),)})
    assert fewer.measurement("c").times(1)[0].tolist() == [1.0]


def test_pipelines_are_built_with_micro_batches_that_all_their_kinds_were_measured_at() -> None:
    """One of local search had micro-batches of 1 on a split stage that was measured at 2: a plan below the bound of all plans."""
    sizes = [{"parameter_bytes": size} for size in (515, 486, 0, 0, 0, 0, 0)]
    document = make_profile({"a": [1.0] * 7}, layers=sizes, backward=0.5).model_dump()
    (one,) = document["measurements"]
    two = {"tensor_parallel": 2, "microbatch_sizes": [2], "forward_seconds": [[0.8] * 7], "backward_seconds": [[0.4] * 7]}
    profile = Profile.parse(document | {"measurements": [one, one | two]}, "profile")
    inside = {"points": [[1, 0.125], [500, 0.125], [20_000, 0.125]]}
    planner = Planner(make_problem(make_cluster([{"a": 7}], memory=4_000, inside=inside), profile, 7))
    assert planner.run() is not None
    assert planner.lower.bound <= planner.assembly.step
