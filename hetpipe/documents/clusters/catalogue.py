"""The catalogue: node templates to choose from, how many there may be of each, and the sub-clusters that this makes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations, combinations_with_replacement, product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from hetpipe.documents.cluster import Adapter, AdapterCount, Cluster, DeviceType, Link, LinkBetween, Node, RuntimeOverhead
from hetpipe.files.formats import Bytes, DeviceCount, Document, Name, Strict, read_mapping
from hetpipe.files.limits import MOST_DEVICES, MOST_SUBCLUSTERS
from hetpipe.files.messages import Faults, InputError, nearest, shown, told

Counts = tuple[int, ...]


def _range(value: Any) -> Any:
    """`3` or `"0..8"` as (first, last), both included."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:\.\.\s*([0-9]{1,18})\s*)?", str(value))
    if match is None:
        raise ValueError(f"cannot read {shown(value)}; write a number of nodes, such as 2, or a range, such as 0..8")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise ValueError(f"the range {value!r} is empty: {last} is below {first}")
    return first, last


def _range_text(value: tuple[int, int]) -> int | str:
    return value[0] if value[0] == value[1] else f"{value[0]}..{value[1]}"


_NodeCount = Annotated[int, Field(strict=True, ge=0, le=MOST_DEVICES)]
Range = Annotated[
    tuple[_NodeCount, _NodeCount],
    BeforeValidator(_range),
    PlainSerializer(_range_text),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\s*\d+\s*\.\.\s*\d+\s*$"}]}),
]


class Template(Strict):
    """A kind of node that can be had: its devices, the link between them, its adapters and host memory, as in `Node`."""

    devices: Annotated[dict[Name, DeviceCount], Field(min_length=1)]
    link: Link | None = None
    adapter: Adapter | None = None
    adapters: AdapterCount = 1
    host_memory: Bytes | None = None


class Catalogue(Document):
    """Nodes to choose from. `links` joins two nodes of the named templates (twice the same: two such nodes)."""

    format: Literal["hetpipe.catalogue/1"]
    device_types: Annotated[dict[Name, DeviceType], Field(min_length=1)]
    templates: Annotated[dict[Annotated[Name, Field(pattern=r"^[^/\s]+$")], Template], Field(min_length=1)]
    nodes: Annotated[dict[Name, Range], Field(min_length=1)]
    link: Link | None = None
    links: tuple[LinkBetween, ...] = ()
    runtime_overhead: RuntimeOverhead = RuntimeOverhead()

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        types, names = list(self.device_types), list(self.templates)
        strange = [
            (name, kind)
            for name, template in self.templates.items()
            for kind in template.devices
            if kind not in self.device_types
        ]
        faults = told(strange, lambda x: f"template {x[0]!r}: unknown device type {x[1]!r}{nearest(x[1], types)}")
        unknown = [name for name in self.nodes if name not in self.templates]
        faults += told(unknown, lambda name: f"nodes: unknown template {name!r}{nearest(name, names)}")
        ends = [end for link in self.links for end in link.between if end not in self.templates]
        faults += told(ends, lambda end: f"links: unknown template {end!r}{nearest(end, names)}")
        if all(last == 0 for _, last in self.nodes.values()):
            faults.append("nodes: no template may be taken even once, so there is nothing to choose from")
        devices = sum(
            last * sum(self.templates[name].devices.values()) for name, (_, last) in self.nodes.items() if name in self.templates
        )
        if devices > MOST_DEVICES:
            faults.append(f"nodes: all of them have {devices} devices, the most of a cluster are {MOST_DEVICES}")
        if faults:
            raise Faults(faults)
        return self

    def cluster(self, counts: Counts) -> Cluster:
        """The cluster of so many nodes of each template of `nodes`, named `template-0`, `template-1`, …"""
        names = {template: [f"{template}-{i}" for i in range(count)] for template, count in zip(self.nodes, counts, strict=True)}
        links = {frozenset(link.between): link for link in self.links}
        pairs = []
        for a, b in combinations_with_replacement(self.nodes, 2) if links else []:
            found = links.get(frozenset([a, b]))
            ends = combinations(names[a], 2) if a == b else product(names[a], names[b])
            if found is not None:
                pairs += [found.model_copy(update={"between": pair}) for pair in ends]
        nodes = [Node(name=name, **dict(self.templates[template])) for template, own in names.items() for name in own]
        return Cluster(
            format="hetpipe.cluster/1",
            device_types=self.device_types,
            nodes=tuple(nodes),
            link=self.link,
            links=tuple(pairs),
            runtime_overhead=self.runtime_overhead,
        )


