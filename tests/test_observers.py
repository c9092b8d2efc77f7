"""Observers of a run: what they are told, who they are, and what happens where one fails."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import hetpipe
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.planning import registry
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.stopping import RunStopped
from hetpipe.processes.world import alone
from hetpipe.training.observers.attending import ObserverError, attending
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import CheckpointRecord, EndRecord, EvaluationRecord, RunRecord, StepRecord
from hetpipe.training.observers.screen import Outlook
from tests.support.jobs import Folder, train
from tests.support.pages import Page
from tests.support.ranks import cluster_of, make_plan
from tests.support.runs import trained

TWO_STAGES = [{"cuts": [4, 2], "sizes": [6, 6]}]


def install(folder: Path, name: str, points: str, **modules: str) -> None:
    """A distribution as pip leaves one."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hetpipe.observers]\n{points}\n")


EVERY_RANK = """
import os
import hetpipe

class Ranks(hetpipe.Observer):
    every_rank = True

    def ended(self, end):
        open(f"ended-{os.environ['RANK']}", "w").write(f"{end.step} {end.error}")
"""
FAULTY = """
import hetpipe

class Faulty(hetpipe.Observer):
    def stepped(self, step):
        if step.step == 2:
            raise LookupError("no such column")
"""


def test_a_csv_logger_is_a_class_that_an_installed_package_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one of the documentation, in a run of two ranks that goes on from a checkpoint; and another that is on both ranks."""
    blocks = {block.name: block.text for block in Page("docs/how-to/observe.md").blocks}
    logger, setup = blocks["csv_log.py"], blocks["setup.py"]
    (point,) = re.findall(r'"hetpipe.observers": \["(.*)"\]', setup)
    install(tmp_path, "csv-log", point, csv_log=logger)
    install(tmp_path, "ranks", "ranks = of_ranks:Ranks", of_ranks=EVERY_RANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    saving = {"folder": str(tmp_path / "saved"), "every_steps": 2}
    file = Folder(tmp_path).ready((2,), TWO_STAGES, train=train(steps=4, scheduler=None), checkpoint=saving)
    losses = trained(file, "train.steps=2").losses + trained(file).losses
    with (tmp_path / "log" / "steps.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["step"], float(row["loss"])) for row in rows] == [(str(i + 1), loss) for i, loss in enumerate(losses)]
    assert [row["step_seconds"] == "" for row in rows] == [True, False, True, False]
    assert {file.name: file.read_text() for file in tmp_path.glob("ended-*")} == {"ended-0": "4 None", "ended-1": "4 None"}
    told = "observers: 'csv' (csv_log:CsvLog, of csv-log 1.0); 'ranks' (of_ranks:Ranks, of ranks 1.0)"
    assert capfd.readouterr().err.count(told) == 2


def test_an_observer_that_fails_ends_the_run_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for no step that does not come."""
    install(tmp_path, "faulty-log", "faulty = faulty_log:Faulty", faulty_log=FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    file = Folder(tmp_path).ready((2,), TWO_STAGES, train=train(steps=1000, scheduler=None))
    with pytest.raises(RankFailure) as caught:
        trained(file)
    name = "'faulty' (faulty_log:Faulty, of faulty-log 1.0)"
    assert str(caught.value) == (
        f"rank 0, replica 0 stage 0, device n0/0, in telling the observer {name} that step 2 was over: ObserverError: the "
        f"observer {name} failed when it was told that step 2 was over: LookupError: no such column"
    )
    assert caught.value.exit_code == 1
    assert [line["step"] for line in Folder(tmp_path).lines("log/metrics.jsonl")] == [2]  # hetpipe's own were told


# ---- without a run ----

TOLD: list[tuple[str, str, Any]] = []


class First(Observer):
    def __init__(self) -> None:
        self.name, self.fails_in = type(self).__name__, ""

    def _told(self, event: str, record: Any) -> None:
        TOLD.append((self.name, event, record))
        if event == self.fails_in:
            raise ValueError("a fault")

    def began(self, run: RunRecord) -> None:
        self._told("began", run.total_steps)

    def stepped(self, step: StepRecord) -> None:
        self._told("stepped", step.step)

    def saved(self, checkpoint: CheckpointRecord) -> None:
        self._told("saved", checkpoint.step)

    def evaluated(self, evaluation: EvaluationRecord) -> None:
        self._told("evaluated", evaluation.accuracy)

    def ended(self, end: EndRecord) -> None:
        self._told("ended", (end.step, end.error))


class Second(First):
    pass


class AtItsBegin(First):
    def __init__(self) -> None:
        super().__init__()
        self.fails_in = "began"


class AtItsEnd(First):
    def __init__(self) -> None:
        super().__init__()
        self.fails_in = "ended"


def not_one() -> int:
    return 3


RUN = RunRecord(
    job=Job.parse(
        {"format": "hetpipe.job/1", "model": {"name": "mlp"}, "data": {"name": "text"}, "train": {"global_batch": 4, "steps": 2}},
        "a job",
    ),
    plan=make_plan([{"cuts": [1], "sizes": [4]}]),
    cluster=cluster_of(1),
    first_step=0,
    total_steps=2,
    predicted_step_seconds=None,
    peak_bytes={"n0/0": None},
    is_main=True,
)
STEP = StepRecord(
    step=1,
    epoch=0,
    samples=4,
    loss=0.5,
    learning_rate=0.1,
    grad_norm=None,
    loss_scale=None,
    fetch_seconds=0.0,
    step_seconds=None,
    samples_per_second=None,
    utilisation={},
    busy={},
    peak_bytes={},
)


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Any:
    TOLD.clear()

    def brought(*names: str) -> None:
        points = [EntryPoint(name, f"tests.test_observers:{name}", "hetpipe.observers") for name in names]
        monkeypatch.setattr(registry, "_all_points", lambda _: {"hetpipe.observers": tuple(points)})

    return brought


def test_each_is_told_what_happens_in_its_order_and_of_the_end_whatever_it_is(bring: Any) -> None:
    bring("First", "Second")
    with attending(alone(), RUN) as observers:
        observers.stepped(STEP)
        observers.saved(CheckpointRecord(step=1, where="x"))
        observers.evaluated(EvaluationRecord(step=1, loss=1.0, accuracy=0.5, samples=3, test_samples=9))
    events = [("began", 2), ("stepped", 1), ("saved", 1), ("evaluated", 0.5)]
    told = [(name, *event) for event in events for name in ("First", "Second")]
    assert told + [(name, "ended", (1, None)) for name in ("Second", "First")] == TOLD
    for error, words in ((RunStopped(15, 7), "stopped by SIGTERM after step 7"), (ValueError("odd"), "ValueError: odd")):
        TOLD.clear()
        with pytest.raises(type(error)), attending(alone(), RUN):
            raise error
        assert [record for _, event, record in TOLD if event == "ended"] == [(0, words)] * 2


def test_who_fails_at_the_beginning_or_the_end_is_named(bring: Any, capfd: pytest.CaptureFixture[str]) -> None:
    bring("AtItsBegin", "AtItsEnd", "First", "Second")
    words = "the observer 'AtItsBegin' .* was told that the run began: ValueError: a fault"
    with pytest.raises(ObserverError, match=words), attending(alone(), RUN):
        pytest.fail("it has not begun")
    assert [event for _, event, _ in TOLD] == ["began"]
    bring("AtItsEnd", "First")
    TOLD.clear()
    words = "the observer 'AtItsEnd' .* was told that the run ended: ValueError: a fault"
    with pytest.raises(ObserverError, match=words), attending(alone(), RUN):
        pass
    assert [name for name, event, _ in TOLD if event == "ended"] == ["First", "AtItsEnd"]
    capfd.readouterr()
    with pytest.raises(KeyError), attending(alone(), RUN):
        raise KeyError("the first fault is the one that is told")
    assert "note: the observer 'AtItsEnd' " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("waited", "workers", "noted"), [(0.03, 0, True), (0.03, 2, False), (0.009, 0, False), (0.019, 0, False)]
)
def test_steps_that_wait_for_their_samples_are_noted(
    waited: float, workers: int, noted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hundredth of a second and a tenth of the step at least, in most steps."""
    data = RUN.job.data.model_copy(update={"workers": workers})
    outlook = Outlook()
    outlook.began(replace(RUN, job=RUN.job.model_copy(update={"data": data})))
    for number in range(1, 30):
        seconds = 0.2 if number > 1 else None
        outlook.stepped(replace(STEP, step=number, step_seconds=seconds, fetch_seconds=waited if number != 5 else 9.0))
    told = "note: a step of 200 ms waits 30.0 ms for its samples; data.workers=2 lets two processes of each rank read them ahead"
    assert capfd.readouterr().err == (f"{told}\n" if noted else "")


def test_what_is_no_observer_is_refused_by_its_name(bring: Any) -> None:
    faults = {
        "not_one": r"the observer 'not_one' \(tests.test_observers:not_one\) makes a int, which is no hetpipe.Observer",
        "absent": "cannot load 'absent'",
        "STEP": "the observer 'STEP' .* cannot be made: TypeError",
    }
    for name, words in faults.items():
        bring(name)
        with pytest.raises(InputError, match=words), attending(alone(), RUN):
            pytest.fail("it has not begun")
    assert hetpipe.Observer is Observer
    assert isinstance(RUN.cluster, Cluster)
