"""The commands. Exit codes: 0 done, 2 the input is wrong, 3 no plan fits, 1 anything else."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hetpipe import __version__
from hetpipe.cli import exits
from hetpipe.cli.convert.command import app as convert
from hetpipe.cli.exchange import export_command, import_command
from hetpipe.cli.finetune.command import finetune
from hetpipe.cli.generate import generate
from hetpipe.cli.guesses import instead
from hetpipe.cli.launch.command import launch
from hetpipe.cli.terminal import Verbose, install_watching, nothing_else
from hetpipe.cli.weights import export_weights_command
from hetpipe.cli.what_if import what_if
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import is_assumed, told_of
from hetpipe.documents.clusters.catalogue import Catalogue, choice_of, load_choice
from hetpipe.documents.job import Job
from hetpipe.documents.options import EffortChoice, PlanOptions, ScheduleChoice
from hetpipe.documents.plan import Backend, Plan
from hetpipe.documents.precisions import parse_precision
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.log import LOG_FILES
from hetpipe.files.formats import Document
from hetpipe.files.limits import MOST_BATCH
from hetpipe.files.messages import InputError, counted, nearest
from hetpipe.files.screen import Screen
from hetpipe.files.writing import check_output
from hetpipe.planning import registry
from hetpipe.planning.front import Front
from hetpipe.processes.environment import check_environment, place
from hetpipe.processes.progress import Activity, say, show_with
from hetpipe.processes.ranks.launch import start_server
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.processes.stopping import StopRequest, importing
from hetpipe.show.command import show
from hetpipe.whatif.cards import Cards

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(convert, name="convert")
app.command(name="export-weights")(export_weights_command)
app.command()(finetune)
app.command()(generate)
app.command(name="export")(export_command)
app.command(name="import")(import_command)
app.command()(launch)
app.command()(show)
app.command(name="what-if")(what_if)
out, err = Screen(), Screen(stderr=True)

ProfileFile = Annotated[Path, typer.Option("--profile", help="The profile: profile.json.")]
ClusterFile = Annotated[Path, typer.Option("--cluster", help="The cluster: cluster.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set a key of the job, such as train.steps=50. May be repeated.")
]
JobFile = Annotated[Path, typer.Argument(help="The job: job.yaml.")]

FORMATS: dict[str, type[Document]] = {
    "cluster": Cluster,
    "profile": Profile,
    "plan": Plan,
    "job": Job,
    "catalogue": Catalogue,
    "front": Front,
    "cards": Cards,
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hetpipe {__version__}")
        raise typer.Exit


@app.callback(help="Measure unequal devices, plan for them, train on them.")
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...
def _is_main() -> bool:
    """Whether this process is the one that writes files: of those that torchrun started, the first."""
    return place().rank == 0


def _say_job(path: Path, job: Job) -> None:
    """What begins, before what takes time does."""
    cluster = job.read_cluster()
    devices = f"{counted(cluster.device_count, 'device')} of {job.cluster}" if cluster is not None else ""
    say(f"{path}: {job.model.label} on {devices or 'the devices that are here'}")


def _note_links(cluster: Cluster) -> None:
    if borrowed := cluster.borrowed_links:
        err.print(f"note: {borrowed}", soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


@app.command()
def profile(
    job_file: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the profile.")] = Path("profile.json"),
    share: Annotated[
        Path | None,
        typer.Option(help="Also write a small file, without anything private, that 'hetpipe what-if --profiles' reads."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision to measure: fp32, fp16 or bf16 for all types, 'T4=fp16,A100=bf16', or auto: all that each type has."
        ),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure every layer of the job's model on every type of device of this machine, or under torchrun of all machines."""
    check_environment()
    job = Job.read(job_file, settings or ())
    chosen = PlanOptions().changed({"precision": parse_precision(precision)}).precision
    registry.check_names(job)
    if _is_main():
        check_output(output)
        check_output(share)
        _say_job(job_file, job)
    with nothing_else(as_json):
        start_server(modules_of(job))
        with importing(), Activity("starting: importing torch", shown=place().local_rank == 0):
            from hetpipe.show.tables import beside_table, profile_table
            from hetpipe.training.start import profile_everywhere

        measured = profile_everywhere(job, chosen)
    if measured is None:
        return
    measured.save(output)
    if share is not None:
        from hetpipe.whatif.shared import share_profile

        share_profile(measured, job.model.name or "own", share)
    if as_json:
        sys.stdout.write(measured.to_json())
    else:
        out.print(profile_table(measured))
        out.print(beside_table(measured))
        for path in filter(None, (output, share)):
            out.print(f"profile written to {path}", soft_wrap=True)


