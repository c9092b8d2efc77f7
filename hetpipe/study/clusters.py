"""Clusters that are one change away: a device more, a device less, faster links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from hetpipe.documents.cluster import Cluster, Link, Node
from hetpipe.files.messages import InputError

L = TypeVar("L", bound=Link)


def changed_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """One device more of each type, one less, and links of twice the bandwidth. `cluster` has the measured links. One more goes
    to the first node that has its type and a known link inside, else to a node of its own."""
    kinds = list(dict.fromkeys(device.type for device in cluster.devices))
    for kind in kinds:
        if (more := _one_more(cluster, kind)) is not None:
            yield f"one {kind} more", more
    for kind in kinds:
        if cluster.device_count > 1:
            yield f"one {kind} less", _one_less(cluster, kind)
    if cluster.device_count > 1:
        yield "twice the link bandwidth", _twice(cluster)


def _changed(cluster: Cluster, **changes: Any) -> Cluster:
    """A new cluster, with nothing kept of what was computed of the old one."""
    return Cluster(**({name: getattr(cluster, name) for name in Cluster.model_fields} | changes))


def _one_more(cluster: Cluster, kind: str) -> Cluster | None:
    for i, node in enumerate(cluster.nodes):
        if kind in node.devices and _link_inside(cluster, node):
            grown = node.model_copy(update={"devices": node.devices | {kind: node.devices[kind] + 1}})
            return cluster.with_nodes([*cluster.nodes[:i], grown, *cluster.nodes[i + 1 :]])
    if cluster.link is None:
        return None
    name = next(f"new{i}" for i in range(len(cluster.nodes) + 1) if f"new{i}" not in {node.name for node in cluster.nodes})
    return cluster.with_nodes([*cluster.nodes, Node(name=name, devices={kind: 1})])


def _link_inside(cluster: Cluster, node: Node) -> bool:
    try:
        cluster.link_between(node.name, node.name)
    except InputError:
        return False
    return True


def _one_less(cluster: Cluster, kind: str) -> Cluster:
    """The cluster without one device of the type: of the node that has the fewest of it."""
    least = min((node for node in cluster.nodes if kind in node.devices), key=lambda node: node.devices[kind])
    left = {name: count - (name == kind) for name, count in least.devices.items() if count > (name == kind)}
    kept = [least.model_copy(update={"devices": left}) if node is least else node for node in cluster.nodes]
    return cluster.with_nodes([node for node in kept if node is not least and node.devices])


def _twice(cluster: Cluster) -> Cluster:
    nodes = [_faster_node(node) for node in cluster.nodes]
    link = _faster(cluster.link) if cluster.link is not None else None
    links = tuple(_faster(one) for one in cluster.links)
    return _changed(cluster, nodes=tuple(nodes), link=link, links=links)


def _faster_node(node: Node) -> Node:
    link, adapter = node.link, node.adapter
    if adapter is not None:
        out, into = (2 * rate for rate in adapter.rates)
        adapter = adapter.model_copy(update={"bandwidth": out, "bandwidth_in": into})
    return node.model_copy(update={"link": None if link is None else _faster(link), "adapter": adapter})


def _faster(link: L) -> L:
    """Half the seconds for each byte, the same latency."""
    if link.bandwidth is not None:
        return link.model_copy(update={"bandwidth": 2 * link.bandwidth})
    start = link.seconds(0)
    points = tuple((size, start + (seconds - start) / 2) for size, seconds in link.points or ())
    return link.model_copy(update={"points": points})
