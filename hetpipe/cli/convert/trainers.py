"""`hetpipe convert llamafactory|axolotl CONFIG.YAML --devices N -o job.yaml`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from hetpipe.cli.convert.job_file import data_section, job_text
from hetpipe.exchange.configs import Asked, Converted, Line, convert
from hetpipe.files.limits import MOST_COUNT, MOST_DEVICES
from hetpipe.files.messages import visible
from hetpipe.files.screen import Screen
from hetpipe.files.writing import check_output, write_text

TITLES = {
    "taken": "taken over",
    "planned": "decided by the plan",
    "no_counterpart": "no counterpart",
    "unknown": "unknown",
    "defaults": "not in the file: their defaults, written into the job",
}
WRITTEN = ("taken", "defaults")  # lists whose lines say what is written into the job
COLUMNS = {"key": "key", "there": "there", "job": "in the job", "note": "what that means"}
Config = Annotated[Path, typer.Argument(metavar="CONFIG.YAML", help="The configuration of the run.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Where to write the job.")]
Devices = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_DEVICES, help="On how many GPUs it ran, over all machines. The global batch follows from it."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_COUNT, help="How many steps it took, if its data cannot be counted (packed rows, data of the hub)."
    ),
]
Data = Annotated[str | None, typer.Option(help="The data, in the place of theirs: '{name: chat, args: {file: chats.jsonl}}'.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="The cluster on which to train: cluster.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def command(trainer: str, called: str) -> Callable[..., None]:
    """The command that converts configurations of this trainer."""

    def run(
        config: Config,
        devices: Devices = None,
        steps: Steps = None,
        data: Data = None,
        cluster: ClusterFile = None,
        output: Output = Path("job.yaml"),
        as_json: AsJson = False,
    ) -> None:
        options = {"": config, "-o": output, "--devices": devices, "--steps": steps, "--data": data, "--cluster": cluster}
        _convert(trainer, options, Asked(devices, steps, data_section(data), _text(cluster)), as_json)

    run.__name__ = trainer
    run.__doc__ = (
        f"Write the job that trains what a configuration of {called} would (LoRA, QLoRA or all parameters; on answers, texts or "
        "preferences), and list every key."
    )
    return run


llamafactory, axolotl = command("llamafactory", "LLaMA-Factory"), command("axolotl", "axolotl")


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None


def _convert(trainer: str, options: Mapping[str, object], asked: Asked, as_json: bool) -> None:
    config, output = Path(str(options[""])), Path(str(options["-o"]))
    check_output(output)
    found = convert(trainer, config, asked)
    write_text(output, job_text(found.job, output, trainer, options))
    if as_json:
        lists = {name: [line._asdict() for line in lines] for name, lines in found.lists.items()}
        sys.stdout.write(json.dumps({"files": [str(output)], **lists}, indent=1) + "\n")
    else:
        _print(found, output)


def _print(found: Converted, output: Path) -> None:
    console = Screen(highlight=False)
    for name, lines in found.lists.items():
        if not lines:
            continue
        table = Table(title=f"{TITLES[name]} ({len(lines)})", title_justify="left", box=box.SIMPLE, show_edge=False)
        shown = [field for field in Line._fields if field != "job" or name in WRITTEN]
        for field in shown:
            table.add_column(COLUMNS[field], overflow="fold")
        for line in lines:
            table.add_row(*(visible(getattr(line, field)) for field in shown))
        console.print(table)
    console.print(f"written: {output}", soft_wrap=True)