@app.command()
def plan(
    profile: ProfileFile,
    cluster: ClusterFile,
    global_batch: Annotated[int, typer.Option("--global-batch", min=1, max=MOST_BATCH, help="Samples of one optimizer step.")],
    partitioner: Annotated[str, typer.Option(help="auto, or the name of another partitioner.")] = "auto",
    schedule: Annotated[ScheduleChoice, typer.Option(help="The order of a stage's actions.")] = "auto",
    backend: Annotated[Backend, typer.Option(help="The engine that will run the plan.")] = "torch",
    max_price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Most that the devices of the plan may cost together.")
    ] = None,
    deadline_seconds_per_step: Annotated[
        float | None, typer.Option(min=0, help="Find the cheapest plan whose step is no longer.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds to search. The best plan found by then is taken.")] = None,
    effort: Annotated[EffortChoice, typer.Option(help="How much auto tries. Less effort ends sooner.")] = "normal",
    pareto: Annotated[bool, typer.Option("--pareto", help="Find the front of price and time over all sub-clusters.")] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="With --pareto: write a line for every sub-cluster to this file.")
    ] = None,
    plans: Annotated[
        Path | None, typer.Option("--plans", help="With --pareto: write the plans of the front to this folder.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="If the profile holds several precisions: fp32, fp16 or bf16 for all types, 'T4=fp16,A100=bf16', or auto."
        ),
    ] = None,
    memory_reserve: Annotated[
        float | None,
        typer.Option(
            help="Fraction of each device's memory to leave free, instead of the memory that the framework is assumed to take."
        ),
    ] = None,
    no_recompute: Annotated[bool, typer.Option("--no-recompute", help="Plan without recomputing activations.")] = False,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Allow stages to keep activations in the host's memory, or not. By default they may on nodes "
            "that have a host_memory, if copies were measured.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write the plan. With --pareto: the front, as .json, .svg or .png."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the plan: which device computes which layers and samples. Print it with a lower bound and the gap to the bound."""
    from hetpipe.planning.partition import PartitionError
    from hetpipe.planning.planner import make_plan, note_of_precisions
    from hetpipe.show.draw import PICTURES
    from hetpipe.show.report import plan_table

    measured, machines = Profile.load(profile), load_choice(cluster)
    options = PlanOptions().changed(
        {
            "partitioner": partitioner,
            "schedule": schedule,
            "backend": backend,
            "max_price_per_hour": max_price_per_hour,
            "deadline_seconds_per_step": deadline_seconds_per_step,
            "allow_recompute": not no_recompute,
            "allow_offload": offload,
            "precision": parse_precision(precision),
            "memory_reserve": memory_reserve,
            "time_limit_seconds": time_limit,
            "effort": effort,
        }
    )
    whole = choice_of(machines).whole() if isinstance(machines, Catalogue) else measured.joined(machines)
    if pareto:
        from hetpipe.cli.front import run_front

        run_front(measured, machines, global_batch, options, (output, csv, plans), as_json, out)
        _note_links(whole)
        return
    check_output(output)
    if output is not None and output.suffix.lower() in PICTURES:
        raise InputError(f"cannot write {output}: a plan is written as .json. To draw it, use 'hetpipe show'")
    if isinstance(machines, Catalogue) or csv is not None or plans is not None:
        what = f"{cluster} is a catalogue" if isinstance(machines, Catalogue) else "--csv and --plans are for fronts"
        raise InputError(f"{what}. To plan over all sub-clusters, give --pareto")
    with Activity("planning") as activity, StopRequest(signal.SIGINT) as request:
        try:
            found = make_plan(measured, machines, global_batch, options, progress=activity.say, stopped=request.__bool__)
        except PartitionError as error:
            if request and error.out_of_time:
                raise KeyboardInterrupt from None
            raise
    _note_links(whole)
    if options.memory_reserve is None and is_assumed(machines):
        err.print(f"note: {told_of(machines, measured)}")
    if note := note_of_precisions(found, measured, machines, options):
        err.print(f"note: {note}", soft_wrap=True)
    if output is not None:
        found.save(output)
    if as_json:
        sys.stdout.write(found.to_json())
    else:
        out.print(plan_table(found, profile=measured, cluster=whole))
    if request:
        err.print("note: the search was stopped. This is the best plan that it had found")
        raise KeyboardInterrupt


@app.command(name="simulate")
def simulate_command(
    plan: Annotated[Path, typer.Option("--plan", help="The plan: plan.json.")],
    profile: ProfileFile,
    cluster: ClusterFile,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict one step of a plan: its time, what limits it, why each device is idle, and its memory."""
    from hetpipe.predict.idle import idle_seconds
    from hetpipe.show.report import text_gantt
    from hetpipe.show.tables import step_table
    from hetpipe.show.trace import save_trace
    from hetpipe.show.words import memory_warnings
    from hetpipe.study.make import make_study

    check_output(trace)
    own, layers, machines = Plan.load(plan), Profile.load(profile), Cluster.load(cluster)
    study = make_study(own, profile=layers, cluster=machines, source=str(plan), rules=())
    timeline = study.predicted
    assert timeline is not None
    assert study.cluster is not None
    _note_links(study.cluster)
    warnings = [*memory_warnings(study.scene), *timeline.warnings]
    for warning in warnings:
        err.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if trace is not None:
        save_trace(trace, {"predicted": timeline})
    if as_json:
        _print_json(
            {
                "step_seconds": timeline.step_seconds,
                "pipeline_seconds": timeline.pipeline_seconds,
                "gradient_sync_seconds": timeline.sync_seconds,
                "optimizer_seconds": timeline.optimizer_seconds,
                "bubble_fraction": timeline.bubble_fraction(),
                "idle_seconds": idle_seconds(timeline),
                "peak_bytes": dict(timeline.peak_bytes),
                "does_not_fit": study.too_full(),
                "unused_devices": study.unused(),
                "warnings": warnings,
            }
        )
    else:
        out.print(step_table(study.scene))
        out.print(text_gantt(timeline, scene=study.scene))


