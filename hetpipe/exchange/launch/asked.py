"""What a user asks of a launcher: the command, and what only the user knows of the other system."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import InputError, nearest, shown

MOST_NAME = 28  # characters of a job's name: with a kind's name and two numbers it is part of a host name, which has at most 63
NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{MOST_NAME - 2}}}[a-z0-9])?")
DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./=-]*")
ADDRESS = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:%\[\]@-]*")
MASTER_PORT = 29500  # torchrun's own default


@dataclass(frozen=True, kw_only=True)
class Asked:
    """`command` is what runs on every device. `types`: what the other system calls a device type of the cluster file (empty: no
    device that one asks for). `hosts` by the name of the node; `master` is the address of the first; `cpus` a device."""

    command: Sequence[str]
    name: str = "hetpipe"
    types: Mapping[str, str] = field(default_factory=dict)
    torchrun: str = "torchrun"
    port: int = MASTER_PORT
    cpus: int = 4
    image: str | None = None
    folder: str | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)
    master: str | None = None
    ssh: Sequence[str] = ("ssh",)

    def check(self, cluster: Cluster, source: str) -> None:
        """InputError if this does not fit the cluster, which was read from `source`, or if there is nothing to launch there."""
        emulated = [name for name, kind in cluster.device_types.items() if kind.emulate is not None]
        if emulated:
            raise InputError(
                f"{source} has emulated devices ({', '.join(map(shown, emulated))}), which are processes of one machine, so "
                "there is nothing to launch. To train on them, use 'hetpipe train'"
            )
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"--name is {shown(self.name)}, but a job's name has lower-case letters, digits and hyphens, at most {MOST_NAME} "
                "of them, and begins with a letter"
            )
        for option, given, known in (
            ("--type", self.types, list(cluster.device_types)),
            ("--host", self.hosts, [node.name for node in cluster.nodes]),
        ):
            for name in given:
                if name not in known:
                    raise InputError(f"{option}: {source} has no {shown(name)}{nearest(name, known)}")


def address(found: str, node: str) -> str:
    """The address of a node's machine. InputError if it is none: ssh would take one that begins with a hyphen for an option."""
    if not ADDRESS.fullmatch(found):
        raise InputError(
            f"node {shown(node)} is for the machine {shown(found)}, which is no host name or address. Correct 'host' or the "
            "node's name in the cluster file, or the option (--host, --master-addr)"
        )
    return found


def default_name(stem: str) -> str:
    """A name for the job of this file.

    >>> default_name("Cluster_Job.v2"), default_name("7")
    ('cluster-job-v2', 'hetpipe-7')
    """
    found = "-".join(re.findall(r"[a-z0-9]+", stem.lower()))
    return (found if found[:1].isalpha() else f"hetpipe-{found}")[:MOST_NAME].strip("-")
