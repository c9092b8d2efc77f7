"""`hetpipe.Trainer`: a job on this rank, from meeting the others to the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetpipe.building.feed import sampler_of
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.checkpoints.kept import salvage
from hetpipe.checkpoints.resume import check_data
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.log import SUMMARY_FILE
from hetpipe.files.folders import check_room
from hetpipe.files.messages import InputError
from hetpipe.layers.model import unsplit_note
from hetpipe.processes.arithmetic import computing_by
from hetpipe.processes.progress import warn
from hetpipe.processes.whereabouts import resumes_from
from hetpipe.training.directing.by_job import ByJob
from hetpipe.training.directing.director import Director, Event
from hetpipe.training.directing.seen import Seen
from hetpipe.training.legs import run_legs
from hetpipe.training.observers.attending import check_loggers
from hetpipe.training.results.exported import export_run
from hetpipe.training.runlog import TrainResult, claim, curve_of, write_folder, write_report
from hetpipe.training.session import Request, Session, open_session, prepare

Planned = Callable[[Session, Plan, Profile], bool]


class Trainer:
    """Trains a job on this rank; every rank constructs one and calls `run`. Single process, torchrun, or `hetpipe train`."""

    def __init__(self, job: Job, director: Director | None = None) -> None:
        self.job, self.director = job, director

    def run(self, plan: Plan | None = None, profile: Profile | None = None, planned: Planned | None = None) -> TrainResult | None:
        """Measure, plan (unless given) and train. The main rank gets the result, the others None. `planned` is called on every
        rank before training begins, with what was planned; where it says False, on all ranks alike, nothing is trained."""
        _expect_to_resume(self.job)
        with computing_by(**self.job.train.arithmetic.model_dump()):
            session = open_session(self.job)
            with claim(self.job, session.world):
                return self._run(session, plan, profile, planned)

    def _run(self, session: Session, plan: Plan | None, profile: Profile | None, planned: Planned | None) -> TrainResult | None:
        job = session.job
        if (kept := job.checkpoint) is not None and kept.resume:
            session.world.on_main(lambda: salvage(kept.folder))
            _expect_to_resume(job)
        begins_at = check_data(job, session.content, session.world)
        _check_end_of_schedule(job, begins_at, sampler_of(session.data.train, job.train)[1], is_main=session.world.is_main)
        session.world.on_main(lambda: check_loggers(job))
        if session.world.is_main:
            _note_model(session)
        plan, profile = prepare(session, Request.by(job), plan, profile)
        if (section := job.checkpoint) is not None:
            needed = checkpoint_bytes(profile)
            session.world.on_main(lambda: check_room(section.folder, needed, "a checkpoint of this model"))
        if planned is not None and not planned(session, plan, profile):
            return None
        result = run_legs(session, Event("begin", begins_at, plan), profile, self.director or ByJob(session))
        if result is None:
            return None
        folder = Path(job.log.folder) if job.log is not None else None
        if folder is not None and (result.losses or not (folder / SUMMARY_FILE).exists()):
            assert result.plan is not None
            write_folder(folder, result.plan, profile, result)  # of a run that was finished, what it left stays
            cluster, seen = result.seen or (session.cluster, profile)
            shown = Seen(cluster, seen).named(result.plan, session.cluster)
            write_report(folder, shown, seen, cluster, result.measured, lambda: curve_of(job, result, folder))
        if (exported := export_run(job, result.best)) is not None:
            result.exported, result.exported_step = exported
        return result


def _check_end_of_schedule(job: Job, start: int, total: int, *, is_main: bool) -> None:
    """Say that a schedule ends before the run does, which goes from step `start` to `total`. InputError if a run that had ended
    with its schedule is made longer."""
    section = job.train.scheduler
    if section is None or section.end_step is None or section.end_step >= total:
        return
    behind = "rises again" if section.name == "CosineAnnealingLR" else "is that of its end"
    told = f"the schedule {section.name} ends at step {section.end_step} of {total}, behind which the learning rate {behind}"
    key = {"CosineAnnealingLR": "T_max"}.get(section.name, "total_iters")
    anew = f"train.scheduler={{name: {section.name}, {key}: {total - start}, from_step: {start}}}"
    if start == section.end_step:
        raise InputError(f"{told}. Let another schedule begin at this step, such as --set '{anew}'")
    if is_main:
        advice = f"{key}: {total - section.from_step - section.warmup_steps}" if start <= section.from_step else f"'{anew}'"
        warn(f"note: {told}. To give it the length of the run: {advice}")


def _expect_to_resume(job: Job) -> None:
    """What fails before the newest checkpoint is loaded is told with it, too."""
    if job.checkpoint is not None and (found := list_checkpoints(job.checkpoint.folder)):
        resumes_from(f"step {found[-1].name.removeprefix('step-').lstrip('0')}, {found[-1]}")


def checkpoint_bytes(profile: Profile) -> int:
    """About the bytes of a checkpoint: parameters, what the optimizer keeps of those that train, and buffers."""
    layers, (repeated, again) = profile.layers, profile.repeated_bytes(0, len(profile.layers))
    plain = sum(layer.parameter_bytes + layer.buffer_bytes for layer in layers) - repeated
    return round(plain + profile.optimizer.state_bytes_per_parameter_byte * (sum(x.trained for x in layers) - again))


def _note_model(session: Session) -> None:
    """Say which layers hold many modules, and which modules the model's function left in evaluation mode, since they train so."""
    if note := unsplit_note(session.model.layers):
        warn(f"note: {note}")
    still = [name for name, module in session.model.layers.named_modules() if name and not module.training]
    if still:
        warn(
            f"note: {len(still)} modules are in evaluation mode and stay in it (the first: {still[0]!r}); where that is not "
            "meant, call .train() on the model where it is built"
        )
