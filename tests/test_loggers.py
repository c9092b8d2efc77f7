"""`log.to`: what TensorBoard, Weights & Biases and MLflow read back of a run is what metrics.jsonl has."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hetpipe
from hetpipe import InputError
from hetpipe.documents.job import Job
from hetpipe.documents.sections.log import TOOLS, LogSection
from hetpipe.training.observers.attending import check_loggers
from hetpipe.training.observers.loggers import LOGGERS, curves, evaluation_curves
from hetpipe.training.observers.records import EvaluationRecord, StepRecord
from tests.support.jobs import Folder, train
from tests.support.runs import trained
from tests.test_observers import RUN

NAMES = {"train/loss": "loss", "train/learning_rate": "learning_rate", "train/grad_norm": "grad_norm"}
STEPS = (2, 4, 6, 7)
BLOCK = 1 << 15


class Written(hetpipe.Observer):
    """Writes a line a step, with a word of the job's."""

    def __init__(self, word: str, file: str) -> None:
        self.word, self.file = word, Path(file)

    def stepped(self, step: StepRecord) -> None:
        with self.file.open("a") as file:
            file.write(f"{self.word} {step.step} {sorted(step.memory_bytes)}\n")


def run_to(tmp_path: Path, *to: Any, **sections: Any) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """A run of seven steps; lines of metrics.jsonl by their steps, and losses of evaluations."""
    log = {"folder": str(tmp_path / "log"), "every_steps": 2, "to": ["jsonl", *to]}
    found = trained(Folder(tmp_path).ready(slowdown=2.0, log=log, evaluate={"every_steps": 4}, **sections))
    assert found.losses
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert tuple(steps) == STEPS
    return steps, {line["step"]: line["test_loss"] for line in lines if "test_loss" in line}


def check(read: dict[str, dict[int, float]], steps: dict[int, dict[str, float]], tests: dict[int, float]) -> None:
    """`read`: step → value of each curve."""
    for name, key in NAMES.items():
        assert read[name] == pytest.approx({step: line[key] for step, line in steps.items()}, rel=1e-6), name
    assert read["test/loss"] == pytest.approx(tests, rel=1e-6)
    assert set(read["speed/predicted_step_seconds"]) == set(STEPS)
    assert set(read["speed/step_seconds"]) == set(STEPS)
    for kind in ("busy", "memory_bytes", "predicted_memory_bytes"):
        devices = {name.partition("/")[2] for name in read if name.startswith(f"{kind}/")}
        assert devices == {"n0/0", "n0/1", "n1/0"}, kind
    assert all(value > 0 for value in read["memory_bytes/n1/0"].values())


def test_tensorboard_reads_back_what_the_log_has(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    steps, tests = run_to(tmp_path, "tensorboard")
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path / "log" / "tensorboard")).Reload()
    read = {name: {event.step: event.value for event in found.Scalars(name)} for name in found.Tags()["scalars"]}
    check(read, steps, tests)


def records(content: bytes) -> Iterator[bytes]:
    """Of an offline run's file: the log format of LevelDB. Records lie in blocks of 32 KiB, behind a header of 7 bytes."""
    at, found = 7, b""
    while at + 7 <= len(content):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        found += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield found
            found = b""


def test_wandb_reads_back_what_the_log_has_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    steps, tests = run_to(tmp_path, {"name": "wandb", "args": {"project": "mine"}})
    (file,) = (tmp_path / "log").glob("wandb/offline-run-*/run-*.wandb")
    project, read = "", dict[str, dict[int, float]]()
    for data in records(file.read_bytes()):
        record = proto.Record()
        record.ParseFromString(data)
        project = record.run.project or project
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                read.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    assert project == "mine"
    check(read, steps, tests)


def test_mlflow_reads_back_what_the_log_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    steps, tests = run_to(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "log" / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("hetpipe").experiment_id])
    assert run.info.status == "FINISHED"
    assert "mlp" in run.data.params["model"]
    read = {
        name: {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)} for name in run.data.metrics
    }
    check(read, steps, tests)


def test_an_observer_of_a_file_is_made_with_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "written"
    run_to(tmp_path, {"target": "tests.test_loggers:Written", "args": {"word": "hear", "file": str(file)}})
    lines = file.read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["hear", str(step)] for step in range(1, 8)]
    assert lines[0].endswith("[]")
    assert lines[-1].endswith("['n0/0', 'n0/1', 'n1/0']")


class Stub(ModuleType):
    """A package with the calls of wandb, of which this test knows that trackio has the same."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.told: list[Any] = []

    def init(self, **given: Any) -> Any:
        self.told.append(("init", given["project"], given["name"]))
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.told.append((step, numbers))

    def finish(self) -> None:
        self.told.append("finish")


def test_trackio_is_called_as_wandb_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub = Stub()
    monkeypatch.setitem(sys.modules, "trackio", stub)
    logger = LOGGERS["trackio"](name="third")
    logger.began(replace(RUN, job=RUN.job.model_copy(update={"log": LogSection(folder=str(tmp_path / "curves"), every_steps=1)})))
    logger.evaluated(EvaluationRecord(step=3, loss=0.5, accuracy=None, samples=3, test_samples=3))
    assert stub.told == [("init", "hetpipe", "third"), (3, {"test/loss": 0.5})]


def test_what_is_no_number_is_left_out() -> None:
    step = StepRecord(
        step=3,
        epoch=0,
        samples=4,
        loss=math.nan,
        learning_rate=0.1,
        grad_norm=math.inf,
        loss_scale=None,
        fetch_seconds=0.0,
        step_seconds=2.0,
        samples_per_second=2.0,
        utilisation={"n0/0": 0.5},
        busy={},
        peak_bytes={},
        memory_bytes={"n0/0": 7},
        tokens_per_second=16.0,
    )
    assert curves(step, replace(RUN, predicted_step_seconds=1.0)) == {
        "train/learning_rate": 0.1,
        "train/epoch": 0.0,
        "speed/step_seconds": 2.0,
        "speed/predicted_step_seconds": 1.0,
        "speed/samples_per_second": 2.0,
        "speed/tokens_per_second": 16.0,
        "busy/n0/0": 0.5,
        "memory_bytes/n0/0": 7.0,
    }
    found = EvaluationRecord(step=3, loss=1.0, accuracy=None, samples=3, test_samples=3, perplexity=2.5, metric="f1", value=0.5)
    assert evaluation_curves(found) == {"test/loss": 1.0, "test/perplexity": 2.5, "test/f1": 0.5}


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("tensorbord", "log.to: there is no logger 'tensorbord'; did you mean 'tensorboard'?"),
        ("trackio", "log.to names trackio, which needs a package that cannot be imported (import of trackio halted; "),
        ({"target": "tests.test_loggers:Nothing"}, "has no 'Nothing'"),
    ],
)
def test_a_logger_that_is_not_there_is_told_before_anything_is_measured(
    to: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    log = {"folder": str(tmp_path / "log"), "to": [to]}
    with pytest.raises(InputError) as caught:
        check_loggers(Job.read(Folder(tmp_path).job(log=log, train=train())))
    assert message in str(caught.value)


def test_what_is_named_is_there() -> None:
    assert tuple(LOGGERS) == TOOLS
