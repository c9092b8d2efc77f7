"""What each rank of a fine-tuning does: plan, say what will be done, train, and write the weights for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.finetune.statement import Statement, make_statement
from hetpipe.processes.progress import Activity
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
    return Finetuned(statement=statement, result=result, folder=result.exported)
