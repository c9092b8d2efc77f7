"""A run that loses a rank goes on with those that are left, from the last step of which all state is left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.processes.ranks import launch
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import train_everywhere, train_rank
from tests.support.jobs import Folder, train
from tests.support.ranks import cluster_of
from tests.support.runs import reference

KILLED = "tests.support.user_parts:failing"
TWO_AND_WHOLE: list[dict[str, Any]] = [{"cuts": [3, 3], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2], "devices": ["n0/2"]}]
ALONE: list[dict[str, Any]] = [{"cuts": [2, 2, 2], "sizes": [4, 4, 4]}]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a rank leaves word that it was killed


def elastic(folder: Path, rows: Sequence[dict[str, Any]], *, how: str = "kill once", every: int = 100, **section: Any) -> Job:
    """A job of which rank 1 is killed in its fourth step, where its layers get three micro-batches a step."""
    model = {"target": KILLED, "args": {"how": how, "step": 3 * 4}}
    saving = {"folder": str(folder / "saved"), "every_steps": every}
    training = train(steps=8, evaluate_samples=0, scheduler={"name": "StepLR", "step_size": 2, "gamma": 0.5})
    return Job.read(Folder(folder).ready((3,), rows, model=model, train=training, checkpoint=saving, elastic=section))


def of_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def end(job: Job) -> TrainResult:
    result = train_everywhere(job, train_rank)
    assert isinstance(result, TrainResult)
    return result


def test_no_step_is_redone_where_a_replica_has_all_that_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 has layers 3 to 6 of replica 0, which replica 1 has, too; nothing was saved before."""
    job = elastic(tmp_path, TWO_AND_WHOLE)
    result = end(job)
    assert "device n0/1 was killed by SIGKILL" in caplog.text
    assert "going on without n0/1 (restart 1 of 3)" in caplog.text
    assert f"the ranks that were left have kept all of step 3: it is {tmp_path}/saved/step-00000003" in caplog.text
    assert result.first_step == 3
    assert result.losses == pytest.approx(reference(tmp_path / "job.yaml", "model.args.only_rank=9").losses[3:], rel=1e-9)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6, 8]
    assert of_folder(tmp_path / "saved") == ["step-00000003", "step-00000008"]
    assert set(Plan.load(tmp_path / "log" / "plan.json").device_ids) <= {"n0/0", "n0/1"}, "those that are left count anew"


