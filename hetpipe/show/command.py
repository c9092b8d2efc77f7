"""`hetpipe show`, also as a script of its own: `python -m hetpipe.show PLAN --profile PROFILE --cluster CLUSTER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.log import PLAN_FILE, PROFILE_FILE
from hetpipe.files.messages import InputError
from hetpipe.files.screen import Screen
from hetpipe.planning.front import Front
from hetpipe.processes.progress import Activity
from hetpipe.study.study import Study


def show(
    plan: Annotated[Path, typer.Argument(help="plan.json, or the log folder of a run, with its plan and profile.")],
    profile: Annotated[Path | None, typer.Option(help="profile.json: names, times and bytes of the layers.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="cluster.yaml: types of the devices, links.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The partition as .svg or .png, or a report as .html.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A run's trace.json: its measured step, beside the predicted one (.html).")
    ] = None,
    front: Annotated[Path | None, typer.Option(help="front.json of 'hetpipe plan --pareto': price against time (.html).")] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="In a report: plan clusters of one device more or less.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show a plan: who computes what, when, and what limits the step; as text, as a picture, or as a report."""
    from hetpipe.show.draw import PICTURES, draw_plan
    from hetpipe.show.picture.file import check_picture
    from hetpipe.show.trace import load_measured
    from hetpipe.study.make import belonging, make_study
    from hetpipe.study.rules import rule_names

    check_picture(output, *PICTURES)
    if plan.is_dir():
        folder, plan = plan, _plan_in(plan)
        profile = folder / PROFILE_FILE if profile is None and (folder / PROFILE_FILE).is_file() else profile
    own, source, page = Plan.load(plan), str(plan), output is not None and output.suffix.lower() == ".html"
    layers = Profile.load(profile) if profile is not None else None
    machines = Cluster.load(cluster) if cluster is not None else None
    run = load_measured(measured) if measured is not None else None
    prices = Front.load(front) if front is not None else None
    if as_json and output is None:
        belonging(own, layers, machines, source)
        sys.stdout.write(own.to_json())
        return
    with Activity("drawing", shown=output is not None) as activity:
        study = make_study(
            own,
            profile=layers,
            cluster=machines,
            measured=run,
            front=prices,
            source=source,
            rules=rule_names() if page else None,
            changes=page and what_if,
            cuts=page,
            progress=activity.say,
        )
        if output is not None:
            draw_plan(study, output)
    if output is not None:
        Screen(stderr=True).print(f"picture written to {output}", soft_wrap=True)
    if as_json:
        sys.stdout.write(own.to_json())
    else:
        _print(study)


def _print(study: Study) -> None:
    """The plan in the terminal, after what has to be known of it."""
    from hetpipe.show.report import plan_table, text_gantt
    from hetpipe.show.text_picture import LEAST_COLUMNS, TextPicture
    from hetpipe.show.words import memory_warnings

    out, err = Screen(), Screen(stderr=True)
    if study.cluster is not None and study.cluster.borrowed_links:
        err.print(f"note: {study.cluster.borrowed_links}", soft_wrap=True)
    for warning in memory_warnings(study.scene):
        err.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    out.print(TextPicture(study.scene))
    out.print(plan_table(study.plan, profile=study.profile, cluster=study.cluster))
    if study.predicted is not None and out.width >= LEAST_COLUMNS:
        out.print(text_gantt(study.predicted, scene=study.scene))


def _plan_in(folder: Path) -> Path:
    """The plan of a run's log folder; InputError, with what to give, for any other folder."""
    if (folder / PLAN_FILE).is_file():
        return folder / PLAN_FILE
    there = sorted(path.name for path in folder.glob("*.json") if path.is_file())
    if there:
        hint = f"give one of its files, such as {folder / there[0]}"
    elif any(folder.glob("step-*")):
        hint = "it holds checkpoints; the plan of a run is in the folder log.folder of its job"
    else:
        hint = "give a plan, which 'hetpipe plan -o plan.json' writes, and every run into the folder log.folder of its job"
    raise InputError(f"{folder} is a folder without {PLAN_FILE}: {hint}")
