"""What a reference says of preferences: the log-probability of each answer by the model as it is when training begins. One pass
over the data, kept beside the checkpoints, so that a run which resumes has the same reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.content import Content, digest_of_tensors
from hetpipe.building.data import Preferences, size_for
from hetpipe.building.feed import Ask, Reading
from hetpipe.checkpoints.resume import Beside
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


def find_reference(
    job: Job, session: Session, engine: PlanEngine, reading: Reading, own: Own, beside: Beside, *, begins: bool
) -> None:
    """Let the job's preferences have their reference: computed if the run `begins`, else as a rank that trained before has it, or
    as the run has kept it. InputError if it is lost, or of other samples. Collective."""
    parts: list[tuple[Any, Content | None]] = [(session.data.train, session.content), (session.data.test, session.evaluated)]
    wanted = [(part, _key(content)) for part, content in parts if isinstance(part, Preferences) and content is not None]
    if job.loss.name not in WITH_REFERENCE:
        return
    world, here = engine.world, {key: part.reference_log_probabilities for part, key in wanted}
    known = next((every for every in world.gather(here) if None not in every.values()), None)
    file = Path(job.checkpoint.folder) / FILE if job.checkpoint is not None else None
    if known is None and not begins:
        known = world.together(lambda: _load(file, {key: len(part) for part, key in wanted}, beside.reference))
    if known is None:
        known = {key: _computed(part, job, engine, reading, own) for part, key in wanted}
        if file is not None:
            world.on_main(lambda: _save(known, file))
    for part, key in wanted:
        part.reference_log_probabilities = known[key]
    beside.reference = {key: digest_of_tensors([found]) for key, found in known.items()}


def _key(content: Content) -> str:
    """What a set of samples is called in the file: a digest of what is in it."""
    return hashlib.sha256(content.model_dump_json().encode()).hexdigest()[:32]


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
    """Write it whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f".{file.name}")
    save_tensors(found, written)
    written.replace(file)


def _load(file: Path | None, counts: dict[str, int], digests: dict[str, str]) -> dict[str, Tensor]:
    """Read what the run has kept for so many samples of each key. Of others the model as it was at the begin can say nothing any
    more. InputError if it is not as the checkpoint says by its digests."""
    if file is None:
        raise InputError(
            "the run has trained already, and none of the devices that go on has what the reference said of the answers before. "
            "Write a section 'checkpoint', beside whose checkpoints it is kept"
        )
    if not file.is_file():
        raise InputError(
            f"{file} is missing, which holds what the reference says of the answers. The run cannot resume without it. Put it "
            "back, or name another checkpoint.folder to begin anew"
        )
    tensors = TensorFiles(names_in(file))
    if any(key not in tensors for key in counts):
        raise InputError(
            f"{file} holds what the reference says of other answers than those that are trained, or evaluated, now. Set the data "
            "back, or name another checkpoint.folder to begin anew"
        )
    known = {key: tensors.read(key) for key in counts}
    same = all(digests.get(key) in (None, digest_of_tensors([found])) for key, found in known.items())
    if not same or any(known[key].shape != (count, 2) for key, count in counts.items()):
        raise InputError(
            f"{file} is not as this run has written it: what it says of the answers is not what the checkpoint was trained with. "
            "Put the run's own file back, or name another checkpoint.folder to begin anew"
        )
    return known
