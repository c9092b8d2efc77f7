"""AlexNet learns real images over four emulated devices; and every job of configs/ can be read and built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe.building.build import build_data, build_model, check_training
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from tests.support.commands import ROOT, hetpipe
from tests.support.external import CIFAR10, NEEDS_CIFAR10

JOBS = sorted(ROOT.glob("configs/jobs/*.yaml"))


@pytest.mark.parametrize("file", JOBS, ids=[file.stem for file in JOBS])
def test_jobs_of_configs_can_be_read_and_built(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert file.read_text().startswith("# "), "the first comment is the command"
    job = Job.read(file)
    job.check_files()
    check_training(job)
    if job.data.name == "cifar10" and not CIFAR10.is_dir():
        pytest.skip("HETPIPE_DATA names no folder that holds 'cifar-10-batches-bin'")
    model = build_model(job, build_data(job))
    assert len(model.layers) >= 6


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/clusters/*.yaml")), ids=lambda file: file.stem)
def test_emulated_clusters_of_configs_can_be_paced_on_two_cores(file: Path) -> None:
    """The host must be able to compute for all of them at once, with room for everything that is not emulated."""
    cluster = Cluster.load(file)
    kinds = [(device.type, cluster.type_of(device.id).emulate) for device in cluster.devices]
    assert sum(1 / emulate.slowdown_at(None, kind) for kind, emulate in kinds if emulate is not None) <= 0.7 * 2


@pytest.mark.thorough
@pytest.mark.timeout(600)
@NEEDS_CIFAR10
def test_alexnet_learns_cifar10_over_four_emulated_devices(tmp_path: Path) -> None:
    cluster = ROOT / "configs" / "clusters" / "four-emulated.yaml"
    settings = (f"cluster={cluster}", "log.folder=log")
    job = str(ROOT / "configs" / "jobs" / "alexnet-cifar10.yaml")
    ended = hetpipe("train", job, "--json", *(part for s in settings for part in ("--set", s)), folder=tmp_path, timeout=280)
    assert (ended.code, ended.leftover) == (0, []), ended.err
    result = json.loads(ended.out)
    losses, epoch = result["losses"], -(-5 * 1017 // 64)
    first, second = sum(losses[:epoch]) / epoch, sum(losses[epoch:]) / epoch
    print(
        f"AlexNet: mean loss {first:.3f}, then {second:.3f}; test accuracy {result['test_accuracy']:.1%}; "
        f"step {result['measured_step_seconds']:.3f} s, predicted {result['predicted_step_seconds']:.3f} s"
    )
    assert len(losses) == 2 * epoch
    assert second < first < 2.4
    assert losses[-1] < losses[0]
    assert result["test_accuracy"] > 0.20
    plan = json.loads((tmp_path / "log/plan.json").read_text())
    devices = {device for replica in plan["replicas"] for stage in replica["stages"] for device in stage["devices"]}
    assert len(devices) > 1
    assert set(result["utilisation"]) == devices
