"""Training in the memory that was planned: peaks, recomputation, frozen layers, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from tests.support.jobs import MLP, POINTS, Folder, train
from tests.support.runs import reference, trained


def test_peak_bytes_of_emulated_devices_and_their_summary(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready(slowdown=2.0, train=train(steps=4, dtype="float32"))
    found = trained(file)
    assert set(found.peak_bytes) == {"n0/0", "n0/1", "n1/0"}
    assert found.predicted is not None
    for device, peak in found.peak_bytes.items():
        assert peak == pytest.approx(found.predicted.peak_bytes[device], rel=0.05), device
    assert (
        found.summary()["measured_step_seconds"] >= 2.0 * 6 * 4 * 2e-4
    )  # n1/0: 6 layers, 4 samples, forward and backward


def test_peak_bytes_of_many_micro_batches_are_those_in_flight(tmp_path: Path) -> None:
    """64 micro-batches of 4 samples, of which three, two and one are in flight; the middle stage recomputes."""
    folder = Folder(tmp_path)
    model, data = {**MLP, "args": {**MLP["args"], "width": 256}}, {**POINTS, "args": {**POINTS["args"], "samples": 256}}
    section = train(global_batch=256, steps=2, dtype="float32", evaluate_samples=0)
    rows = [{"cuts": [2, 2, 2], "sizes": [4] * 64}]
    file = folder.ready((3,), rows, slowdown=1.0, model=model, data=data, train=section)
    plan = folder.read("plan.json")
    plan["replicas"][0]["stages"][1]["recompute"] = True
    folder.write("plan.json", plan)
    found = trained(file)
    assert found.predicted is not None
    assert found.peak_bytes == pytest.approx(dict(found.predicted.peak_bytes), rel=0.03)


def test_a_recomputed_stage_with_the_loss_trains_in_the_memory_that_is_predicted(tmp_path: Path) -> None:
    """Of 512 classes, so that the loss saves more than a layer: no room for it beside the layer that is recomputed."""
    folder, classes = Folder(tmp_path), 512
    model = {**MLP, "args": {**MLP["args"], "outputs": classes}}
    data = {**POINTS, "args": {**POINTS["args"], "classes": classes}}
    file = folder.ready((1,), [{"cuts": [6], "sizes": [4, 4, 4], "recompute": True}], slowdown=1.0, model=model, data=data)
    cluster, profile = (kind.load(tmp_path / name) for kind, name in ((Cluster, "cluster.yaml"), (Profile, "profile.json")))
    peak = simulate(Plan.load(tmp_path / "plan.json"), profile, cluster).peak_bytes["n0/0"]  # type: ignore[arg-type]
    folder.cluster(1, memory=f"{peak + 1024} B", slowdown=1.0)  # AdamW counts the steps of each parameter
    found = trained(file)
    assert found.peak_bytes["n0/0"] == pytest.approx(peak, rel=0.03)


def test_a_mostly_frozen_model_is_planned_and_trained_where_it_could_not_train_as_a_whole(tmp_path: Path) -> None:
    """Its parameters take half a megabyte, with all gradients and AdamW's state two."""
    folder = Folder(tmp_path)
    file = folder.job(
        model={"target": "tests.support.user_parts:mostly_frozen"},
        plan={"partitioner": "auto"},
        train=train(steps=3, dtype="float32"),
    )
    folder.cluster(2, memory="600 KiB", slowdown=1.0)
    profile, cluster = Profile.load(folder.profile(file)), Cluster.load(tmp_path / "cluster.yaml")
    assert [layer.trained for layer in profile.layers] == [0, 0, 0, 0, 256 * 4, 257 * 4 * 4]
    whole = tuple(layer.model_copy(update={"trained_bytes": None}) for layer in profile.layers)
    with pytest.raises(PartitionError, match="no plan fits"):
        make_plan(profile.model_copy(update={"layers": whole}), cluster, 12)
    found, truth = trained(file), reference(file)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(truth.losses), rtol=0, atol=1e-5)
    assert found.losses[-1] < found.losses[0]
    assert found.predicted is not None
    assert found.peak_bytes.keys() == found.predicted.peak_bytes.keys()
    for device, peak in found.peak_bytes.items():
        assert 0.9 * found.predicted.peak_bytes[device] < peak <= found.predicted.peak_bytes[device] * 1.01, device


def test_stages_below_all_that_trains_hold_what_is_predicted_and_run_no_backward(tmp_path: Path) -> None:
    """Two stages of three, with a warm-up of eight: of 16 micro-batches two are in flight there. (The inputs of the step, 64 of 8
    numbers, are there as well, but emulated devices count of them only what autograd saves.)"""
    folder = Folder(tmp_path)
    section = train(global_batch=64, steps=2, dtype="float32", evaluate_samples=0)
    rows = [{"cuts": [2, 2, 2], "sizes": [4] * 16, "warmup": [8, 8, 1]}]
    file = folder.ready((3,), rows, slowdown=1.0, model={"target": "tests.support.user_parts:mostly_frozen"}, train=section)
    found = trained(file)
    assert found.predicted is not None
    predicted = dict(found.predicted.peak_bytes)
    predicted["n0/0"] -= 64 * 8 * 4
    assert found.peak_bytes == pytest.approx(predicted, rel=0.03)
    for timeline in (found.measured, found.predicted):
        assert timeline is not None
        actions = {(span.stage, span.kind) for span in timeline.spans if span.kind in ("F", "B")}
        assert actions == {(0, "F"), (1, "F"), (2, "F"), (2, "B")}


def test_an_emulated_device_out_of_memory_names_rank_stage_and_device(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready(slowdown=1.0, memory="20 KiB")
    with pytest.raises(RankFailure) as caught:
        trained(file)
    text = str(caught.value)
    assert "OutOfMemoryError: out of memory on rank" in text
    assert "of 20480 bytes (the device type's memory in the cluster file)" in text
    assert any(f"rank {rank}, {place}" in text for rank, place in enumerate(
        ("replica 0 stage 0, device n0/0", "replica 0 stage 1, device n0/1", "replica 1 stage 0, device n1/0")))  # fmt: skip
    assert caught.value.report is not None
