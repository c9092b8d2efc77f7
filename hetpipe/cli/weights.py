"""`hetpipe export-weights JOB.yaml -o FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.files.messages import InputError
from hetpipe.spec.job import Job


def export_weights(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job that was trained.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Its checkpoint; the newest of the job's checkpoint.folder by default."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a key of the job, as when it was trained. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the weights of a trained model of transformers (gpt2, bert, llama, t5) as a folder for `from_pretrained`."""
    from hetpipe.building.build import build_layers
    from hetpipe.exchange.hf import check_new_folder
    from hetpipe.exchange.hf import export_weights as export

    check_new_folder(output)
    job = Job.read(job_file, settings or ())
    found = checkpoint if checkpoint is not None else _newest(job, job_file)
    export(build_layers(job), found, output)
    if as_json:
        sys.stdout.write(json.dumps({"checkpoint": str(found), "folder": str(output)}, indent=1) + "\n")
    else:
        sys.stdout.write(f"weights of {found} written to {output}\n")


def _newest(job: Job, job_file: Path) -> Path:
    from hetpipe.checkpoints.checkpoint import list_checkpoints

    if job.checkpoint is None:
        raise InputError(
            f"{job_file} has no section 'checkpoint', so nothing was saved; name one with --checkpoint"
        )
    found = list_checkpoints(job.checkpoint.folder)
    if not found:
        raise InputError(
            f"{job.checkpoint.folder} (checkpoint.folder of {job_file}) holds no checkpoint; train first"
        )
    return found[-1]
