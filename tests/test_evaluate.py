"""The section `evaluate`: the same stop, best step and weights under every plan; a set of its own; what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from hetpipe import InputError
from hetpipe.building.build import build_data
from hetpipe.building.content import Content
from hetpipe.building.datasets import random_classification
from hetpipe.building.evaluated import build_metric
from hetpipe.checkpoints.best import Best, Measured, SavedBest
from hetpipe.checkpoints.checkpoint import list_checkpoints, read_state
from hetpipe.documents.job import Job
from hetpipe.documents.sections.evaluate import EvaluateSection
from hetpipe.layers.model import Loss, mse
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.training.results.exported import best_of_job
from hetpipe.training.runlog import TrainResult
from tests.support.jobs import POINTS, Folder, train
from tests.support.runs import trained
from tests.test_stopping import tensors_of

PLANS: dict[str, list[dict[str, Any]]] = {
    "two replicas": [{"cuts": [4, 2], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2]}],
    "one pipeline": [{"cuts": [3, 3], "sizes": [4, 4, 4]}],
    "one device": [{"cuts": [6], "sizes": [12]}],
}
# a rate at which the loss of other samples first falls, and then rises
TRAIN = train(steps=40, global_batch=12, optimizer={"name": "Adam", "lr": 0.05})
EVALUATE = {"every_steps": 4, "patience": 3}


def squares(outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """How far the greatest output is from the target, squared."""
    return float((outputs.argmax(-1) - targets).square().sum()), len(targets)


def folder_of(tmp_path: Path, plan: str = "two replicas", **sections: Any) -> Path:
    folder = Folder(tmp_path)
    checkpoint = {"folder": str(tmp_path / "saved"), "every_steps": 100, "keep": 1}
    return folder.ready(
        (2, 1),
        PLANS[plan],
        data=POINTS,
        train=TRAIN,
        evaluate=EVALUATE,
        checkpoint=checkpoint,
        export={"folder": str(tmp_path / "weights")},
        **sections,
    )


def told(result: TrainResult) -> tuple[list[int], Any, Any, int]:
    """The steps of the evaluations, the best one, that of the weights, and the last."""
    steps = [record.step for record in result.evaluations]
    return steps, result.best and result.best.step, result.exported_step, result.first_step + len(result.losses)


def test_stop_best_and_weights_are_the_same_under_every_plan(tmp_path: Path) -> None:
    found = {}
    for plan in PLANS:
        place = tmp_path / plan.replace(" ", "-")
        place.mkdir()
        file = folder_of(place, plan)
        result = trained(file)
        found[plan] = told(result)
        steps, best, exported, last = found[plan]
        losses = {record.step: record.loss for record in result.evaluations}
        assert best == exported == min(losses, key=lambda step: losses[step])
        assert steps == list(range(4, last + 1, 4))
        assert last == best + 3 * 4 < 40, "after three that are not better"
        assert {path.name for path in list_checkpoints(place / "saved")} == {f"step-{best:08d}", f"step-{last:08d}"}
        lines = [json.loads(line) for line in (place / "log" / "metrics.jsonl").read_text().splitlines()]
        assert {line["step"]: line["test_loss"] for line in lines if "test_loss" in line} == losses
        summary = json.loads((place / "log" / "summary.json").read_text())
        assert summary["best"] == {"step": best, "loss": losses[best]}
        assert [record.is_best for record in result.evaluations] == [step <= best and _lowest(losses, step) for step in steps]
    assert len(set(map(str, found.values()))) == 1, found
    ours, others = (tensors_of(tmp_path / name / "saved" / f"step-{best:08d}") for name in ("two-replicas", "one-device"))
    assert all(torch.allclose(tensor, others[key], atol=1e-5) for key, tensor in ours.items())


def _lowest(losses: dict[int, float], step: int) -> bool:
    return all(losses[step] < loss for other, loss in losses.items() if other < step)


@pytest.mark.parametrize("behind", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_run_that_is_cut_in_two_anywhere_ends_where_the_whole_one_ends(tmp_path: Path, behind: int) -> None:
    """At the best evaluation, or behind it; a run that has ended early is finished."""
    (tmp_path / "truth").mkdir()
    file = folder_of(tmp_path / "truth")
    truth = trained(file)
    steps, best, _, last = told(truth)
    assert best is not None
    cut = best + behind
    place = tmp_path / f"cut-{cut}"
    place.mkdir()
    file = folder_of(place)
    first = trained(file, f"train.steps={cut}")
    second = trained(file)
    assert told(second)[1:] == (best, best, last), cut
    assert first.losses + second.losses == truth.losses
    again = trained(file)
    assert (again.losses, told(again)[1:3]) == ([], (best, best))
    lines = [json.loads(line) for line in (place / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "test_loss" in line] == sorted({*steps, cut}), "each once"
    state = read_state(list_checkpoints(place / "saved")[-1])
    assert state.evaluated == truth.best
    longer = trained(file, "evaluate.patience=4")
    assert longer.first_step == last, "more patience goes on"
    assert len(longer.losses) > 0


def test_a_set_of_its_own_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    file = folder_of(tmp_path)
    own = {"every_steps": 4, "data": {"args": {"samples": 30, "seed": 0}}, "samples": 20, "patience": None}
    metric = {"target": "tests.test_evaluate:squares", "better": "lower"}
    document = yaml.safe_load(Path(file).read_text())
    document["evaluate"], document["train"] = {**own, "metric": metric}, {**document["train"], "steps": 8}
    Path(file).write_text(yaml.safe_dump(document))
    result = trained(file)
    splits = build_data(Job.read(file))
    assert splits.test is not None
    assert len(splits.test) == 30  # type: ignore[arg-type]
    assert torch.equal(splits.test[7][0], random_classification(30, inputs=8, classes=4, test_samples=20).train[7][0])
    last = result.evaluations[-1]
    assert (last.samples, last.test_samples, last.accuracy, last.metric) == (20, 30, None, "squares")
    assert result.best is not None
    assert result.best.metric == "squares"
    assert result.best.value == min(record.value for record in result.evaluations if record.value is not None)


def test_evaluations_of_other_samples_are_counted_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As many samples, with other values: their losses stood beside those of before, and an old best one stayed."""
    file = folder_of(tmp_path)
    own = "evaluate={{every_steps: 4, data: {{args: {{samples: 20, seed: {}}}}}}}"
    trained(file, own.format(1), "train.steps=8")
    assert "counted anew" not in capfd.readouterr().err
    second = trained(file, own.format(2), "train.steps=16")
    told = "note: evaluations are not those of the checkpoint: of the data that are evaluated, sample 0 is another."
    said = capfd.readouterr().err
    assert told in said
    assert second.best is not None
    assert second.best.step in (12, 16)
    job = Job.read(file, [own.format(2), "train.steps=16"])
    assert job.checkpoint is not None
    assert best_of_job(job, job.checkpoint.folder).name == f"step-{second.best.step:08d}"


