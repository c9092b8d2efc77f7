"""Runs that save beside their steps: who is told what when, and what is left when one ends early."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.beside import copies, writing
from hetpipe.checkpoints.checkpoint import CheckpointError
from hetpipe.checkpoints.resume import Saved
from hetpipe.checkpoints.stores.folder import PendingFolder
from hetpipe.documents.job import Job
from hetpipe.processes import whereabouts
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.stopping import RunStopped
from hetpipe.runtime.checks.finite import NonFiniteError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.observers import attending
from hetpipe.training.observers.attending import ObserverError
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import CheckpointRecord, EndRecord, StepRecord
from hetpipe.training.start import run_everywhere
from tests.support.jobs import Folder, train
from tests.support.runs import ONE, alone
from tests.support.writes import SECONDS, before_writing, killed_in_writing_step_4, until


def checkpoints_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("step-*/*")}


class Told(Observer):
    """What happens, in its order; `then` is what is done after a step."""

    events: list[tuple[str, Any]]
    then: dict[int, Callable[[], object]]

    def stepped(self, step: StepRecord) -> None:
        self.events.append(("stepped", step.step))
        self.then.get(step.step, lambda: None)()

    def saved(self, checkpoint: CheckpointRecord) -> None:
        self.events.append(("saved", checkpoint.step))

    def ended(self, end: EndRecord) -> None:
        self.events.append(("ended", end.step))


class HeldUp:
    """A job of one rank, which saves every second step; `gate`: before it, nothing is written of step 2."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
        self.saved, self.gate = path / "saved", threading.Event()
        saving = {"folder": str(self.saved), "every_steps": 2, "keep": 9}
        self.file = Folder(path).ready((1,), ONE, **{"train": train(), "checkpoint": saving, **sections})
        monkeypatch.setattr(checkpoint, "write_tensors", before_writing(self._wait))
        monkeypatch.setattr(attending, "OWN", (*attending.OWN, Told))
        monkeypatch.setattr(whereabouts, "_resume", "")
        Told.events, Told.then = [], {}
        self.events, self.then = Told.events, Told.then

    def _wait(self, name: str) -> None:
        assert "step-00000002" not in name or self.gate.wait(SECONDS)

    def open_where_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Saved.complete

        def opened(saved: Saved) -> Any:
            if saved.writing is not None:
                self.events.append(("waited for", saved.writing.begun.step))
                self.gate.set()
            return real(saved)

        monkeypatch.setattr(Saved, "complete", opened)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.saved.glob("step-*"))


