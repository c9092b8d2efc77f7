"""Zorse's cluster_info.json as a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from hetpipe.documents.cluster import Cluster, DeviceType, Link, LinkBetween, Node
from hetpipe.exchange.importers.options import ImportOptions, mapping, numbers
from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError, shown


def zorse_cluster(path: Path, options: ImportOptions) -> Cluster:
    """The machines of a cluster_info.json: memory in MiB, bandwidths in GiB/s, latencies in ms. Of the two ways between machines
    the slower one counts."""
    document = mapping(read_mapping(path), path.name)
    machines, rates = document.get("machines"), mapping(document, path.name, "bandwidth")
    if not isinstance(machines, list) or not machines:
        raise InputError(f"{path.name}: expected a list of machines, found {shown(machines)}")
    nodes, memory = [], dict(options.memory)
    for i, machine in enumerate(machines):
        where = f"{path.name}: machine {i}"
        gpus = mapping(machine, where).get("gpus")
        if not isinstance(gpus, list) or not gpus:
            raise InputError(f"{where}: expected a list of gpus, found {shown(gpus)}")
        counts: dict[str, int] = {}
        for gpu in gpus:
            name = mapping(gpu, f"{where}: gpus").get("name")
            if not isinstance(name, str):
                raise InputError(f"{where}: expected a gpu with a name, found {shown(name)}")
            counts[name] = counts.get(name, 0) + 1
            mib = numbers([gpu.get("memory_total_mib")], f"{where}: {name}: memory_total_mib")[0]
            memory.setdefault(name, round(mib * 2**20))
        name = machine.get("machine")
        link = _link(rates, "intranode", [str(i)], path.name) if len(gpus) > 1 else None
        nodes.append(Node(name=name if isinstance(name, str) and name else f"n{i}", devices=counts, link=link))
    names = [node.name for node in nodes]
    return Cluster(
        format="hetpipe.cluster/1",
        device_types={kind: DeviceType(memory=memory[kind]) for node in nodes for kind in node.devices},
        nodes=tuple(nodes),
        links=tuple(
            LinkBetween(between=(names[i], names[j]), **dict(_slower(rates, i, j, path.name)))
            for i, j in combinations(range(len(nodes)), 2)
        ),
    )


def _link(rates: dict[str, Any], kind: str, keys: Sequence[str], where: str) -> Link:
    found = []
    for quantity in ("bandwidth", "latency"):
        value: Any = rates.get(f"{kind}_{quantity}")
        for key in keys:
            value = mapping(value, f"{where}: {kind}_{quantity}").get(key)
        found.append(numbers([value], f"{where}: {kind}_{quantity}, {' to '.join(keys)}")[0])
    return Link(bandwidth=found[0] * 2**30, latency=found[1] / 1e3)


def _slower(rates: dict[str, Any], i: int, j: int, where: str) -> Link:
    ways = [_link(rates, "internode", [str(a), str(b)], where) for a, b in ((i, j), (j, i))]
    bandwidths, latencies = zip(*((way.bandwidth or 0.0, way.latency) for way in ways), strict=True)
    return Link(bandwidth=min(bandwidths), latency=max(latencies))