def test_a_run_that_had_ended_is_evaluated_on_other_samples_and_exports_what_was(tmp_path: Path) -> None:
    """Its newest weights were evaluated, and those of the evaluation before were exported; a job of fewer steps called them
    those of its own last step."""
    file = folder_of(tmp_path, "one device")
    ended = trained(file, "evaluate={every_steps: 4}")
    assert ended.best is not None
    assert ended.best.step < 40
    own = "evaluate={every_steps: 4, data: {args: {samples: 20, seed: 2}}}"
    again = trained(file, "train.steps=8", own, f"export={{folder: {tmp_path}/weights}}")
    assert again.best is not None
    assert (again.best.step, again.exported_step, again.evaluations[-1].step) == (40, 40, 40)
    assert str(json.loads((tmp_path / "weights" / "hetpipe_export.json").read_text())["checkpoint"]).endswith("step-00000040")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {"patience": 2}}, "'patience' counts evaluations while the run goes on: write 'every_steps', too"),
        ({"evaluate": {"data": {}}}, "it says nothing: write 'args', such as {file: dev.jsonl}"),
        ({"evaluate": {"samples": 3}, "train": {**TRAIN, "evaluate_samples": 3}}, "both say how many samples are measured"),
    ],
)
def test_what_a_section_cannot_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = folder_of(tmp_path)
    document = {**yaml.safe_load(Path(file).read_text()), **changes}
    with pytest.raises(InputError) as caught:
        Job.parse(document, "the test's")
    assert message in str(caught.value)


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    file = folder_of(tmp_path)
    with pytest.raises(InputError, match="evaluate measures samples that do not train, and data .* holds out none: let it"):
        build_data(Job.read(file, ["data.args.test_samples=0"]))
    with pytest.raises(InputError, match="evaluate.metric is accuracy, of the predictions of a cross_entropy"):
        build_metric(Loss(function=mse), EvaluateSection(metric="accuracy"))
    with pytest.raises(RankFailure, match="evaluate.data 'random_classification' has no argument 'sample'; did you mean 's"):
        trained(file, "evaluate.data={args: {sample: 3}}")


