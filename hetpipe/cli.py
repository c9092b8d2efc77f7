"""The commands. Exit codes: 0 done, 2 the input is wrong, 3 no plan fits, 1 anything else."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from hetpipe.catalogue import Catalogue, load_choice
from hetpipe.cluster import Cluster
from hetpipe.config import Job
from hetpipe.fastspeed.command import app as convert
from hetpipe.formats import Document, InputError, check_output, clipped, exit_code, nearest, write_text
from hetpipe.front import Front
from hetpipe.launch import RankFailure, end_server, root_cause, start_server, whereabouts
from hetpipe.limits import MOST_BATCH
from hetpipe.plan import Plan
from hetpipe.profiles import Profile
from hetpipe.weights_command import export_weights

app = typer.Typer(help="Measure unequal devices, plan for them, train on them.", no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False)  # fmt: skip
app.add_typer(convert, name="convert")
app.command()(export_weights)
out, err = Console(), Console(stderr=True)

ProfileFile = Annotated[Path, typer.Option("--profile", help="profile.json")]
ClusterFile = Annotated[Path, typer.Option("--cluster", help="cluster.yaml")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key of the job: train.steps=50. May be repeated.")
]
JobFile = Annotated[Path, typer.Argument(help="job.yaml")]

FORMATS: dict[str, type[Document]] = {
    "cluster": Cluster, "profile": Profile, "plan": Plan, "job": Job, "catalogue": Catalogue, "front": Front,
}  # fmt: skip


def _is_main() -> bool:
    """Whether this process is the one that writes files: of those that torchrun started, the first."""
    return os.environ.get("RANK", "0") == "0"


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


@app.command()
def profile(
    job_file: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the profile.")] = Path(
        "profile.json"
    ),
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure every layer of the job's model on every type of device: on this machine, or under torchrun on all of them."""
    job = Job.read(job_file, settings or ())
    if _is_main():
        check_output(output)
    start_server(job.model.name)
    from hetpipe.start import profile_everywhere
    from hetpipe.tables import profile_table

    measured = profile_everywhere(job)
    if measured is None:
        return
    measured.save(output)
    if as_json:
        sys.stdout.write(measured.to_json())
    else:
        out.print(profile_table(measured))
        out.print(f"profile written to {output}", markup=False, soft_wrap=True)


@app.command()
def plan(
    profile: ProfileFile,
    cluster: ClusterFile,
    global_batch: Annotated[
        int, typer.Option("--global-batch", min=1, max=MOST_BATCH, help="Samples of one optimizer step.")
    ],
    partitioner: Annotated[str, typer.Option(help="auto, or another by name.")] = "auto",
    schedule: Annotated[Literal["auto", "gpipe", "1f1b"], typer.Option()] = "auto",
    backend: Annotated[Literal["torch", "fairscale", "torchgpipe"], typer.Option()] = "torch",
    max_price_per_hour: Annotated[float | None, typer.Option(min=0)] = None,
    deadline_seconds_per_step: Annotated[float | None, typer.Option(min=0)] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds to search; then the best plan so far.")
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The front of price and time over all sub-clusters.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="With --pareto: every sub-cluster as a line.")
    ] = None,
    plans: Annotated[
        Path | None, typer.Option("--plans", help="With --pareto: a folder for the plans of the front.")
    ] = None,
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Plan without recomputing activations.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write the plan; with --pareto .json, .svg or .png."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find who computes what: replicas, stages, shares; with a lower bound and the gap to it."""
    from hetpipe.draw import PICTURES
    from hetpipe.planner import make_plan
    from hetpipe.report import plan_table

    measured, machines = Profile.load(profile), load_choice(cluster)
    options: dict[str, Any] = {
        "partitioner": partitioner,
        "schedule": schedule,
        "backend": backend,
        "max_price_per_hour": max_price_per_hour,
        "deadline_seconds_per_step": deadline_seconds_per_step,
        "allow_recompute": not no_recompute,
        "time_limit_seconds": time_limit,
    }
    if pareto:
        from hetpipe.front_command import run_front

        run_front(measured, machines, global_batch, options, (output, csv, plans), as_json, (out, err))
        return
    check_output(output)
    if output is not None and output.suffix.lower() in PICTURES:
        raise InputError(f"cannot write {output}: a plan is written as .json, which 'hetpipe show' draws")
    if isinstance(machines, Catalogue) or csv is not None or plans is not None:
        what = f"{cluster} is a catalogue" if isinstance(machines, Catalogue) else "--csv and --plans are for fronts"
        raise InputError(f"{what}: plan over all of its sub-clusters with --pareto")
    with err.status("planning") as status:
        found = make_plan(
            measured, machines, global_batch, **options,
            progress=lambda message: status.update(f"planning: {message}"),
        )  # fmt: skip
    if output is not None:
        found.save(output)
    if as_json:
        sys.stdout.write(found.to_json())
    else:
        out.print(plan_table(found, profile=measured, cluster=machines.with_links(measured.links)))


