"""Half precision: whatever the plan, and in whichever precision each of its devices computes, the gradients are those of one
device that runs the same micro-batches in the same precisions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetpipe import InputError
from hetpipe.documents.number_types import Precision
from hetpipe.documents.plan import Backend
from hetpipe.layers.model import mse, split_rows
from hetpipe.runtime.precision.loss_scale import LossScale
from tests.support.half import (
    OVERFLOWS,
    Half,
    HalfCase,
    half_on_one_device,
    scaled_on_one_device,
    train_half,
    train_scaled,
    try_callers,
)
from tests.support.nets import batch, build, copied
from tests.support.ranks import cluster_of, make_plan, run_ranks

THREE = {"cuts": [4, 3, 3], "sizes": [4] * 6}  # 24 samples
TWO = {"cuts": [6, 4], "sizes": [4, 4]}  # 8 beside them
UNEVEN = ({"cuts": [4, 3, 3], "sizes": [5, 4, 3, 2]}, {"cuts": [6, 4], "sizes": [2, 3, 5, 4, 1]})
SIDE: dict[str, Precision] = {"n0/0": "fp32", "n0/1": "bf16", "n0/2": "fp32", "n1/0": "bf16", "n1/1": "fp32"}
HALVES: dict[str, Precision] = {"n0/0": "fp16", "n0/1": "fp16", "n0/2": "fp16", "n1/0": "bf16", "n1/1": "bf16"}
CASES = [
    HalfCase(name="bf16", plan=(THREE, TWO), precision="bf16"),
    HalfCase(name="fp16", plan=UNEVEN, precision="fp16"),
    HalfCase(name="bf16, recomputed, gpipe", plan=({**THREE, "recompute": True}, TWO), precision="bf16", schedule="gpipe"),
    HalfCase(name="fp32 beside bf16 in one pipeline, gpipe", plan=UNEVEN, precision=SIDE, schedule="gpipe"),
    HalfCase(name="fp16 beside bf16", plan=UNEVEN, precision=HALVES),
    HalfCase(
        name="some layers without autocast in bf16", net="partly in full", plan=(THREE, TWO), precision="bf16", schedule="gpipe"
    ),
    HalfCase(
        name="some layers without autocast, recomputed, fp16 beside bf16",
        net="partly in full",
        plan=({**UNEVEN[0], "recompute": True}, UNEVEN[1]),
        precision=HALVES,
    ),
    HalfCase(name="tied words in bf16", net="tied", plan=(THREE, TWO), precision="bf16", schedule="gpipe"),
    HalfCase(name="tied words, fp16 beside fp32", net="tied", plan=UNEVEN, precision={**HALVES, "n1/0": "fp32", "n1/1": "fp32"}),
    HalfCase(
        name="a stage frozen in bf16, between trained ones",
        net="middle stage frozen",
        plan=UNEVEN,
        precision="bf16",
        frozen=torch.bfloat16,
        schedule="gpipe",
    ),
    HalfCase(
        name="a stage frozen in bf16, computed in fp16 beside bf16",
        net="last stage frozen",
        plan=UNEVEN,
        precision=HALVES,
        frozen=torch.bfloat16,
    ),
    HalfCase(
        name="few bits of its own, in bf16", net="few bits of its own", plan=(THREE, TWO), precision="bf16", schedule="gpipe"
    ),
    HalfCase(
        name="few bits of its own, fp16 beside bf16, recomputed",
        net="few bits of its own",
        plan=({**UNEVEN[0], "recompute": True}, UNEVEN[1]),
        precision=HALVES,
    ),
    HalfCase(name="tuples in fp16", net="tuples", plan=UNEVEN, precision="fp16", schedule="gpipe"),
]


def merged(results: list[Half]) -> tuple[list[list[float]], dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    losses, gradients, parameters = list[list[float]](), dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for result in results:
        losses.append(result.losses)
        for all_of, own in ((gradients, result.gradients), (parameters, result.parameters)):
            for name, value in own.items():
                all_of.setdefault({"9.weight": "0.weight"}.get(name, name), []).append(value)  # of "tied"
    return losses, gradients, parameters


@pytest.mark.parametrize("backend", ["torch", "fairscale", "torchgpipe"])
def test_gradients_are_those_of_one_device_in_the_same_precisions(backend: Backend) -> None:
    """Back end torch adds up in one device's order: bit for bit. The others begin with the last micro-batch."""
    cases = [case for case in CASES if backend == "torch" or case.schedule == "gpipe"]
    cluster = cluster_of(3, 2) if backend == "torch" else cluster_of(1, 1)
    results = run_ranks(train_half, cluster, cases, backend)
    for number, case in enumerate(cases):
        losses, gradients, parameters = merged([rank[number] for rank in results])
        truth, bound = half_on_one_device(case)
        exact = backend == "torch" and case.net != "tied"
        assert gradients.keys() == truth.gradients.keys(), case.name
        for name, wanted in truth.gradients.items():
            for found in gradients[name]:
                assert found.dtype == torch.float32, (case.name, name)
                assert bool(((found - wanted).abs() <= bound[name]).all()), (case.name, name, (found - wanted).abs().max())
                if exact:
                    assert torch.equal(found, wanted), (case.name, name)
        layers = case.build()
        types = {name: copied(p).dtype for name, p in layers.named_parameters()}
        assert types == {name: p[0].dtype for name, p in parameters.items()}
        for name, values in parameters.items():
            assert all(torch.equal(value, values[0]) for value in values), (case.name, name, "replicas")
            if exact:
                assert torch.equal(values[0], truth.parameters[name]), (case.name, name)
        assert all(own == losses[0] for own in losses)
        assert losses[0] == pytest.approx(truth.losses, rel=1e-6)
        plain, _ = half_on_one_device(HalfCase(name="fp32", net=case.net, plan=case.plan, precision="fp32"))
        assert any(not torch.equal(plain.gradients[name], g) for name, g in truth.gradients.items()), "half precision rounds"


