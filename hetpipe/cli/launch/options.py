"""Which options each system has, pairs given by options, and where relative paths begin."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError, cut, shown
from hetpipe.processes.progress import say

OF_TARGETS = {  # options that only some systems have
    "--type": ("slurm", "jobset", "ray", "skypilot"),
    "--name": ("slurm", "jobset", "skypilot"),
    "--torchrun": ("slurm", "jobset", "skypilot", "hosts"),
    "--master-port": ("slurm", "jobset", "skypilot", "hosts"),
    "--cpus": ("slurm", "ray", "skypilot"),
    "--image": ("jobset", "skypilot"),
    "--folder": ("jobset", "hosts"),
    "--host": ("hosts",),
    "--master-addr": ("hosts",),
    "--run": ("hosts",),
    "--ssh": ("hosts",),
}
FOLDERS = {  # where relative paths begin
    "slurm": "the folder in which you call sbatch",
    "jobset": "the folder of --folder, or else the working folder of the image",
    "ray": "the copy that 'ray job submit --working-dir' makes",
    "skypilot": "the copy of the current folder that SkyPilot makes",
    "hosts": "the folder of --folder, or else a folder of the same path as the current one",
}


def refuse_of_others(to: str, options: Sequence[str]) -> None:
    """InputError for an option of another system."""
    for option in options:
        if to not in OF_TARGETS[option]:
            raise InputError(f"{option} is for --to {' or '.join(OF_TARGETS[option])}, and not for {to}. Leave it out")


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """`NAME=VALUE` of an option that may be repeated."""
    found: dict[str, str] = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InputError(f"cannot read {option} {shown(each)}. Write NAME=VALUE, such as {option} a100=A100-80GB")
        if name in found:
            raise InputError(f"{option} says two things of {shown(name)}: {shown(found[name])} and {shown(value)}. Leave one out")
        found[name] = value
    return found


def words_of(option: str, text: str) -> list[str]:
    """A program and its options, as a shell reads them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"cannot read {option} {shown(text)}: {error}") from None


def paths_of(job: Job) -> list[str]:
    """What the job reads and writes."""
    own = (job.cluster, job.profile, job.plan.file, job.data.args.get("file"))
    folders = (section.folder for section in (job.checkpoint, job.log) if section is not None)
    return [path for path in (*own, *folders) if isinstance(path, str)]


def note_relative(to: str, paths: Sequence[str]) -> None:
    """Say where the other machines look for relative paths."""
    relative = [path for path in dict.fromkeys(paths) if not os.path.isabs(path)]
    if relative:
        say(f"note: relative paths ({', '.join(cut(path) for path in relative)}) begin on each machine in {FOLDERS[to]}")
