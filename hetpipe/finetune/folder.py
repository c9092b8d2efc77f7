"""The folder of a run: the job and the cluster file in it, what it exports, and what another run has left there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.checkpoints.resume import flat
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.files.parsing import yaml_text
from hetpipe.files.writing import check_folder, check_output, write_text
from hetpipe.finetune.draft import CLUSTER_FILE, JOB_FILE
from hetpipe.finetune.emulated import cluster_text
from hetpipe.finetune.job import Made
from hetpipe.spec.job import Job

ADAPTER, MODEL = "adapter", "model"  # what is exported: adapters, or a whole model
SECTIONS = ("model", "adapter", "data", "loss", "train")  # what makes a run; other devices may go on with it
DEVICES = ("train.precision",)  # of these what hangs on the devices


def exported(out: str, job: Job) -> Path:
    """Where the trained weights go."""
    return Path(out) / (ADAPTER if job.adapter is not None else MODEL)


def refuse_another(out: str, job: Job) -> None:
    """InputError if files cannot be written into the folder, or the run in it is that of another job. Makes nothing."""
    if Path(out).exists() and not Path(out).is_dir():
        raise InputError(f"{out} is a file: name a folder with -o")
    check_folder(out)
    job.check_folders()
    file = Path(out) / JOB_FILE
    there = bool(job.checkpoint is not None and list_checkpoints(job.checkpoint.folder))
    if there and file.exists():
        before, now = (dict(_identity(each)) for each in (Job.read(file), job))
        changed = [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key) and key not in DEVICES]
        if changed:
            faults = [f"{key} was {shown(before.get(key))}, is {shown(now.get(key))}" for key in changed]
            raise InputError(f"{out} holds a run of another job: give -o another folder, or go on with that one (hetpipe train "
                             f"{file}):\n{listed(faults)}")  # fmt: skip
    target = exported(out, job)
    if target.exists() and not there:
        raise InputError(f"{target} is there already, and no checkpoint of the run that wrote it: give -o another folder")


def _identity(job: Job) -> list[tuple[str, Any]]:
    return flat({name: job.model_dump(mode="json")[name] or {} for name in SECTIONS}, "")


def write_cluster(out: str, made: Made) -> None:
    """The emulated cards, which every rank reads."""
    file = Path(out) / CLUSTER_FILE
    if made.cluster is not None:
        text = cluster_text(made.cluster)
        if not file.exists() or file.read_text("utf-8") != text:
            write_text(file, text)


def write_job(out: str, made: Made, command: str, also: Path | None = None) -> Path:
    """The job, in the folder, and where else it is wanted."""
    text = (
        f"# By: {command}\n# To change it and go on without that command, from the same folder: hetpipe train {out}/{JOB_FILE}\n"
        f"{yaml_text(made.content)}"
    )
    for file in (Path(out) / JOB_FILE, also):
        if file is not None:
            check_output(file)
            write_text(file, text)
    return Path(out) / JOB_FILE


def install(written: Path, target: Path) -> None:
    """Let a folder that is written whole become the target: nobody sees a part of it."""
    if target.exists():
        shutil.rmtree(target)
    written.rename(target)
