"""`hetpipe convert fastspeed args.json -o job.yaml`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from hetpipe.documents.cluster import Cluster
from hetpipe.fastspeed.arguments import Arguments
from hetpipe.fastspeed.changes import SAME
from hetpipe.fastspeed.convert import Converted, convert
from hetpipe.files.formats import read_yaml
from hetpipe.files.messages import InputError, shown
from hetpipe.files.parsing import yaml_text
from hetpipe.files.screen import Screen
from hetpipe.files.writing import check_output, write_text

app = typer.Typer(help="Turn another trainer's config into a job.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Turn another trainer's config into a job."""


@app.command()
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
        data=_data_section(data),
        input_names=[name.strip() for name in input_names.split(",")] if input_names is not None else None,
        cluster=str(cluster) if cluster is not None else None,
        devices=[device.id for device in machines.devices] if machines is not None else None,
        plan_file=plan_file.name,
    )
    if found.plan is not None:
        found.plan.save(plan_file)
    options = {"": source, "-o": output, "--data": data, "--input-names": input_names, "--cluster": cluster}
    write_text(output, _job_text(found.job, output, options))
    files = [str(output), *([str(plan_file)] if found.plan is not None else [])]
    if as_json:
        changes = [change._asdict() for change in found.changes]
        sys.stdout.write(json.dumps({"files": files, "model": found.model, "changes": changes}, indent=1) + "\n")
    else:
        _print(found, files)


def _data_section(text: str | None) -> Mapping[str, Any] | None:
    """`--data` as the job's data section."""
    if text is None:
        return None
    value = read_yaml(text, f"--data {shown(text)}")
    if isinstance(value, str):
        return {"target" if ":" in value else "name": value}
    if not isinstance(value, dict):
        raise InputError(f"cannot read --data {shown(text)}; write 'module:function' or '{{name: cifar10, args: {{…}}}}'")
    return value


def _job_text(job: Mapping[str, Any], output: Path, options: Mapping[str, object]) -> str:
    """The job behind two comments: the command that trains it, and the command that wrote it."""
    given = [part for option, value in options.items() if value is not None for part in (option, str(value))]
    made = shlex.join(["hetpipe", "convert", "fastspeed", *(part for part in given if part)])
    return f"# hetpipe train {output}\n# By {made}\n{yaml_text(job)}"


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
