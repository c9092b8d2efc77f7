"""Jobs in half precision: what is measured and planned is trained; a run that is stopped goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hetpipe
from bench.reference import train_reference
from hetpipe import InputError
from hetpipe.building.build import build_layers
from hetpipe.documents.job import Job
from hetpipe.documents.profile import Profile
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank
from tests.support.commands import Command
from tests.support.half import half_frozen, own_bits
from tests.support.jobs import Folder, train
from tests.support.nets import copied

OVERFLOWING = {"initial": 2.0**30, "growth_interval": 3}  # a dozen steps until gradients no longer overflow


def half_train(**keys: object) -> dict[str, object]:
    return train(dtype="float32", precision="fp16", loss_scale=OVERFLOWING, **keys)


def weights(job: Path, folder: Path) -> dict[str, Tensor]:
    layers = build_layers(Job.read(job))
    hetpipe.load_weights(layers, folder)
    found: dict[str, Tensor] = layers.state_dict()
    return found


@pytest.fixture
def measured(folder: Folder) -> Path:
    """A job whose profile says that it was measured in fp16."""
    job = folder.ready(train=half_train(steps=24))
    document = folder.read("profile.json")
    for one in document["measurements"]:
        one["precision"] = "fp16"
    folder.write("profile.json", document)
    return job


def test_a_run_that_is_stopped_between_overflows_goes_on_bit_for_bit(folder: Folder, run: Command, measured: Path) -> None:
    ended = {}
    for name, parts in (("whole", (24,)), ("stopped", (5, 24))):
        place = folder.path / name
        for steps in parts:
            settings = (
                f"train.steps={steps}",
                f"checkpoint={{folder: {place}, every_steps: 5}}",
                f"log={{folder: {place}-log, every_steps: 1}}",
            )
            ended[name] = run("train", measured, *(x for s in settings for x in ("--set", s)))
            assert ended[name].code == 0, ended[name].err
    whole, stopped = (weights(measured, folder.path / name) for name in ("whole", "stopped"))
    assert all(torch.equal(value, whole[name]) for name, value in stopped.items())
    lines = {name: folder.lines(f"{name}-log/metrics.jsonl") for name in ended}
    scales = [line["loss_scale"] for line in lines["whole"]]
    assert min(scales) < 2.0**20 < scales[0]
    assert len(set(scales)) > 5
    assert [(line["step"], line["loss"], line["loss_scale"]) for line in lines["whole"]] == [
        (line["step"], line["loss"], line["loss_scale"]) for line in lines["stopped"]
    ]
    halved = [after < before for before, after in zip([OVERFLOWING["initial"], *scales], scales, strict=False)]
    assert [line.get("left_out", False) for line in lines["whole"]] == halved
    assert scales[0] == OVERFLOWING["initial"] / 2
    state = folder.read("whole/step-00000024/trainer.json")
    assert state["loss_scale"]["scale"] == scales[-1]


def test_where_no_scale_helps_the_run_ends_with_what_overflows(folder: Folder, run: Command, measured: Path) -> None:
    settings = (
        "train.loss_scale={initial: 1.0}",
        "train.optimizer={name: SGD, lr: 1.0e+6}",
        "train.clip_norm=null",
        "train.scheduler=null",
    )
    ended = run("train", measured, *(x for s in settings for x in ("--set", s)))
    assert ended.code == 1
    assert "not finite" in ended.err


def test_there_is_something_to_hold_in_half_precision(folder: Folder) -> None:
    job = Job.read(folder.job(train=train(dtype="float32", precision="bf16", frozen_dtype="bfloat16")))
    with pytest.raises(InputError, match="frozen_dtype is bfloat16, but all matrices of model 'mlp' train. Leave it out, or let"):
        build_layers(job)


def test_auto_is_measured_planned_and_trained(folder: Folder, run: Command) -> None:
    """On CPUs fp32 and bf16 are measured. An emulated type that is slow in fp32 trains in bf16, the other one in fp32."""
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {
            "new": {"memory": "1 GiB", "emulate": {"slowdown": {"fp32": 40.0, "bf16": 2.0}}},
            "old": {"memory": "1 GiB", "emulate": {"slowdown": {"fp32": 4.0}}},
        },
        "nodes": [{"name": "n0", "devices": {"new": 1, "old": 1}}],
        "link": {"bandwidth": "1 GB/s", "latency": "10 us"},
    }
    folder.write("cluster.yaml", document)
    job = folder.job(
        profile=None,
        plan={"partitioner": "even"},
        train=train(dtype="float32", precision="auto", steps=3),
        profiler={"microbatch_sizes": [1], "repeats": 1},
    )
    ended = run("train", job)
    assert ended.code == 0, ended.err
    assert folder.read("log/plan.json")["precision"] == {"new": "bf16", "old": "fp32"}
    found = {(m["device_type"], m.get("precision")) for m in folder.read("log/profile.json")["measurements"]}
    assert found == {("new", "fp32"), ("new", "bf16"), ("old", "fp32")}


def test_frozen_matrices_in_half_precision_are_measured_trained_and_saved(folder: Folder) -> None:
    """Under a plan and back under another one, on emulated devices, whose memory is counted."""
    file = folder.ready(
        (1, 1),
        rows=[{"cuts": [3, 3], "sizes": [6, 6]}],
        slowdown=2.0,
        model={"target": "tests.support.half:half_frozen"},
        checkpoint={"folder": "saved"},
        train=train(dtype="float32", precision="bf16", frozen_dtype="bfloat16", steps=4),
    )
    folder.plan([{"cuts": [3, 3], "sizes": [6, 6], "devices": ["n0/0", "n1/0"]}], model="tests.support.half:half_frozen")
    settings = ("profile=null", "profiler={microbatch_sizes: [1], repeats: 1}")

    def losses(*more: str) -> list[float]:
        result: TrainResult = run_everywhere(Job.read(file, (*settings, *more)), train_rank)
        assert result.predicted is not None
        assert result.peak_bytes.keys() == {"n0/0", "n1/0"}
        for device, peak in result.peak_bytes.items():
            predicted = result.predicted.peak_bytes[device]
            counters = 4 * 8  # bytes: AdamW counts the steps of each parameter
            assert 0.7 * predicted < peak <= predicted + counters, "kilobytes, of which what crosses stages is a large part"
        return result.losses

    whole = losses("checkpoint=")
    assert [*losses("train.steps=2"), *losses()] == whole
    saved = weights(file, Path("saved"))
    assert {name: value.dtype for name, value in saved.items() if value.dtype != torch.float32} == {
        "2.weight": torch.bfloat16,
        "4.weight": torch.bfloat16,
    }
    assert torch.equal(saved["2.weight"], half_frozen().get_parameter("2.weight").bfloat16())
    other: TrainResult = run_everywhere(Job.read(file, (*settings, "checkpoint=", "train.frozen_dtype=float32")), train_rank)
    assert other.losses == pytest.approx(whole, rel=1e-2)
    assert other.peak_bytes["n1/0"] > 0


FEW_BITS = {
    "2.matrix": torch.float8_e4m3fn,
    "2.packed": torch.uint8,
    "2.shift": torch.float8_e5m2,
    "4.matrix": torch.float8_e5m2,
    "4.packed": torch.uint8,
    "4.shift": torch.float8_e5m2,
}


def test_what_layers_keep_in_few_bits_of_their_own_is_measured_trained_and_saved_as_it_is(folder: Folder) -> None:
    """In jobs it was turned into float32; with precision= it was refused."""
    model = "tests.support.half:own_bits"
    sections: dict[str, Any] = {"rows": [{"cuts": [3, 3], "sizes": [6, 6]}], "model": {"target": model}}
    file = folder.ready((1, 1), **sections, train=train(dtype="float64", steps=4))
    folder.plan([{"cuts": [3, 3], "sizes": [6, 6], "devices": ["n0/0", "n1/0"]}], model=model)
    assert {name: t.dtype for name, t in build_layers(Job.read(file)).state_dict().items() if name in FEW_BITS} == FEW_BITS
    found: TrainResult = run_everywhere(Job.read(file, ("profile=null",)), train_rank)
    assert found.losses == pytest.approx(train_reference(Job.read(file)).losses, rel=1e-10)
    file = folder.ready(
        (1, 1), **sections, slowdown=2.0, checkpoint={"folder": "saved"}, train=train(dtype="float32", precision="bf16", steps=4)
    )
    folder.plan([{"cuts": [3, 3], "sizes": [6, 6], "devices": ["n0/0", "n1/0"]}], model=model)
    settings = ("profile=null", "profiler={microbatch_sizes: [1], repeats: 1}")

    def losses(*more: str) -> list[float]:
        result: TrainResult = run_everywhere(Job.read(file, (*settings, *more)), train_rank)
        assert result.predicted is not None
        assert result.peak_bytes.keys() == {"n0/0", "n1/0"}
        for device, peak in result.peak_bytes.items():
            assert 0 < peak <= result.predicted.peak_bytes[device] + 4 * 12, "what it casts is counted with each sample"
        return result.losses

    whole = losses("checkpoint=")
    assert [*losses("train.steps=2"), *losses()] == whole
    layer = Profile.load("log/profile.json").layers[2]
    trained = 4 * (2 * 16 + 16 * 2 + 16)
    assert (layer.parameter_bytes, layer.trained_bytes) == (trained + 16 * 16 + 16 * 8 + 4 * 16, trained)
    saved, built = weights(file, Path("saved")), own_bits().state_dict()
    assert {name: value.dtype for name, value in saved.items() if value.dtype != torch.float32} == FEW_BITS
    assert all(torch.equal(copied(saved[name]), copied(built[name])) for name in FEW_BITS)
    low = build_layers(Job.read(file, ("train.frozen_dtype=bfloat16",))).state_dict()
    assert {name: low[name].dtype for name in FEW_BITS} == FEW_BITS
    assert low["2.scale"].dtype == torch.bfloat16
