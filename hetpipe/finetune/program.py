"""What each rank of a fine-tuning does: plan, say what will be done, train, and write the weights for others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetpipe.building.build import build_layers
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.checkpoints.revision import at_revision
from hetpipe.checkpoints.trained import find_checkpoint
from hetpipe.checkpoints.training_state import said_of
from hetpipe.finetune.folder import exported, install
from hetpipe.finetune.statement import Statement, make_statement
from hetpipe.hf.export import export_weights
from hetpipe.processes.progress import Activity
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from hetpipe.training.runlog import TrainResult
from hetpipe.training.session import Session
from hetpipe.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a rank needs beside the job: the folder, the data in words, whether to stop before training, and how the
    statement is shown."""

    out: str
    data: str
    only_plan: bool
    show: Callable[[Statement], None]


@dataclass(frozen=True, kw_only=True)
class Finetuned:
    """What became of it: None where nothing was trained, or exported."""

    statement: Statement
    result: TrainResult | None = None
    folder: Path | None = None


def finetune_rank(wanted: Wanted, job: Job, plan: Plan | None = None, profile: Profile | None = None) -> Finetuned | None:
    """On one rank; of those that train, the main one gets what became of it (of a plan alone, the main one of all)."""
    told: list[tuple[Statement, bool]] = []

    def planned(session: Session, plan: Plan, profile: Profile) -> bool:
        made: list[Statement] = []

        def say() -> None:
            with Activity("comparing with equal data parallelism and with single devices"):
                made.append(make_statement(session, plan, profile, wanted.data))
            wanted.show(made[0])

        session.world.on_main(say)
        told.append((session.world.first(made[0] if made else None), session.world.is_main))
        return not wanted.only_plan

    result = Trainer(job).run(plan, profile, planned)
    ((statement, is_main),) = told
    if wanted.only_plan:
        return Finetuned(statement=statement) if is_main else None
    if result is None:
        return None
    return Finetuned(statement=statement, result=result, folder=_export(wanted.out, job, result))


def _export(out: str, job: Job, result: TrainResult) -> Path | None:
    """The newest checkpoint's weights, in the folder of the run; those that are of it already stay as they are."""
    target = exported(out, job)
    if job.checkpoint is None or not list_checkpoints(job.checkpoint.folder):
        return None
    newest = max(part.stat().st_mtime for part in list_checkpoints(job.checkpoint.folder)[-1].iterdir())
    if target.exists() and not result.losses and target.stat().st_mtime >= newest:
        return target
    found, written = find_checkpoint(job.checkpoint.folder), target.with_name(f".{target.name}")
    with Activity(f"writing {target}"):
        if written.exists():
            shutil.rmtree(written)  # what a run that was killed had begun
        export_weights(build_layers(at_revision(job, said_of(found))), found, written)
        install(written, target)
    return target
