"""The weights of a run that has ended, in the folder that its job names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hetpipe.building.build import build_layers
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.checkpoints.origin.revision import at_revision
from hetpipe.checkpoints.trained import find_checkpoint
from hetpipe.checkpoints.training_state import said_of
from hetpipe.files.formats import read_mapping
from hetpipe.files.writing import write_text
from hetpipe.hf.exports.export import export_weights
from hetpipe.processes.progress import Activity
from hetpipe.spec.job import Job
from hetpipe.spec.sections.export import MARK

FORMAT = "hetpipe.export/1"


def export_run(job: Job) -> Path | None:
    """Write the newest checkpoint's weights where the job says, in the place of what a run has exported there before. None where
    there is nothing to write, or nowhere. InputError where what is there is something else."""
    if job.export is None or job.checkpoint is None or not list_checkpoints(job.checkpoint.folder):
        return None
    target, checkpoint = job.export_place(), find_checkpoint(job.checkpoint.folder)
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
    return Path(job.export.folder)


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