def test_an_overflow_on_one_rank_is_left_out_on_all_and_the_scale_is_torchs() -> None:
    case = HalfCase(name="scaled", plan=(THREE, TWO), precision="fp16")
    results = run_ranks(train_scaled, cluster_of(3, 2), case)
    truth, sums = scaled_on_one_device(case)
    assert tuple(truth.overflowed) == OVERFLOWS
    for rank in results:
        found = rank["scaled"]
        assert found.scales == truth.scales
        assert found.overflowed == truth.overflowed
        assert found.steps_taken == truth.steps_taken
        for name, value in found.parameters.items():
            assert torch.equal(value, truth.parameters[name]), name
        overflowed, gradients = rank["added"][100]
        assert not overflowed
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, sums[name], rtol=1e-5, atol=1e-7)
        assert rank["added"][OVERFLOWS[0]][0], "what was added to it is lost with it"
        (told,) = rank["told"]
        assert told.startswith("layers [0, 4] compute in float16 by the plan, but the engine is called in torch.autocast of bfl")
        added, lost = rank["after"]
        assert all(not torch.equal(value, truth.parameters[name]) for name, value in added.items())
        assert all(torch.equal(value, added[name]) for name, value in lost.items())


def test_the_scale_does_not_leave_what_float32_has() -> None:
    scale = LossScale(2.0**127, 1)
    scale.update(overflow=False)
    assert scale.scale == 2.0**127
    for _ in range(300):
        scale.update(overflow=True)
    assert scale.scale == 2.0**-126
    scale.load_state_dict({"scale": 8.0, "good_steps": 7})  # of a longer interval
    scale.update(overflow=False)
    assert (scale.scale, scale.good) == (16.0, 0)
    for wrong in (0.0, -1.0, 3.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="the loss scale is .*; give a power of two"):
            LossScale(wrong)
    with pytest.raises(InputError, match="growth_interval is 0; give at least 1"):
        LossScale(growth_interval=0)


def test_what_callers_do_around_the_engine() -> None:
    """Autocast around a whole loop keeps the casts of weights from step to step; torch's own loops compute with old ones."""
    plan = make_plan([{"cuts": [5, 5], "sizes": [4, 4]}])
    ranks = run_ranks(try_callers, cluster_of(2), plan)
    layers, (x, y) = build("blocks", torch.float32), batch("blocks", 8, 0, torch.float32)
    optimizer, losses = torch.optim.SGD(layers.parameters(), lr=0.5), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(0.0)
        for part, wanted in zip(split_rows(x, [4, 4]), split_rows(y, [4, 4]), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(layers(part), wanted) * 0.5
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
    for rank in ranks:
        assert rank["around the loop"] == pytest.approx(losses, rel=1e-6)
        assert len(rank["told"]) == 2, "in a step and in an evaluation"
        assert all("the stages of replica 0 are called in other autocasts" in told for told in rank["told"])
        assert rank["a loss in float16"] == (True, 2.0**17), "as by a GradScaler: left out"
        assert rank["in a closure"] == (True, True)
        assert len(rank["unlike scales"]) == 1, "and once they are alike again, it goes on"
        assert "the ranks have different loss scales" in rank["unlike scales"][0]
