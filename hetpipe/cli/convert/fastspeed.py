"""`hetpipe convert fastspeed args.json -o job.yaml`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from hetpipe.cli.convert.job_file import data_section, job_text
from hetpipe.documents.cluster import Cluster
from hetpipe.fastspeed.arguments import Arguments
from hetpipe.fastspeed.changes import SAME
from hetpipe.fastspeed.convert import Converted, convert
from hetpipe.files.screen import Screen
from hetpipe.files.writing import check_output, write_text


def fastspeed(
    source: Annotated[Path, typer.Argument(metavar="ARGS.JSON", help="FastSpeed's args.json")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the job.")] = Path("job.yaml"),
    data: Annotated[
        str | None,
        typer.Option(help="The data, because args.json does not name them: 'module:function', or '{name: cifar10, args: {…}}'."),
    ] = None,
    input_names: Annotated[
        str | None,
        typer.Option(help="If samples' inputs are dicts: the keys that the model reads, such as 'input_ids,attention_mask'."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="The cluster: cluster.yaml. Its devices take the entries of the manual lists in their order."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the job (and for shares given by hand, its plan) that FastSpeed's args.json means, and say what is different."""
    plan_file = output.with_suffix(".plan.json") if output.name else output
    check_output(output)
    check_output(plan_file)
    machines = Cluster.load(cluster) if cluster is not None else None
    found = convert(
        Arguments.load(source),
        data=data_section(data),
        input_names=[name.strip() for name in input_names.split(",")] if input_names is not None else None,
        cluster=str(cluster) if cluster is not None else None,
        devices=[device.id for device in machines.devices] if machines is not None else None,
        plan_file=plan_file.name,
    )
    if found.plan is not None:
        found.plan.save(plan_file)
    options = {"": source, "-o": output, "--data": data, "--input-names": input_names, "--cluster": cluster}
    write_text(output, job_text(found.job, output, "fastspeed", options))
    files = [str(output), *([str(plan_file)] if found.plan is not None else [])]
    if as_json:
        changes = [change._asdict() for change in found.changes]
        sys.stdout.write(json.dumps({"files": files, "model": found.model, "changes": changes}, indent=1) + "\n")
    else:
        _print(found, files)


def _print(found: Converted, files: list[str]) -> None:
    table = Table(title=f"{found.model}: what is different", box=box.SIMPLE, show_edge=False)
    for name in ("args.json", "in FastSpeed", "in the job", "why"):
        table.add_column(name, overflow="fold")
    for change in found.changes:
        if change.why != SAME:
            table.add_row(*change)
    console = Screen(highlight=False)
    console.print(table)
    kept = ", ".join(change.key for change in found.changes if change.why == SAME)
    console.print(f"the same: {kept}", soft_wrap=True)
    console.print(f"written: {', '.join(files)}", soft_wrap=True)
