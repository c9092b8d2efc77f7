"""`hetpipe launch`: the file, or the commands, that start a job on the nodes of its cluster file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.launch.options import note_relative, pairs, paths_of, refuse_of_others, words_of
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.exchange.launch import TARGETS, Asked
from hetpipe.exchange.launch.asked import MASTER_PORT, default_name
from hetpipe.files.messages import InputError, nearest, shown, visible
from hetpipe.files.writing import check_output, write_text
from hetpipe.processes.progress import say
from hetpipe.processes.stopping import RunStopped


def launch(
    job_file: Annotated[Path, typer.Argument(help="The job, which names the cluster file: job.yaml.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="What to start instead of 'hetpipe train JOB', behind --.", metavar="COMMAND")
    ] = None,
    to: Annotated[str, typer.Option("--to", help="What starts it: slurm, jobset (Kubernetes), ray, skypilot, hosts (ssh).")] = "",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Set a key of the job. May be repeated.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write it, instead of standard output.")] = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="What the system calls a device type, such as 'a100=A100-80GB'.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The name of the job. By default that of its file.")] = None,
    torchrun: Annotated[str | None, typer.Option(help="The torchrun of the environment that has hetpipe.")] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help=f"The port of the first node, {MASTER_PORT} by default.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Processor cores for each device, 4 by default.")] = None,
    image: Annotated[str | None, typer.Option(help="The container image that has hetpipe.")] = None,
    folder: Annotated[str | None, typer.Option(help="The folder on each node in which the command starts.")] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="hosts: the machine of a node, as NODE=USER@HOST. By default its name.")
    ] = None,
    master_addr: Annotated[str | None, typer.Option(help="hosts: the address of the first node for the others.")] = None,
    run: Annotated[bool, typer.Option("--run", help="hosts: start them all, and end them all when one fails.")] = False,
    ssh: Annotated[str | None, typer.Option(help="hosts: the ssh to use, such as 'ssh -p 2222'.")] = None,
) -> None:
    """Write what starts a job on the nodes of its cluster file: for SLURM, Kubernetes, Ray or SkyPilot, or lines of ssh."""
    if to not in TARGETS:
        what = f"unknown system {shown(to)}{nearest(to, list(TARGETS))}" if to else f"--to is missing: {', '.join(TARGETS)}"
        raise InputError(what)
    given = {"--type": types, "--name": name, "--torchrun": torchrun, "--master-port": master_port, "--cpus": cpus}
    given |= {"--image": image, "--folder": folder, "--host": hosts, "--master-addr": master_addr, "--run": run, "--ssh": ssh}
    refuse_of_others(to, [option for option, value in given.items() if value])
    if run and output is not None:
        raise InputError("--run starts the hosts, and -o writes their commands to a file. Leave one of the two out")
    check_output(output)
    job, cluster, source = _read(job_file, settings or ())
    own = tuple(command or ())
    asked = Asked(
        command=own or ("hetpipe", "train", str(job_file), *(word for each in settings or () for word in ("--set", each))),
        name=name if name is not None else default_name(job_file.stem),
        types=pairs("--type", types),
        torchrun=torchrun or "torchrun",
        port=master_port or MASTER_PORT,
        cpus=cpus or 4,
        image=image,
        folder=folder if folder or to != "hosts" else os.getcwd(),
        hosts=pairs("--host", hosts),
        master=master_addr,
        ssh=words_of("--ssh", ssh or "ssh"),
    )
    asked.check(cluster, source)
    text = TARGETS[to](cluster, asked)
    note_relative(to, [word for word in own if os.path.exists(word)] if own else [str(job_file), *paths_of(job)])
    if run:
        _run(cluster, asked)
    elif output is not None:
        write_text(output, text)
    else:
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)


def _read(job_file: Path, settings: Sequence[str]) -> tuple[Job, Cluster, str]:
    job = Job.read(job_file, settings)
    cluster = job.read_cluster()
    if cluster is None or job.cluster is None:
        raise InputError(
            f"{job_file} names no cluster file, so it is not known which nodes there are. Write 'cluster: cluster.yaml' into the "
            "job, or give --set cluster=cluster.yaml"
        )
    return job, cluster, job.cluster


def _run(cluster: Cluster, asked: Asked) -> None:
    from hetpipe.exchange.launch.hosts import hosts_of
    from hetpipe.exchange.launch.over_ssh import run_over_ssh

    def write(text: str) -> None:
        sys.stdout.write(visible(text))
        sys.stdout.flush()

    hosts = hosts_of(cluster, asked)
    say(f"starting {', '.join(f'{host.node} ({host.address})' for host in hosts)}")
    try:
        run_over_ssh(hosts, asked.ssh, write)
    except RunStopped as stop:  # the nodes have said what is saved
        raise typer.Exit(stop.exit_code) from None
