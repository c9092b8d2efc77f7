"""What a reference says of preferences: the log-probability of each answer by the model as it is when training begins. One pass
over the data, kept beside the checkpoints, so that a run which resumes has the same reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.data import Preferences, size_for
from hetpipe.building.feed import Ask, Reading
from hetpipe.checkpoints.stores.tensor_files import save_tensors
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.files.tensors import TensorFiles, names_in
from hetpipe.layers.losses.preference import log_probabilities
from hetpipe.processes.progress import Activity
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.session import Session

FILE = "reference.safetensors"
WITH_REFERENCE = ("dpo",)  # losses
Own = Callable[[Tensor], Tensor | None]  # of the numbers of a global batch, those of this rank


def find_reference(job: Job, session: Session, engine: PlanEngine, reading: Reading, own: Own, *, begins: bool) -> None:
    """Let the job's preferences have their reference: computed where the run `begins`, else as that run has kept it. InputError
    if it is lost. Collective."""
    parts: dict[str, Any] = {"train": session.data.train, "test": session.data.test}
    wanted = {name: part for name, part in parts.items() if isinstance(part, Preferences)}
    if job.loss.name not in WITH_REFERENCE or all(part.reference_log_probabilities is not None for part in wanted.values()):
        return
    file = Path(job.checkpoint.folder) / FILE if job.checkpoint is not None else None
    known = dict[str, Tensor]()
    if not begins and file is not None:
        known = engine.world.together(lambda: _load(file, {name: len(part) for name, part in wanted.items()}))
    for name, part in wanted.items():
        part.reference_log_probabilities = known[name] = (
            known[name] if name in known else _computed(part, job, engine, reading, own)
        )
    if begins and file is not None:
        engine.world.on_main(lambda: _save(known, file))


def _computed(data: Any, job: Job, engine: PlanEngine, reading: Reading, own: Own) -> Tensor:
    """By the model as it is now, float64 [n, 2], the same on every rank. Collective."""
    batches = torch.split(torch.arange(len(data)), job.train.global_batch)
    asked = (Ask.of(own(batch), job.train.seed, "reference", size=size_for(data, batch)) for batch in batches)
    numbers, values = list[Tensor](), list[Tensor]()
    with (
        Activity("asking the reference", len(batches), shown=engine.world.is_main) as activity,
        reading.open(data, asked, lambda: "samples for the reference") as reader,
    ):
        for batch, (inputs, _) in zip(batches, reader, strict=True):
            output, mine = engine(inputs), own(batch)
            if output is not None and mine is not None:
                numbers.append(mine)
                values.append(log_probabilities(output).double().cpu())
            activity.advance()
    found = torch.zeros(len(data), 2, dtype=torch.float64)
    for at, told in engine.world.gather((torch.cat(numbers), torch.cat(values)) if numbers else (None, None)):
        if at is not None:
            found[at] = told
    return found


def _save(found: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(found, file)


def _load(file: Path, counts: dict[str, int]) -> dict[str, Tensor]:
    """What was kept of these. The training samples are those of the run, which was checked; others may be evaluated now, of which
    the model as it was at the begin can say nothing any more."""
    if not file.is_file():
        raise InputError(
            f"{file} is missing, which holds what the reference says of the answers: the run cannot resume without it. Put it "
            "back, or name another checkpoint.folder to begin anew"
        )
    tensors = TensorFiles(names_in(file))
    found = {name: tensors.read(name) for name in counts if name in tensors}
    for name, count in counts.items():
        if name not in found or found[name].shape != (count, 2):
            has = len(found[name]) if name in found else "none"
            raise InputError(
                f"{file} holds what the reference says of {has} samples of {name}, and there are {count}: set back what has "
                "changed, or name another checkpoint.folder to begin anew"
            )
    return found
