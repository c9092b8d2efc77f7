"""The weights of a run that has ended, in the folder that its job names."""

from __future__ import annotations

import shutil
from pathlib import Path

from hetpipe.building.build import build_layers
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.checkpoints.revision import at_revision
from hetpipe.checkpoints.trained import find_checkpoint
from hetpipe.checkpoints.training_state import said_of
from hetpipe.hf.exports.export import export_weights
from hetpipe.processes.progress import Activity
from hetpipe.spec.job import Job


def export_run(job: Job, *, trained: bool) -> Path | None:
    """Write the newest checkpoint's weights where the job says, in the place of what is there; if this run has `trained` nothing,
    those that are of that checkpoint already stay as they are. None where there is nothing to write, or nowhere."""
    if job.export is None or job.checkpoint is None or not (found := list_checkpoints(job.checkpoint.folder)):
        return None
    target, newest = Path(job.export.folder), max(part.stat().st_mtime for part in found[-1].iterdir())
    if target.exists() and not trained and target.stat().st_mtime >= newest:
        return target
    written, checkpoint = target.with_name(f".{target.name}"), find_checkpoint(job.checkpoint.folder)
    with Activity(f"writing {target}"):
        if written.exists():
            shutil.rmtree(written)  # what a run that was killed had begun
        export_weights(build_layers(at_revision(job, said_of(checkpoint))), checkpoint, written, merge=job.export.merge)
        install(written, target)
    return target


def install(written: Path, target: Path) -> None:
    """Let a folder that is written whole become the target: nobody sees a part of it."""
    if target.exists():
        shutil.rmtree(target)
    written.rename(target)
