"""What launchers are written with: the torchrun command of a node, as a piece of shell, and documents of YAML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hetpipe.exchange.launch.asked import Asked
from hetpipe.exchange.launch.kinds import Kind

WIDTH = 10_000  # characters of a line of YAML: a script is not folded


def program(command: Sequence[str]) -> list[str]:
    """The command as torchrun takes it.

    >>> program(["hetpipe", "train", "job.yaml"]), program(["python", "train.py"]), program(["train.sh"])
    (['-m', 'hetpipe', 'train', 'job.yaml'], ['train.py'], ['--no-python', 'train.sh'])
    """
    first, *rest = command
    if first == "hetpipe":
        return ["-m", *command]
    if first in ("python", "python3") and rest and (rest[0] == "-m" or not rest[0].startswith("-")):
        return rest
    return [*command] if first.endswith(".py") else ["--no-python", *command]


def line(asked: Asked, nodes: int, rank: str, devices: int, master: str) -> str:
    """One node's torchrun; `rank` and `master` are pieces of shell. All nodes meet at one fixed address, because with torchrun's
    c10d rendezvous the ranks of nodes are not those of the cluster file."""
    return (
        f"{shlex.quote(asked.torchrun)} --nnodes {nodes} --node-rank {rank} --nproc-per-node {devices} --master-addr {master} "
        f"--master-port {asked.port} {shlex.join(program(asked.command))}"
    )


def script_of(asked: Asked, kind: Kind, nodes: int, place: str, master: str) -> str:
    """One script for all nodes of a kind; the variable `place` says which of them a node is, from 0."""
    if len(kind.ranks) == 1:
        return f"exec {line(asked, nodes, str(kind.ranks[0]), kind.size, master)}"
    ranks = " ".join(map(str, kind.ranks))
    return f'set -- {ranks}; shift "${place}"; exec {line(asked, nodes, chr(34) + "$1" + chr(34), kind.size, master)}'


def yaml_text(comments: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Comments, then the documents with their keys in order; several documents are parted by `---`."""
    text = yaml.safe_dump_all(documents, sort_keys=False, width=WIDTH, allow_unicode=True, explicit_start=len(documents) > 1)
    return "".join(f"# {comment}\n" for comment in comments) + text