def test_steps_go_on_while_a_checkpoint_is_written_and_the_run_ends_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is, byte for byte, what a run saves whose steps wait; and one goes on where the other has ended."""
    held = HeldUp(tmp_path, monkeypatch)
    seen = list[tuple[list[str], str]]()

    def look() -> None:
        seen.append((held.names(), whereabouts.resume()))
        held.gate.set()

    held.then[3] = look
    alone(held.file, "log=null")
    assert seen == [(["step-00000002.partial"], "")]
    assert [step for what, step in held.events if what == "stepped"] == [*range(1, 8)]
    assert [step for what, step in held.events if what == "saved"] == [2, 4, 6, 7]
    assert held.events.index(("saved", 2)) > held.events.index(("stepped", 3))
    assert held.events[-2:] == [("saved", 7), ("ended", 7)]
    assert held.names() == [f"step-0000000{step}" for step in (2, 4, 6, 7)]
    assert whereabouts.resume() == f"step 7, {held.saved}/step-00000007"

    Told.events = []
    folder = tmp_path / "waiting"
    alone(held.file, "log=null", f"checkpoint={{folder: {folder}, every_steps: 2, keep: 9, wait: true}}")
    assert checkpoints_in(folder) == checkpoints_in(held.saved)
    assert [Told.events[at - 1] for at, (what, _) in enumerate(Told.events) if what == "saved"] == [
        ("stepped", step) for step in (2, 4, 6, 7)
    ]
    rest = alone(held.file, "log=null", "train.steps=9", f"checkpoint={{folder: {held.saved}, wait: true}}")
    assert rest.first_step == 7


def test_for_lack_of_memory_steps_wait_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = HeldUp(tmp_path, monkeypatch)
    held.gate.set()
    monkeypatch.setattr(copies, "free_bytes", lambda: 0)
    alone(held.file, "log=null")
    told = [events for events in zip(held.events, held.events[1:], strict=False) if events[1][0] == "saved"]
    assert told == [(("stepped", step), ("saved", step)) for step in (2, 4, 6, 7)]
    said = capsys.readouterr().err
    assert said.count("note: steps wait while a checkpoint is written, for lack of host memory of rank 0 on host ") == 1
    assert ", and 0 B are free. checkpoint.wait: true asks for no copies" in said


def test_a_signal_in_the_midst_ends_the_run_when_both_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldUp(tmp_path, monkeypatch)
    held.open_where_waited_for(monkeypatch)
    held.then[2] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RunStopped) as stopped:
        alone(held.file, "log=null")
    assert (stopped.value.step, stopped.value.resume) == (3, f"step 3, {held.saved}/step-00000003")
    assert held.names() == ["step-00000002", "step-00000003"]
    both = [("waited for", 2), ("saved", 2), ("waited for", 3), ("saved", 3)]
    assert held.events == [("stepped", 1), ("stepped", 2), ("stepped", 3), *both, ("ended", 3)]


def test_an_error_of_all_ranks_leaves_what_is_under_way_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, real = HeldUp(tmp_path, monkeypatch), PlanEngine.step
    held.open_where_waited_for(monkeypatch)

    def step(engine: PlanEngine, *batch: Any) -> float:
        loss = real(engine, *batch)
        engine.finite = engine.steps != 3
        return loss

    monkeypatch.setattr(PlanEngine, "step", step)
    with pytest.raises(NonFiniteError, match="^step 3: a gradient is not finite"):
        alone(held.file, "log=null")
    assert held.events == [("stepped", 1), ("stepped", 2), ("waited for", 2), ("saved", 2), ("ended", 2)]
    assert held.names() == ["step-00000002"]
    assert whereabouts.resume() == f"step 2, {held.saved}/step-00000002"


def test_an_error_of_one_rank_does_not_wait_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "STOP_SECONDS", 0.05)
    held = HeldUp(tmp_path, monkeypatch)

    def fails() -> None:
        raise LookupError("no such column")

    held.then[3] = fails
    with pytest.raises((LookupError, ObserverError), match="no such column"):
        alone(held.file, "log=null")
    assert held.names() == []
    held.gate.set()
    until(lambda: not any("saving step" in thread.name for thread in threading.enumerate()))
    assert held.names() == []
    assert whereabouts.resume() == ""


def test_what_cannot_be_written_ends_the_run_at_the_next_save_at_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real = HeldUp(tmp_path, monkeypatch), PendingFolder.create

    def full(pending: PendingFolder, part: str) -> Any:
        if pending.step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(pending, part)

    monkeypatch.setattr(PendingFolder, "create", full)
    held.gate.set()
    with pytest.raises(CheckpointError) as caught:
        alone(held.file, "log=null")
    assert str(caught.value).startswith(f"cannot write the checkpoint {held.saved}/step-00000004: it needs ")
    assert str(caught.value).endswith(" are free there; OSError: [Errno 28] No space left on device")
    assert held.events[-1] in [("ended", 5), ("ended", 6)]
    assert held.names() == ["step-00000002"]
    assert whereabouts.resume() == f"step 2, {held.saved}/step-00000002"


def test_a_run_that_is_killed_in_the_midst_goes_on_from_the_complete_one(tmp_path: Path) -> None:
    saving = {"folder": str(tmp_path / "saved"), "every_steps": 2, "keep": 9}
    file = Folder(tmp_path).ready((1,), ONE, train=train(steps=5), checkpoint=saving, log=None)
    with pytest.raises(RankFailure) as caught:
        run_everywhere(Job.read(file), killed_in_writing_step_4)
    assert caught.match("was killed by SIGKILL")
    assert caught.value.resume == f"step 2, {tmp_path}/saved/step-00000002"
    assert (tmp_path / "saved/step-00000004.partial").is_dir()
    rest, whole = alone(file), alone(file, f"checkpoint.folder={tmp_path}/whole")
    assert (rest.first_step, rest.losses) == (2, whole.losses[2:])
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == [f"step-0000000{step}" for step in (2, 4, 5)]