class Choice(NamedTuple):
    """Sub-clusters to choose from: the names of the templates, how many nodes there may be of each, and the cluster of so
    many. The cluster of fewer nodes is part of that of more, so a plan for the one is a plan for the other."""

    templates: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    cluster: Callable[[Counts], Cluster]

    @property
    def size(self) -> int:
        """How many sub-clusters there are, the empty one left out."""
        return math.prod(last - first + 1 for first, last in self.ranges) - all(f == 0 for f, _ in self.ranges)

    def counts(self) -> Iterator[Counts]:
        """Every sub-cluster but the empty one, as numbers of nodes."""
        for counts in product(*(range(first, last + 1) for first, last in self.ranges)):
            if any(counts):
                yield counts

    def whole(self) -> Cluster:
        """The cluster of all nodes."""
        return self.cluster(tuple(last for _, last in self.ranges))


def choice_of(source: Catalogue | Cluster) -> Choice:
    """What a catalogue offers; of a cluster, 0 to n of every n alike nodes (see `alike_nodes`)."""
    if isinstance(source, Catalogue):
        return Choice(tuple(source.nodes), tuple(source.nodes.values()), source.cluster)
    groups = alike_nodes(source)
    if 2 ** min(len(groups), 99) > 2 * MOST_SUBCLUSTERS:
        raise InputError(
            f"the cluster has {len(groups)} kinds of nodes, and so more than {MOST_SUBCLUSTERS} sub-clusters. Write a catalogue "
            "with fewer templates"
        )
    names = _group_names(groups)

    def part(counts: Counts) -> Cluster:
        kept = {node.name for group, count in zip(groups, counts, strict=True) for node in group[:count]}
        return source.with_nodes(node for node in source.nodes if node.name in kept)

    return Choice(tuple(names), tuple((0, len(group)) for group in groups), part)


def alike_nodes(cluster: Cluster) -> list[list[Node]]:
    """The nodes in groups: alike are nodes with the same devices, adapters and host memory whose links, inside and to every other
    node, are the same, so that swapping two of them changes nothing. (That is transitive: what is like the first of a group is
    like all of it.)"""
    own = {frozenset(link.between): Link(**link.model_dump(exclude={"between"})) for link in cluster.links}
    partners: dict[str, set[str]] = {node.name: set() for node in cluster.nodes}
    for link in cluster.links:
        a, b = link.between
        partners[a].add(b)
        partners[b].add(a)

    def inside(node: Node) -> Link | None:
        return own.get(frozenset([node.name]), node.link if node.link is not None else cluster.link)

    def between(a: Node, other: str) -> Link | None:
        return own.get(frozenset([a.name, other]), cluster.link)

    def same(a: Node, b: Node) -> bool:
        others = (partners[a.name] | partners[b.name]) - {a.name, b.name}  # all others have the cluster's link to both
        return all(between(a, other) == between(b, other) for other in others)

    groups: list[list[Node]] = []
    alone: dict[Any, list[list[Node]]] = {}  # the groups by what a node is by itself
    for node in cluster.nodes:
        key = (*node.devices.items(), inside(node), node.adapter, node.adapter_count, node.host_memory)
        found = alone.setdefault(key, [])
        group = next((group for group in found if same(node, group[0])), None)
        if group is None:
            group = []
            found.append(group)
            groups.append(group)
        group.append(node)
    return groups


def _group_names(groups: list[list[Node]]) -> list[str]:
    """`a100x8`, or `a100x2+t4x1`; with the first node's name where two groups have the same devices."""
    names = ["+".join(f"{kind}x{count}" for kind, count in group[0].devices.items()) for group in groups]
    return [f"{name}@{group[0].name}" if names.count(name) > 1 else name for name, group in zip(names, groups, strict=True)]


def load_choice(path: Path) -> Catalogue | Cluster:
    """A catalogue or a cluster file, by its `format`."""
    data = read_mapping(path)
    named = data.get("format") if isinstance(data, dict) else None
    if named == "hetpipe.catalogue/1" or (named is None and isinstance(data, dict) and "templates" in data):
        return Catalogue.parse(data, str(path))
    if isinstance(named, str) and not named.startswith(("hetpipe.cluster/", "hetpipe.catalogue/")):
        raise InputError(f"{path}: its format is {shown(named)}, expected 'hetpipe.catalogue/1' or 'hetpipe.cluster/1'")
    return Cluster.parse(data, str(path))