def one_number(outputs: Tensor, targets: Tensor) -> float:
    return 3.0


def no_number(outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    return math.nan, len(targets)


def test_a_metric_that_gives_something_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder_of(tmp_path, "one device")
    own = "evaluate={{every_steps: 2, metric: {{target: 'tests.test_evaluate:{}', better: lower}}}}"
    with pytest.raises(RankFailure, match=r"must return \(sum, count\), two numbers .* returned 3.0"):
        trained(file, own.format("one_number"), "train.steps=2")
    result = trained(file, own.format("no_number"), "train.steps=2")
    assert result.best is None
    assert "note: the evaluation after step 2 gave no_number nan, so none is the best so far" in capfd.readouterr().err


def best_of(samples: int = 5, data: Content | None = None, **section: Any) -> Best:
    own = EvaluateSection(every_steps=1, **section)
    return Best(own, Measured.by(own, samples, data))


def test_what_is_no_number_is_never_the_best() -> None:
    best = best_of(patience=2)
    values = enumerate([math.nan, 2.0, math.inf, 1.5, 1.5, None], 1)
    assert [best.note(step, value) for step, value in values] == [False, True, False, True, False, False]
    assert best.saved == SavedBest(metric="loss", step=4, value=1.5, since=2, last=6, of=best.measured)
    assert best.is_over
    assert best.told == "2 evaluations without a better loss than 1.5, that of step 4"
    rare = best_of(patience=1)
    rare.section = rare.section.model_copy(update={"every_steps": 4})
    assert [rare.note(step, float(step)) for step in (4, 6)] == [True, False]
    assert not rare.is_over, "step 6 was the last of a run that has been made longer since"


def test_only_evaluations_of_the_same_are_compared() -> None:
    """Values of another metric, of fewer samples, or of a file that was mended stood beside each other."""
    mine = Content(samples=9, whole="0" * 32)
    before = best_of(data=mine)
    before.note(3, 1.5)
    own = {"target": "own:metric", "better": "higher"}
    cases: list[tuple[Best, str]] = [
        (best_of(data=mine, metric="accuracy"), "the metric was 'loss', is 'accuracy'. Which one is best is counted anew"),
        (best_of(data=mine, metric=own), "the metric was 'loss', is 'own:metric, higher is better'"),
        (best_of(4, data=mine), "5 samples were evaluated, and now 4"),
        (best_of(data=Content(samples=9, whole="1" * 32)), "of the data that are evaluated, samples are others"),
    ]
    for other, told in cases:
        assert told in str(other.take_over(before.saved))
        assert other.saved is None
    for same in (best_of(data=mine, patience=9), best_of(data=None)):
        assert same.take_over(before.saved) is None
        assert same.saved == before.saved
    higher = best_of(metric="accuracy")
    assert [higher.note(7 + i, value) for i, value in enumerate((0.5, 0.4, 0.6))] == [True, False, True]
