"""A job, end to end: what a plan trains is what one device trains, and what it leaves behind."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetpipe.building.build import build_data, build_model
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.predict.simulator import simulate
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.whereabouts import resume, resumes_from
from hetpipe.training.results.table import train_table
from hetpipe.training.runlog import write_report
from hetpipe.training.session import _check_profile
from hetpipe.training.start import profile_everywhere, run_everywhere, train_rank
from hetpipe.training.trainer import Trainer
from tests.support.jobs import POINTS, Folder, train
from tests.support.plans_shown import demo, three
from tests.support.runs import ONE, alone, assert_same, reference, trained


def test_two_epochs_with_partial_batches_are_those_of_one_device_and_leave_their_files(tmp_path: Path) -> None:
    """50 samples in batches of 12: four whole ones and one of 2, twice."""
    folder = Folder(tmp_path)
    file = folder.ready(train=train(steps=None, epochs=2))
    found, truth = trained(file), reference(file)
    assert_same(found, truth)
    assert (len(found.losses), found.samples) == (10, 100)
    assert found.losses[-1] < found.losses[0]
    assert found.evaluation is not None
    assert found.evaluation.weight == 20
    assert found.measured is not None
    assert sum(span.kind == "F" for span in found.measured.spans) == 2 * 3 + 2  # of step 8: the last one is partial

    lines = folder.lines("log/metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1, 1]
    assert [line["loss"] for line in lines] == found.losses[1::2]
    assert all(line["grad_norm"] > 0 and line["samples_per_second"] > 0 for line in lines)
    assert lines[0]["learning_rate"] > 0
    assert set(lines[0]["utilisation"]) == {"n0/0", "n0/1", "n1/0"}

    plan, profile = Plan.load(tmp_path / "log/plan.json"), Profile.load(tmp_path / "log/profile.json")
    assert plan == Plan.load(tmp_path / "plan.json")
    assert profile == Profile.load(tmp_path / "profile.json")
    summary = folder.read("log/summary.json")
    assert (summary["steps"], summary["samples"], summary["losses"]) == (10, 100, found.losses)
    assert (summary["first_loss"], summary["last_loss"]) == (found.losses[0], found.losses[-1])
    assert summary["test_loss"] == found.evaluation.loss
    assert summary["test_accuracy"] == found.evaluation.metric
    predicted = simulate(plan, profile, Cluster.load(tmp_path / "cluster.yaml"))
    assert summary["predicted_step_seconds"] == pytest.approx(predicted.step_seconds)
    assert summary["measured_step_seconds"] > 0
    assert set(summary["utilisation"]) == {"n0/0", "n0/1", "n1/0"}
    events = folder.read("log/trace.json")["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any("predicted" in name for name in names), names
    assert any("measured" in name for name in names), names
    page = (tmp_path / "log" / "report.html").read_text("utf-8")
    assert all(f'<section id="{name}"' in page for name in ("words", "picture", "timeline", "memory", "time", "measured"))
    assert '<section id="changes"' not in page


def test_a_report_that_cannot_be_made_is_a_warning_and_no_fault_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = demo()
    assert shown.profile is not None
    assert shown.cluster is not None
    with caplog.at_level("WARNING"):
        write_report(tmp_path, shown.plan, shown.profile, three().cluster or shown.cluster, None)
    assert list(tmp_path.iterdir()) == []
    assert "no report in " in caplog.text
    write_report(tmp_path, shown.plan, shown.profile, shown.cluster, None)
    assert '<section id="picture"' in (tmp_path / "report.html").read_text("utf-8")


CASES: dict[str, dict[str, Any]] = {
    "a plan of its own, and nothing to write": {"plan": {"partitioner": "chain"}, "log": None},
    "tied, SGD with momentum, no clipping": {
        "model": {"target": "tests.support.user_parts:tied"},
        "train": train(steps=6, optimizer={"name": "SGD", "lr": 0.05, "momentum": 0.9}, clip_norm=None, scheduler=None),
    },
    "fewer samples than the global batch": {
        "data": {"name": "random_classification", "args": {"samples": 5, "inputs": 8, "classes": 4}},
        "train": train(steps=4),
    },
    "tokens, with an index of its own ignored": {
        "loss": {"weight": "tokens", "ignore_index": 0},
        "train": train(steps=5, evaluate_samples=7),
    },
}


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES.keys())
def test_the_loss_curve_is_that_of_one_device(tmp_path: Path, sections: dict[str, Any]) -> None:
    file = Folder(tmp_path).ready(**sections)
    found, truth = trained(file), reference(file)
    assert_same(found, truth)
    assert (tmp_path / "log").exists() == (sections.get("log", "") is not None)


def test_a_global_batch_smaller_than_the_cluster(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready(plan={}, train=train(global_batch=2, steps=4))
    assert_same(trained(file), reference(file))
    with pytest.raises(RankFailure, match="a global batch of 2 leaves some of 3 devices idle"):
        trained(file, "plan.partitioner=even-data-parallel")


def test_devices_that_the_plan_leaves_unused_even_the_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file = folder.ready((1, 2), [{"cuts": [4, 2], "sizes": [6, 6]}])
    plan = tmp_path / "plan.json"
    plan.write_text(plan.read_text().replace("n0/", "n1/"))
    found = trained(file)
    assert_same(found, reference(file))
    assert found.measured is not None
    assert {span.device for span in found.measured.spans} == {"n1/0", "n1/1"}
    assert folder.read("log/summary.json")["losses"] == found.losses


def test_evaluate_samples_limits_the_evaluation_and_zero_leaves_it_out(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready()
    seven, none = (reference(file, "train.steps=2", f"train.evaluate_samples={count}") for count in (7, 0))
    assert seven.evaluation is not None
    assert seven.evaluation.weight == 7
    assert none.evaluation is None
    assert not (tmp_path / "log").exists()  # the reference writes nothing


def test_the_evaluation_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()
    monkeypatch.setattr(Activity, "say", lambda self, text: said.append(f"{self.title} {self.done} of {self.total} {text}"))
    alone(Folder(tmp_path).ready((1,), ONE), "train.steps=2", "train.evaluate_samples=13")
    assert [re.sub(r"loss.*", "loss", line) for line in said if line.startswith(("training", "evaluating"))] == [
        "training 1 of 2 loss",
        "training 2 of 2 loss",
        "evaluating 1 of 2 loss",
        "evaluating 2 of 2 loss",
    ]


def test_as_many_samples_are_evaluated_as_a_few_steps_train_unless_all_are_asked_for(tmp_path: Path) -> None:
    data = {**POINTS, "args": {**POINTS["args"], "test_samples": 60}}
    file = Folder(tmp_path).ready((1,), ONE, data=data)
    found = alone(file, "train.steps=1")
    assert [(each.samples, each.test_samples) for each in found.evaluations] == [(48, 60)]
    assert found.evaluation is not None
    assert found.evaluation.weight == 48
    said = io.StringIO()
    Console(file=said, width=100).print(train_table(found))
    assert "(48 of 60 samples;" in said.getvalue()
    assert "evaluate.samples=all takes all" in said.getvalue()
    found = alone(file, "train.steps=1", "train.evaluate_samples=all")
    assert found.evaluation is not None
    assert found.evaluation.weight == 60


def test_steps_that_are_far_from_their_prediction_are_noted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path)
    file = folder.ready(train=train(steps=13))
    folder.profile(file, seconds=1e-9)
    trained(file)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(said) == 1
    start = r"note: a step takes \S+ \S+, predicted \S+ \S+: the profile no longer holds"
    assert re.fullmatch(rf"{start}.* 'hetpipe profile' measures the devices and links as they are now", said[0])


def test_a_new_run_begins_its_log_anew(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log/metrics.jsonl").write_text('{"step": 1}\n{"step": 400}\n{"st')
    trained(folder.ready(train=train(steps=3)))
    assert [line["step"] for line in folder.lines("log/metrics.jsonl")] == [2, 3]


def test_measuring_planning_and_training_from_nothing_but_a_job_and_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds the first one's profile in the cache; a broken cache is measured again."""
    monkeypatch.chdir(tmp_path)
    folder = Folder(tmp_path)
    cache = tmp_path / "cache"
    folder.cluster(2, slowdown=2.0)
    measuring = {"microbatch_sizes": [2], "repeats": 1, "cache": str(cache)}
    file = folder.job(profile=None, plan={"partitioner": "chain"}, profiler=measuring, train=train(steps=2))
    trained(file)
    (kept,) = cache.iterdir()
    first = Profile.load(kept)
    assert Profile.load(tmp_path / "log/profile.json") == first
    assert [m.microbatch_sizes for m in first.measurements] == [(1, 2)]
    trained(file)
    assert Profile.load(kept).measurements == first.measurements  # (links may have been measured again)
    kept.write_text("{half a fi")
    trained(file)
    assert Profile.load(kept).layers == first.layers
    fresh = profile_everywhere(Job.read(file, ["profile=not-yet.json", "plan={file: not-yet.json}"]))
    assert fresh is not None
    assert fresh.layers == first.layers
    assert fresh.provenance["date"] == json.loads(kept.read_text())["provenance"]["date"]


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready()
    for setting, message in (
        ("model.args.width=8", "layer 0 is 'embed' with 1152 parameter bytes, in the model 'embed' with 576"),
        ("model.args.layers=5", "it has 6 layers, the model 7"),
        ("train.dtype=float32", "layer 0 is 'embed' with 1152 parameter bytes, in the model 'embed' with 576"),
        ("model={target: 'tests.support.user_parts:tied'}", "it is of model 'mlp', the job's is 'tests.support.user_parts:tied'"),
    ):
        with pytest.raises(RankFailure, match=message) as caught:
            run_everywhere(Job.read(file, [setting, "plan.file=", "train.steps=1"]), train_rank)
        assert "is not a profile of this model" in str(caught.value)