@app.command()
def train(
    job_file: JobFile,
    plan: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of the job's.")] = None,
    settings: Settings = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show how busy and how full each device is while it trains.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train a job. On one machine the command starts the ranks itself; on several, start it under torchrun on each."""
    check_environment()
    asked = Job.read(job_file, settings or ())
    job = asked.with_log(job_file)
    registry.check_names(job)
    if plan is not None:
        job = job.model_copy(update={"plan": job.plan.model_copy(update={"file": str(plan)})})
    planned_on = job.check_files()
    if _is_main():
        job.check_folders()
        _say_job(job_file, job)
        if planned_on is not None:
            _note_links(planned_on)
        if asked.log is None and job.log is not None:
            say(f"this job has no section 'log', so its log goes to {job.log.folder}")
        if job.checkpoint is None:
            say(
                "this job has no section 'checkpoint', so nothing will be saved. To save, write "
                "checkpoint: {folder: checkpoints/NAME}"
            )
    if watch:
        show_with(install_watching)
    with nothing_else(as_json):
        start_server(modules_of(job))
        with importing(), Activity("starting: importing torch", shown=place().local_rank == 0):
            from hetpipe.training.results.table import train_table
            from hetpipe.training.start import train_everywhere, train_rank

        result = train_everywhere(job, train_rank)
    if result is None:
        return
    if as_json:
        _print_json(result.summary())
        return
    out.print(train_table(result, devices=verbose))
    if result.exported is not None:
        out.print(f"the weights are in {result.exported}", soft_wrap=True)
    if job.log is not None:
        there = [name for name in LOG_FILES if (Path(job.log.folder) / name).is_file()]
        out.print(f"in {job.log.folder}: {', '.join(there)}", soft_wrap=True)


@app.command()
def schema(
    name: Annotated[str, typer.Argument(help="The format: cluster, profile, plan, job, catalogue, front or cards.")],
) -> None:
    """Print the JSON Schema of a file format."""
    if name not in FORMATS:
        raise InputError(f"unknown format {name!r}{nearest(name, list(FORMATS))}")
    _print_json(FORMATS[name].model_json_schema())


def main(run: Callable[[], object] = app) -> NoReturn:
    """Run the command line (`run`: another's) and end the process with its exit code."""
    exits.main(run, instead)