@app.command()
def simulate(
    plan: Annotated[Path, typer.Option("--plan", help="plan.json")],
    profile: ProfileFile,
    cluster: ClusterFile,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict one step of a plan: its time, its bubbles, its memory."""
    from hetpipe.footprint import with_memory
    from hetpipe.report import text_gantt
    from hetpipe.simulator import simulate as run
    from hetpipe.trace import save_trace

    check_output(trace)
    found, measured, machines = Plan.load(plan), Profile.load(profile), Cluster.load(cluster)
    timeline = with_memory(run(found, measured, machines), found, measured, machines)
    for warning in timeline.warnings:
        err.print(f"warning: {warning}", style="yellow", markup=False)
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
                "peak_bytes": dict(timeline.peak_bytes),
            }
        )
    else:
        out.print(text_gantt(timeline))


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    profile: Annotated[
        Path | None, typer.Option(help="profile.json: names, times and bytes of the layers.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="cluster.yaml: types of the devices.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A picture: .svg, .png or .html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: as a table and a Gantt chart, or as a picture of the partition."""
    from hetpipe.draw import PICTURES, draw_plan
    from hetpipe.report import plan_table, text_gantt
    from hetpipe.simulator import simulate as run

    check_output(output, *PICTURES)
    found = Plan.load(plan)
    measured = Profile.load(profile) if profile is not None else None
    machines = Cluster.load(cluster) if cluster is not None else None
    if machines is not None and measured is not None:
        machines = machines.with_links(measured.links)
    found.check(cluster=machines, profile=measured, source=str(plan))
    timeline = run(found, measured, machines) if measured is not None and machines is not None else None
    if output is not None:
        draw_plan(found, output, profile=measured, cluster=machines, timeline=timeline)
        err.print(f"picture written to {output}", markup=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(found.to_json())
        return
    out.print(plan_table(found, profile=measured, cluster=machines))
    if timeline is not None:
        out.print(text_gantt(timeline))


@app.command()
def train(
    job_file: JobFile,
    plan: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of the job's.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a job: starts its own ranks on one machine; works unchanged under torchrun on many."""
    job = Job.read(job_file, settings or ())
    if plan is not None:
        job = job.model_copy(update={"plan": job.plan.model_copy(update={"file": str(plan)})})
    job.check_files()
    if _is_main():
        job.check_folders()
    start_server(job.model.name)
    from hetpipe.start import train_everywhere, train_rank
    from hetpipe.tables import train_table

    _note_missing_gpus(job)
    result = train_everywhere(job, train_rank)
    if result is None:
        return
    if as_json:
        _print_json(result.summary())
        return
    out.print(train_table(result))
    if job.log is not None:
        what = "plan, profile, metrics.jsonl, trace.json and summary.json"
        out.print(f"{what} are in {job.log.folder}", markup=False, soft_wrap=True)


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    to: Annotated[str, typer.Option("--to", help="megatron, torchrun or deepspeed")],
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.yaml: hosts, nodes and types of the devices.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="LO:HI, the layers that are transformer blocks (megatron).")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the script.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as the launch arguments that come closest in another system, and say what is lost."""
    from hetpipe.export import export as run
    from hetpipe.export import parse_blocks

    check_output(output)
    machines = Cluster.load(cluster) if cluster is not None else None
    found = run(Plan.load(plan), to, cluster=machines, blocks=parse_blocks(blocks))
    if output is not None:
        write_text(output, found.text)
    if as_json:
        _print_json({"target": found.target, "text": found.text, "lost": list(found.lost)})
    elif output is None:
        sys.stdout.write(found.text)


@app.command(name="import")
def import_(
    layout: Annotated[str, typer.Argument(help="sailor, fasop or metis: whose published files they are.")],
    sources: Annotated[
        list[Path], typer.Argument(help="Their folder; for metis also its clusterfile and hostfile.")
    ],
    model: Annotated[str, typer.Option(help="Which model, or (metis) what to call it.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the profile.")] = Path(
        "profile.json"
    ),
    cluster_output: Annotated[Path | None, typer.Option(help="Where to write the cluster.")] = None,
    nodes: Annotated[str, typer.Option(help="The cluster: '4xGH-96x4,1xV100-16x8'.")] = "",
    zone: Annotated[str, typer.Option(help="sailor: the zone of the nodes.")] = "us-central1-a",
    link: Annotated[str | None, typer.Option(help="fasop, metis: between nodes, '5 GB/s'.")] = None,
    inside: Annotated[list[str] | None, typer.Option(help="fasop, metis: 'A100=230 GB/s'.")] = None,
    memory: Annotated[list[str] | None, typer.Option(help="Of a device type: 'A100=40 GiB'.")] = None,
    hidden_size: Annotated[int, typer.Option(min=0)] = 0,
    sequence_length: Annotated[int, typer.Option(min=0)] = 0,
    attention_heads: Annotated[int, typer.Option(min=0)] = 0,
    vocabulary: Annotated[int, typer.Option(min=0)] = 0,
    number_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a parameter.")] = 4,
) -> None:
    """Turn a profile that another planner published into profile.json and cluster.yaml."""
    from hetpipe.importers import ImportOptions, import_published, parse_quantities

    check_output(output)
    check_output(cluster_output)
    links, sizes = parse_quantities(link, inside or (), memory or ())
    options = ImportOptions(
        model=model, nodes=nodes, zone=zone, link=links.pop("", None), inside=links, memory=sizes,
        hidden_size=hidden_size, sequence_length=sequence_length, attention_heads=attention_heads,
        vocabulary=vocabulary, number_bytes=number_bytes,
    )  # fmt: skip
    found = import_published(layout, sources, options)
    if cluster_output is not None and found.cluster is None:
        raise InputError("--cluster-output needs a cluster: say which with --nodes, such as '4xGH-96x4'")
    found.profile.save(output)
    out.print(f"profile written to {output}")
    if cluster_output is not None and found.cluster is not None:
        found.cluster.save(cluster_output)
        out.print(f"cluster written to {cluster_output}")


def _note_missing_gpus(job: Job) -> None:
    import torch

    cluster = job.read_cluster()
    real = (
        [k for k, kind in cluster.device_types.items() if kind.emulate is None and k != "cpu"]
        if cluster
        else []
    )
    if real and not torch.cuda.is_available():
        err.print(
            f"note: no GPU is found here, so devices of type {', '.join(real)} are plain CPU processes, which share its cores",
            style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
def schema(
    name: Annotated[str, typer.Argument(help="cluster, profile, plan, job, catalogue or front")],
) -> None:
    """Print the JSON Schema of a file format."""
    if name not in FORMATS:
        raise InputError(f"unknown format {name!r}{nearest(name, list(FORMATS))}")
    _print_json(FORMATS[name].model_json_schema())


def _report(error: BaseException, code: int) -> None:
    """The message, last of all that is printed; behind a traceback where it is nobody's input that is wrong."""
    message = str(error)
    if isinstance(error, RankFailure) and error.report is not None:
        if code == 1:
            sys.stderr.write(error.report.trace)
        else:
            message = error.report.error or message
    elif code == 1 and not isinstance(error, RankFailure):
        sys.stderr.write("".join(traceback.format_exception(error)))
        root = root_cause(error)
        message = f"{type(root).__name__}: {root}"
        if "RANK" in os.environ:
            message = f"{whereabouts(int(os.environ['RANK']))}: {message}"
    if code != 1:
        message = clipped(message)
    err.print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def main(run: Callable[[], object] = app) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a job's package.module:function may lie here, as under python -m
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be characters
    try:
        run()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = exit_code(error)
        _report(error, code)
    if "RANK" in os.environ:
        # No destructors: after a failure, process groups would wait in them for peers that are gone; after success, they
        # end a process now and then with "terminate called without an active exception", which torchrun calls a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    end_server()
    sys.exit(code)