def test_a_profile_of_other_layers_that_train_is_refused_and_one_that_does_not_say_is_not(tmp_path: Path) -> None:
    job = Job.read(Folder(tmp_path).ready())
    model, profile = build_model(job, build_data(job)), Profile.load(tmp_path / "profile.json")
    layers = [layer.model_copy(update={"trained_bytes": 0}) if i == 2 else layer for i, layer in enumerate(profile.layers)]
    frozen = profile.model_copy(update={"layers": tuple(layers)})
    message = r"frozen.json is not .* \(of layer 2, 'block1', 0 parameter bytes train, in the model 8832\)"
    with pytest.raises(InputError, match=message):
        _check_profile(frozen, model, "frozen.json")
    model.layers[2].requires_grad_(False)
    _check_profile(frozen, model, "frozen.json")
    _check_profile(profile, model, "profile.json")


def test_faults_are_found_before_anything_is_measured(tmp_path: Path) -> None:
    """No profile is given, yet the message comes at once and nothing is in the cache."""
    folder = Folder(tmp_path)
    cache = tmp_path / "cache"
    sections: dict[str, Any] = {"profile": None, "profiler": {"cache": str(cache)}}
    folder.cluster(1)
    folder.plan([{"cuts": [5], "sizes": [4, 4, 4]}])
    for changes, message in (
        ({}, r"its stages cover layers \[0, 5\), but the model has 6 layers"),
        ({"plan": {"partitioner": "best"}}, "unknown partitioner 'best'"),
        ({"train": train(scheduler={"name": "Cosine"})}, "unknown scheduler 'Cosine'"),
    ):
        with pytest.raises(RankFailure, match=message) as caught:
            run_everywhere(Job.read(folder.job(**sections, **changes)), train_rank)
        assert caught.value.report is not None
        assert caught.value.report.code == 2
    assert not cache.exists()


def test_a_run_that_fails_before_it_loads_its_checkpoint_still_says_from_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    job = Job.read(folder.ready(checkpoint={"folder": "saved"}))
    monkeypatch.chdir(tmp_path)
    for step in (9, 40):
        (tmp_path / f"saved/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"saved/step-{step:08d}/trainer.json").touch()

    def fails(_: Job) -> None:
        raise RuntimeError("the ranks do not meet")

    monkeypatch.setattr("hetpipe.training.trainer.open_session", fails)
    try:
        with pytest.raises(RuntimeError, match="do not meet"):
            Trainer(job).run()
        assert resume() == "step 40, saved/step-00000040"
    finally:
        resumes_from("")
