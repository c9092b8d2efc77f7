"""`hetpipe plan --pareto`: search, write what is asked for, print."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.catalogue import Catalogue, choice_of
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_folder, check_output, write_text
from hetpipe.planning.pareto import FrontWithPlans, make_front
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import note_of_precisions
from hetpipe.processes.environment import cores
from hetpipe.processes.progress import Activity, warn
from hetpipe.show.front_report import draw_front, front_csv, front_table
from hetpipe.show.picture.file import check_picture

FEW_ROWS = 12  # up to so many, processes would take longer to start than to plan
Outputs = tuple[Path | None, Path | None, Path | None]  # -o, --csv, --plans


def run_front(
    profile: Profile,
    source: Catalogue | Cluster,
    global_batch: int,
    options: PlanOptions,
    outputs: Outputs,
    as_json: bool,
    out: Console,
) -> None:
    """The command; PartitionError, after everything is written, if no sub-cluster has a plan."""
    _check(outputs)
    workers = cores() if choice_of(source).size > FEW_ROWS else 1
    with Activity("planning") as activity:
        found = make_front(
            profile,
            source,
            global_batch,
            options,
            workers=workers,
            progress=lambda done, total, text: activity.say(f"{done} of {total} sub-clusters, {text}"),
        )
    written = _write(found, outputs)
    told = dict.fromkeys(note_of_precisions(plan, profile, cluster, options) for plan, cluster in found.plans)
    for note in filter(None, told):
        warn(f"note: of the front, or a part of it: {note}")
    if as_json:
        sys.stdout.write(found.front.to_json())
    else:
        out.print(front_table(found.front))
        for path in written:
            out.print(f"written to {path}", soft_wrap=True)
    if not found.front.front:
        raise PartitionError(f"no sub-cluster has a plan; of the largest: {found.front.largest.reason}")


def _check(outputs: Outputs) -> None:
    """InputError where one of them cannot be written: known before the search."""
    output, table, plans = outputs
    check_picture(output, ".json", ".svg", ".png")
    check_output(table)
    if plans is not None:
        check_folder(plans)


def _write(found: FrontWithPlans, outputs: Outputs) -> list[Path]:
    """The front as JSON or picture, its CSV, and a folder with the plan and the cluster of each row of the front."""
    output, table, plans = outputs
    if output is not None and output.suffix.lower() == ".json":
        found.front.save(output)
    elif output is not None:
        draw_front(found.front, output)
    if table is not None:
        write_text(table, front_csv(found.front))
    if plans is not None:
        for row, (plan, cluster) in zip(found.front.front, found.plans, strict=True):
            name = "_".join(f"{template}-{count}" for template, count in row.nodes.items() if count)
            plan.save(plans / f"{name}.plan.json")
            cluster.save(plans / f"{name}.cluster.json")
    return [path for path in outputs if path is not None]
