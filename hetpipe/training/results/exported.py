"""The weights of a run that has ended, in the folder that its job names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from hetpipe.building.build import build_layers
from hetpipe.checkpoints.best import SavedBest
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.checkpoints.origin.revision import at_revision
from hetpipe.checkpoints.stores.folder import stored_at
from hetpipe.checkpoints.stores.store import Stored, name_of
from hetpipe.checkpoints.trained import find_checkpoint
from hetpipe.checkpoints.training_state import read_saved, said_of
from hetpipe.documents.job import Job
from hetpipe.documents.sections.export import MARK
from hetpipe.files.formats import read_mapping
from hetpipe.files.writing import write_text
from hetpipe.hf.exports.export import export_weights
from hetpipe.processes.progress import Activity, warn

FORMAT = "hetpipe.export/1"


class Exported(NamedTuple):
    """A folder with weights, and the step of which they are."""

    folder: Path
    step: int


def export_run(job: Job, best: SavedBest | None = None) -> Exported | None:
    """Write the weights of the checkpoint of the `best` evaluation where the job says, in the place of what a run has exported
    there before. By default these are of the evaluation that the newest checkpoint names, or its own if evaluations were not
    compared. None where there is nothing to write, or nowhere. InputError where what is there is something else."""
    if job.export is None or job.checkpoint is None or not list_checkpoints(job.checkpoint.folder):
        return None
    target, checkpoint = job.export_place(), best_checkpoint(job, find_checkpoint(job.checkpoint.folder), best)
    assert target is not None
    written = target.with_name(f".{target.name}")
    with Activity(f"writing {job.export.folder}"):
        if written.exists():
            shutil.rmtree(written)  # what a run that was killed had begun
        export_weights(build_layers(at_revision(job, said_of(checkpoint))), checkpoint, written, merge=job.export.merge)
        files = sorted(path.name for path in written.iterdir())
        mark = {"format": FORMAT, "checkpoint": str(checkpoint), "files": [*files, MARK]}
        write_text(written / MARK, json.dumps(mark, indent=1) + "\n")
        install(written, target)
    return Exported(Path(job.export.folder), read_saved(checkpoint).step)


def best_of_job(job: Job, folder: str | Path) -> Stored:
    """The checkpoint whose weights are a run's, of those in its folder."""
    return best_checkpoint(job, find_checkpoint(folder))


def best_checkpoint(job: Job, newest: Stored, best: SavedBest | None = None) -> Stored:
    """The checkpoint of the `best` evaluation, by default of that which the newest names; the newest itself if evaluations were
    not compared, or with a note if the best one is gone."""
    best = best or getattr(read_saved(newest), "evaluated", None)
    if best is None or job.evaluate is None or job.evaluate.every_steps is None or name_of(best.step) == newest.name:
        return newest
    found = stored_at(Path(str(newest)).with_name(name_of(best.step)))
    if found.is_complete():
        return found
    warn(f"note: the best evaluation was that of step {best.step}, of which there is no checkpoint: {newest} is taken instead")
    return newest


def install(written: Path, target: Path) -> None:
    """Let a folder that is written whole take the place of what was exported before: nobody sees a part of it, and what others
    have put beside that stays."""
    before = target.with_name(f".{target.name}.before")
    if before.exists() and not target.exists():
        before.rename(target)  # a run was killed between the two below
    if target.exists():
        _copy_others(target, written)
        shutil.rmtree(before, ignore_errors=True)
        target.rename(before)
    written.rename(target)
    shutil.rmtree(before, ignore_errors=True)


def _copy_others(folder: Path, to: Path) -> None:
    """What lies there that was not exported."""
    mark = read_mapping(folder / MARK) if (folder / MARK).exists() else {}
    for path in folder.iterdir():
        if path.name in mark.get("files", ()) or (to / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, to / path.name)
        else:
            shutil.copy2(path, to / path.name)
