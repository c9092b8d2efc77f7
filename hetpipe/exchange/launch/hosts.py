"""The command of each host, for ssh or a terminal there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch.asked import Asked, address
from hetpipe.exchange.launch.texts import line


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node of the cluster file, the machine that it is for ssh, and what runs there, in which folder."""

    node: str
    address: str
    folder: str
    line: str


def hosts_of(cluster: Cluster, asked: Asked) -> list[Host]:
    """The nodes in the order of the cluster file. A node's machine is what --host says, else its `host`, else its name."""
    addresses = [address(asked.hosts.get(node.name, node.host or node.name), node.name) for node in cluster.nodes]
    master = address(asked.master or addresses[0].rpartition("@")[2], cluster.nodes[0].name)
    found = []
    for rank, (node, machine) in enumerate(zip(cluster.nodes, addresses, strict=True)):
        words = line(asked, len(addresses), str(rank), sum(node.devices.values()), shlex.quote(master))
        found.append(Host(node=node.name, address=machine, folder=asked.folder or ".", line=words))
    return found


def hosts_text(cluster: Cluster, asked: Asked) -> str:
    """A line of ssh for each host; all have to run at the same time."""
    lines = []
    for host in hosts_of(cluster, asked):
        there = f"cd {shlex.quote(host.folder)} && exec {host.line}"
        lines.append(f"{shlex.join([*asked.ssh, host.address, there])}\n")
    return "".join(lines)