def test_all_that_are_left_keep_their_layers_at_the_same_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The fourth of six stages is lost: the others wait for each other, and the last layers are those of the other replica."""
    rows: list[dict[str, Any]] = [{"cuts": [1] * 6, "sizes": [4, 4]}, {"cuts": [6], "sizes": [4], "devices": ["n0/6"]}]
    model = {"target": "tests.support.user_parts:failing", "args": {"how": "kill once", "step": 2 * 3, "only_rank": 3}}
    saving = {"folder": str(tmp_path / "saved"), "every_steps": 100}
    job = Job.read(Folder(tmp_path).ready((7,), rows, model=model, train=train(steps=4), checkpoint=saving, elastic={}))
    result = end(job)
    assert "kept all of step 2" in caplog.text
    assert result.first_step == 2


def test_a_run_goes_on_from_its_checkpoint_where_state_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = elastic(tmp_path, ALONE, every=2)
    result = end(job)
    assert "going on without n0/1" in caplog.text
    assert "kept all" not in caplog.text
    assert result.first_step == 2
    assert result.losses == pytest.approx(reference(tmp_path / "job.yaml", "model.args.only_rank=9").losses[2:], rel=1e-9)
    assert not [name for name in of_folder(tmp_path / "saved") if not name.startswith("step-0") or "." in name]


def test_a_run_ends_after_as_many_restarts_as_it_may_make(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="device n0/1 was killed by SIGKILL") as caught:
        train_everywhere(elastic(tmp_path, ALONE, how="kill", restarts=0), train_rank)
    assert caught.value.lost == ("n0/1",)


@pytest.mark.parametrize(("call", "step"), [(10, 4), pytest.param(11, 5, marks=pytest.mark.thorough)])
def test_what_comes_behind_a_step_is_done_once_though_the_main_rank_is_lost(tmp_path: Path, call: int, step: int) -> None:
    """Killed in a step, or in the evaluation behind one: the log has each step and each evaluation, as that of a run to which
    nothing happened, and patience ends as soon."""
    rows: list[dict[str, Any]] = [{"cuts": [6], "sizes": [4, 4]}, {"cuts": [3, 3], "sizes": [2, 2], "devices": ["n0/1", "n0/2"]}]
    parts: dict[str, Any] = {
        "model": {"target": KILLED, "args": {"how": "kill once", "step": call, "only_rank": 0}},
        "train": train(steps=8, evaluate_samples=None),
        "evaluate": {"every_steps": 2, "samples": 8, "patience": 2, "metric": "accuracy"},
        "log": {"folder": str(tmp_path / "log"), "every_steps": 1},
        "checkpoint": {"folder": str(tmp_path / "saved"), "every_steps": 100},
        "elastic": {},
    }
    job = Job.read(Folder(tmp_path).ready((3,), rows, **parts))
    assert end(job).first_step == step
    whole = tmp_path / "whole"
    whole.mkdir()
    end(Job.read(tmp_path / "job.yaml", ["model.args.only_rank=9", f"log.folder={whole}", f"checkpoint.folder={whole}/saved"]))
    assert lines(tmp_path / "log") == lines(whole)


def lines(log: Path) -> list[dict[str, Any]]:
    """What a log says of steps and evaluations, but no times."""
    records = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    timed = ("step_seconds", "samples_per_second", "utilisation")
    return [
        {key: round(value, 8) for key, value in record.items() if key not in timed} for record in records if "drift" not in record
    ]


def test_devices_that_were_lost_are_tried_again_after_the_next_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = elastic(tmp_path, TWO_AND_WHOLE, every=1, join=True)
    result = end(job.model_copy(update={"train": job.train.model_copy(update={"steps": 150})}))
    assert "saved: trying the devices that were lost once more" in caplog.text
    assert Plan.load(tmp_path / "log" / "plan.json").device_ids == ("n0/0", "n0/1", "n0/2")
    truth = reference(tmp_path / "job.yaml", "model.args.only_rank=9", "train.steps=150").losses
    assert result.losses == pytest.approx(truth[result.first_step :], rel=1e-8)


def test_a_device_that_is_lost_twice_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, started, ends = elastic(tmp_path, TWO_AND_WHOLE, join=True), list[tuple[int, bool]](), ["lost", "join", "lost", "end"]

    def start(program: Any, arguments: Any, devices: Sequence[Any], how: launch.Elastic) -> str:
        started.append((len(devices), how.join))
        ending = ends[len(started) - 1]
        if ending == "lost":
            raise RankFailure("n0/2 is gone", None, "", ["n0/2"])
        if ending == "join":
            raise launch.Rejoin
        return ending

    monkeypatch.setattr("hetpipe.training.start._start", start)
    assert train_everywhere(job, train_rank) == "end"
    assert started == [(3, False), (2, True), (3, False), (2, False)]


def test_a_device_whose_process_stands_still_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not end; the others find out when a message does not come in time."""
    monkeypatch.setenv("HETPIPE_TIMEOUT_SECONDS", "6")
    job = elastic(tmp_path, TWO_AND_WHOLE, how="stop once")
    result = end(job)
    assert result.first_step == 3
    assert result.losses == pytest.approx(reference(tmp_path / "job.yaml", "model.args.only_rank=9").losses[3:], rel=1e-9)


def test_a_job_that_cannot_go_on_from_anywhere_is_refused(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready()
    with pytest.raises(InputError, match=r"from what is in its folder of checkpoints, but the job saves none"):
        Job.read(file, ["elastic={}"])
    with pytest.raises(InputError, match=r"with plan.backend fairscale one process drives a replica"):
        Job.read(file, ["elastic={}", "plan.backend=fairscale", "checkpoint.folder=there"])


def test_a_cluster_without_some_devices() -> None:
    types = {"a": {"memory": 1}, "b": {"memory": 2}}
    nodes = [{"name": "n0", "devices": {"a": 2, "b": 1}}, {"name": "n1", "devices": {"b": 1}}]
    whole = Cluster.parse({"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}, "the test's")
    left = whole.without(["n0/0", "n1/0"])
    assert [(device.id, device.type) for device in left.devices] == [("n0/0", "a"), ("n0/1", "b")]
    assert whole.without([]).devices == whole.devices


@pytest.mark.parametrize(
    ("named", "kept", "seen"), [(None, [0, 2], "0,2"), ("4,5,6", [1, 2], "5,6"), ("GPU-a,GPU-b", [1], "GPU-b")]
)
def test_cards_of_lost_ranks_are_not_seen(monkeypatch: pytest.MonkeyPatch, named: str | None, kept: list[int], seen: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    devices = cluster_of(3, 1).devices
    own = launch.rank_environment([d for d in devices if d.node == "n0" and d.index in kept], 0, 1, [devices[3]])
    assert (own["CUDA_VISIBLE_DEVICES"], own["HETPIPE_WITHOUT"], own["HETPIPE_NODE"]) == (seen, "n1/0", "n0")
    assert "CUDA_VISIBLE_DEVICES" not in launch.rank_environment(devices, 0, 1)
