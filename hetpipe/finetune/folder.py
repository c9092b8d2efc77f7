"""The folder of a run: the job and the cluster file in it, and what a command does where another has left a run there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetpipe.checkpoints.checkpoint import list_checkpoints, read_state
from hetpipe.checkpoints.origin.base import BEGUN, is_one, with_saved_adapter
from hetpipe.checkpoints.origin.base import KEY as BASE
from hetpipe.checkpoints.origin.configured import CONFIG
from hetpipe.checkpoints.origin.revision import KEY as REVISION
from hetpipe.checkpoints.origin.revision import WEIGHTS
from hetpipe.checkpoints.resume import UNSAID, identity
from hetpipe.checkpoints.training_state import TrainerState
from hetpipe.documents.job import Job
from hetpipe.files.formats import flat, read_mapping
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.files.parsing import yaml_text
from hetpipe.files.writing import check_folder, check_output, write_text
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import ADAPTER, CLUSTER_FILE, JOB_FILE, MODEL, SOURCE, schedule
from hetpipe.finetune.emulated import cluster_text
from hetpipe.finetune.job import Made
from hetpipe.processes.progress import say, warn

DEVICES = ("train.precision",)  # of what makes a run what hangs on the devices, which may be others
OF_SCHEDULE = "train.scheduler."
RATE = "train.optimizer.lr"
OF_ADAPTER, HELD = "adapter.weights", "adapter.base"


def continued(asked: Asked, made: Made) -> Made:
    """The job as it goes on with the run that is in its folder, if there is one: of more steps, those that are left have a
    schedule of their own. InputError if files cannot be written there, or if the run there is another one; it says what to do
    instead. Makes nothing."""
    out, job = Path(asked.out), made.job
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file. Name a folder with -o")
    check_folder(out)
    job.check_folders()
    found = list_checkpoints(job.checkpoint.folder) if job.checkpoint is not None else []
    if not found:
        target = Path(job.export.folder) if job.export is not None else None
        if target is not None and target.exists():
            raise InputError(
                f"{target} exists, but {out} has no checkpoint of the run that wrote it. Name another folder with -o, or "
                f"remove {out}"
            )
        return made
    state = read_state(found[-1])
    if (told := made.content.other(state.data)) if made.content is not None and state.data is not None else "":
        raise InputError(f"{out} holds a run over other data: {told}. {_instead(asked, job, 'on these data')}")
    return _with_schedule(asked, made, state)


def _with_schedule(asked: Asked, made: Made, state: TrainerState) -> Made:
    """Give the job the schedule that the run had; where the command adds steps, another schedule begins here."""
    if state.step > made.steps:
        raise InputError(
            f"{asked.out} holds a run that has done {state.step} steps, and this command asks for {made.steps}. "
            f"{_instead(asked, made.job, 'anew')}"
        )
    keys = _with_base(asked, dict(made.keys), state)
    if made.open_schedule:
        keys["train"] = {**keys["train"], "scheduler": _saved_schedule(state)}
        section = Job.parse(keys, SOURCE).train.scheduler
        if section is None or section.end_step != made.steps:
            keys["train"]["scheduler"] = {**schedule(made.steps - state.step), "from_step": state.step}
    job = Job.parse(keys, SOURCE)
    begins = job.train.scheduler is not None and job.train.scheduler.from_step == state.step > 0
    own = identity(with_saved_adapter(job, saved := state.job or {}))
    if BEGUN in saved:
        own |= {BEGUN: job.adapter.weights if job.adapter is not None else None}
    changed = _changed(saved, own, begins=begins)
    if made.content is not None and state.data is not None and (read := [line for line in changed if line.startswith("data.")]):
        changed = [line for line in changed if line not in read]
        warn(f"note: the samples are the same as in the run in {asked.out}, though they are read in another way:\n{listed(read)}")
    if changed:
        raise InputError(
            f"{asked.out} holds a run of another job. {_instead(asked, job, 'as this command says')}"
            f"{_rate(changed, state, made.steps)}:\n{listed(changed)}"
        )
    if begins and made.open_schedule:
        say(
            f"the run in {asked.out} resumes from step {state.step} and ends at step {made.steps}. These steps have a new "
            "schedule: "
            f"a warm-up, and a cosine down to 0 (train.scheduler.from_step: {state.step})"
        )
    return made._replace(keys=keys, job=job)


def _with_base(asked: Asked, keys: dict[str, Any], state: TrainerState) -> dict[str, Any]:
    """Hold what does not train as the run holds it, where the command does not say how: the default depends on the devices."""
    was, section = (state.job or {}).get(HELD), keys.get("adapter")
    said = asked.base is not None or any(text.startswith("adapter") for text in asked.settings)
    if said or was is None or section is None or section.get("base") in (None, was):
        return keys
    warn(
        f"note: the frozen weights stay held as {was}, as in the run in {asked.out} (on these devices a new run would hold "
        "them as "
        f"{section['base']})"
    )
    return {**keys, "adapter": {**section, "base": was}}


def _saved_schedule(state: TrainerState) -> dict[str, Any] | None:
    """The section of the schedule that a run had."""
    found = {key.removeprefix(OF_SCHEDULE): value for key, value in (state.job or {}).items() if key.startswith(OF_SCHEDULE)}
    return {key: value for key, value in found.items() if (key, value) != ("from_step", 0)} or None


def _changed(saved: dict[str, Any], own: dict[str, Any], *, begins: bool) -> list[str]:
    """What of the job is another than it was; `begins`: its schedule, and with it the rate, begins here."""
    found = []
    for key in dict.fromkeys((*saved, *own)):
        was, now = saved.get(key, UNSAID.get(key)), own.get(key, UNSAID.get(key))
        free = key in (*DEVICES, BASE, REVISION) or key.startswith(CONFIG) or (begins and key.startswith((OF_SCHEDULE, RATE)))
        if was != now and not free and not _is_called_otherwise(key, was, now, saved):
            found.append(f"{OF_ADAPTER if key == BEGUN else key} was {shown(was)}, is {shown(now)}")
    return found


def _is_called_otherwise(key: str, was: Any, now: Any, saved: dict[str, Any]) -> bool:
    """Whether both are names of one folder; or a base was moved, of which the run itself sees whether it is the same."""
    if key not in (BEGUN, WEIGHTS) or None in (was, now):
        return False
    return is_one(was, now) or (key == WEIGHTS and BASE in saved and not Path(str(was)).exists() and Path(str(now)).exists())


def _rate(changed: list[str], state: TrainerState, steps: int) -> str:
    """How the run goes on at another rate."""
    if not all(line.startswith((RATE, OF_SCHEDULE)) for line in changed):
        return ""
    if state.step >= steps:
        return f"; that run has ended, at step {state.step}: to go on from there at this rate, ask for more --epochs or --steps"
    return f"; to resume this run from step {state.step}: --set train.scheduler.from_step={state.step}"


def _instead(asked: Asked, job: Job, what: str) -> str:
    """The ways to train something else."""
    is_adapter = job.adapter is not None
    name, first = f"{asked.out}/{ADAPTER if is_adapter else MODEL}", ""
    if not Path(name).is_dir():  # that run has not ended
        name = f"{asked.out}-{ADAPTER if is_adapter else MODEL}"
        first = f"hetpipe export-weights {asked.out}/{JOB_FILE} -o {name}, then "
    learned = f"{first}{'--adapter' if is_adapter else 'the model'} {name}"
    return f"To train {what}, name another folder with -o; to begin there with what that run has learned: {learned}"


def write_cluster(out: str, made: Made) -> None:
    """The emulated cards, which every rank reads."""
    file = Path(out) / CLUSTER_FILE
    if made.cluster is not None:
        text = cluster_text(made.cluster)
        if not file.exists() or file.read_text("utf-8") != text:
            write_text(file, text)


def _tell_replaced(file: Path, keys: dict[str, Any]) -> None:
    """What stands in the job that is there and not in the one that takes its place: somebody may have written it there."""
    try:
        before, now = dict(flat(read_mapping(file))), dict(flat(keys))
    except InputError:  # none, or no job
        return
    changed = [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]
    if changed:
        told = [f"{key} was {shown(before.get(key))}, is {shown(now.get(key))}" for key in changed]
        warn(
            f"note: this command replaces the job in {file}, which was another (to keep a key, give --set "
            f"KEY=VALUE):\n{listed(told)}"
        )


def write_job(out: str, made: Made, command: str, also: Path | None = None) -> Path:
    """The job, in the folder, and where else it is wanted."""
    text = (
        f"# By: {command}\n# To change it and resume without that command, from the same folder: hetpipe train {out}/{JOB_FILE}\n"
        f"{yaml_text(made.keys)}"
    )
    _tell_replaced(Path(out) / JOB_FILE, made.keys)
    for file in (Path(out) / JOB_FILE, also):
        if file is not None:
            check_output(file)
            write_text(file, text)
    return Path(out) / JOB_FILE
