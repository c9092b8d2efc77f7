"""`hetpipe export-weights [JOB.yaml] -o FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError


def export_weights_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder for the weights.")],
    job_file: Annotated[
        Path | None, typer.Argument(metavar="[JOB.YAML]", help="The job that was trained. Without it, give --checkpoint.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint, or a folder of checkpoints, of which the newest is taken. By default the job's: that of the best "
            "evaluation, or the newest."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set a key of the job, as in the training. May be repeated.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="If the model has adapters: add them to the base, and write the whole model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the weights of a checkpoint as safetensors files: a model of transformers (causal_lm, gpt2, bert, llama, t5) or of
    diffusers as a folder for `from_pretrained`; adapters, of any model, as a folder for peft (of diffusers, with a LoRA file for
    pipelines), or, with --merge, the model of transformers to which they are added; any other, and a checkpoint of
    `hetpipe.save_checkpoint`, under the model's own names."""
    from hetpipe.building.build import build_layers
    from hetpipe.checkpoints.origin.revision import at_revision
    from hetpipe.checkpoints.trained import find_checkpoint
    from hetpipe.checkpoints.training_state import said_of
    from hetpipe.hf.exports.export import check_new_folder, export_weights
    from hetpipe.training.results.exported import best_of_job

    check_new_folder(output)
    job = Job.read(job_file, settings or ()) if job_file is not None else None
    folder = checkpoint if checkpoint is not None else of_job(job, job_file)
    found = best_of_job(job, folder) if job is not None and checkpoint is None else find_checkpoint(folder)
    layers = build_layers(at_revision(job, said_of(found))) if job is not None else None
    export_weights(layers, found, output, merge=merge)
    if as_json:
        sys.stdout.write(json.dumps({"checkpoint": str(found), "folder": str(output)}, indent=1) + "\n")
    else:
        sys.stdout.write(f"weights of {found} written to {output}\n")


def of_job(job: Job | None, job_file: Path | None) -> str:
    """The folder in which the job has saved. InputError where it saves nothing, or has not yet."""
    from hetpipe.checkpoints.checkpoint import list_checkpoints

    if job is None:
        raise InputError("name a job, or a checkpoint with --checkpoint")
    if job.checkpoint is None:
        raise InputError(f"{job_file} has no section 'checkpoint', so nothing was saved; name one with --checkpoint")
    if not list_checkpoints(job.checkpoint.folder):
        raise InputError(
            f"{job.checkpoint.folder} (checkpoint.folder of {job_file}) holds no checkpoint (from {Path.cwd()}); train first"
        )
    return job.checkpoint.folder
