"""What all importers share: their options, the cluster that a list of nodes describes, and checks of what was read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, combinations_with_replacement, product
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from hetpipe.documents.cluster import AdapterCount, Cluster, DeviceType, Link, LinkBetween, Node
from hetpipe.documents.profile import Profile
from hetpipe.files.formats import Bytes, BytesPerSecond
from hetpipe.files.limits import MOST_DEVICES, MOST_WIDTH
from hetpipe.files.messages import InputError, cut, shown

_NODE = re.compile(r"(?:([0-9]{1,6})x)?([A-Za-z][\w.+-]*?)x([0-9]{1,6})")
# Vendor's data sheets, in GB, of devices whose name does not say it.
_MEMORY = {
    "Titan-RTX": 24,
    "RTX-2080": 8,
    "RTX-3090": 24,
    "A100": 40,
    "A10": 24,
    "RTX3090": 24,
    "V100": 16,
    "P100": 16,
    "T4": 16,
    "t4": 16,
    "l4": 24,
    "p40": 24,
    "p100": 16,
    "v100": 16,
    "a10g": 24,
    "a6000": 48,
    "l40s": 48,
    "w6800": 32,
    "rtx3090": 24,
    "rtx_3090": 24,
    "h100-nvl": 94,
}


MOST_NUMBER_BYTES = 16
LARGEST = 1e18  # of a number in a published file


class Imported(NamedTuple):
    """What an importer returns: `cluster` is None where neither the source nor the options name nodes."""

    profile: Profile
    cluster: Cluster | None


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What the published files do not say. Sizes that only FASOP's and Metis' layouts need are 0 where not given;
    `number_bytes` is that of parameters and activations; `inside` maps a device type to the link inside its nodes."""

    model: str
    nodes: str = ""
    zone: str = "us-central1-a"
    link: Link | None = None
    inside: Mapping[str, Link] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    hidden_size: int = 0
    sequence_length: int = 0
    attention_heads: int = 0
    vocabulary: int = 0
    number_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("hidden_size", "sequence_length", "attention_heads", "vocabulary"):
            if not 0 <= getattr(self, name) <= MOST_WIDTH:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} must be from 0 to {MOST_WIDTH}, got {shown(getattr(self, name))}")
        if not 1 <= self.number_bytes <= MOST_NUMBER_BYTES:
            raise InputError(f"--number-bytes must be from 1 to {MOST_NUMBER_BYTES}, got {shown(self.number_bytes)}")

    def require(self, layout: str, *names: str) -> None:
        """InputError that names every option the layout needs and that is not given."""
        missing = [f"--{name.replace('_', '-')}" for name in names if not getattr(self, name)]
        if missing:
            raise InputError(f"{layout}'s files do not hold everything that is needed. Give {', '.join(missing)}, too")


def parse_quantities(link: str | None, inside: Sequence[str], memory: Sequence[str]) -> tuple[dict[str, Link], dict[str, int]]:
    """Links by device type ("" between nodes) and bytes by device type, from '5 GB/s', 'A100=230 GB/s' and 'A100=40 GiB'."""
    try:
        links = {kind: Link(bandwidth=_rate(value)) for kind, value in _pairs(inside, "A100=230 GB/s")}
        sizes = {kind: _size(value) for kind, value in _pairs(memory, "A100=40 GiB")}
        return ({"": Link(bandwidth=_rate(link)), **links} if link is not None else links), sizes
    except ValidationError as error:
        raise InputError("; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())) from None


def _rate(text: str) -> float:
    return TypeAdapter[float](BytesPerSecond).validate_python(text)


def _size(text: str) -> int:
    return TypeAdapter[int](Bytes).validate_python(text)


def _pairs(values: Sequence[str], example: str) -> list[tuple[str, str]]:
    found = [tuple(value.split("=", 1)) for value in values]
    if any(len(pair) != 2 or not pair[0] for pair in found):
        raise InputError(f"cannot read {', '.join(map(repr, values))}; write, for example, {example!r}")
    return [(pair[0].strip(), pair[1].strip()) for pair in found]


class NodeSpec(NamedTuple):
    """`nodes` nodes with `devices` devices of type `kind` each."""

    nodes: int
    kind: str
    devices: int


def parse_nodes(text: str) -> list[NodeSpec]:
    """`4xGH-96x4,1xV100-16x8`: four nodes of four GH-96 and one of eight V100-16."""
    found = []
    for part in text.split(","):
        match = _NODE.fullmatch(part.strip())
        if match is None or not int(match[3]) or match[1] == "0":
            raise InputError(
                f"cannot read nodes {shown(part.strip())}; write, for example, '4xGH-96x4' (nodes x type x devices of each)"
            )
        found.append(NodeSpec(int(match[1] or 1), match[2], int(match[3])))
    devices = sum(spec.nodes * spec.devices for spec in found)
    if devices > MOST_DEVICES:
        raise InputError(f"--nodes asks for {devices} devices, but a cluster may have at most {MOST_DEVICES}")
    return found


def memory_bytes(kind: str, options: ImportOptions) -> int:
    """Bytes of a device: as given, else what its name or its vendor's data sheet says, in decimal gigabytes (an A100-40 has
    a little more)."""
    if kind in options.memory:
        return options.memory[kind]
    ending = re.search(r"[-x](\d+)$", kind)
    size = _MEMORY.get(kind, int(ending[1]) if ending else 0)
    if not size:
        raise InputError(f"the memory of {kind!r} is not known. Give it, such as --memory '{kind}=24 GB'")
    return size * 10**9


def make_cluster(
    specs: Sequence[NodeSpec],
    options: ImportOptions,
    inside: Callable[[str], Link],
    between: Callable[[str, str], Link],
    adapters: Callable[[str], AdapterCount] = lambda kind: 1,
) -> Cluster:
    """Nodes n0, n1, … of these kinds, each with so many network adapters; the link between most pairs is the cluster's, other
    pairs are listed."""
    kinds = [spec.kind for spec in specs for _ in range(spec.nodes)]
    counts = [spec.devices for spec in specs for _ in range(spec.nodes)]
    nodes = tuple(
        Node(name=f"n{i}", devices={kind: count}, link=inside(kind) if count > 1 else None, adapters=adapters(kind))
        for i, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    )
    of_kind = {kind: [i for i, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)}
    pairs = {(a, b): len(of_kind[a]) * (len(of_kind[b]) - (a == b)) for a, b in combinations_with_replacement(of_kind, 2)}
    links = {ends: between(*ends) for ends, count in pairs.items() if count}
    usual = max(links, key=lambda ends: pairs[ends] / (1 + (ends[0] == ends[1]))) if links else None
    special = tuple(
        LinkBetween(between=(f"n{i}", f"n{j}"), **dict(link))
        for (a, b), link in links.items()
        if usual is not None and link != links[usual]
        for i, j in (combinations(of_kind[a], 2) if a == b else product(of_kind[a], of_kind[b]))
    )
    return Cluster(
        format="hetpipe.cluster/1",
        device_types={kind: DeviceType(memory=memory_bytes(kind, options)) for kind in dict.fromkeys(kinds)},
        nodes=nodes,
        link=links[usual] if usual is not None else None,
        links=special,
    )


def given_cluster(options: ImportOptions) -> Cluster | None:
    """The cluster of `--nodes`, with the links of the options; None without `--nodes`."""
    if not options.nodes:
        return None
    link = options.link
    specs = parse_nodes(options.nodes)
    missing = sorted({s.kind for s in specs if s.devices > 1 and s.kind not in options.inside})
    if missing:
        raise InputError(
            f"the link inside nodes of {', '.join(missing)} is not known. Give it, such as --inside '{missing[0]}=12 GB/s'"
        )
    if link is None:
        raise InputError("the link between nodes is not known. Give it, such as --link '5 GB/s'")
    return make_cluster(specs, options, lambda kind: options.inside[kind], lambda a, b: link)


def numbers(value: Any, where: str, count: int | None = None) -> list[float]:
    """A list of numbers that are not negative, `count` of them."""
    if not isinstance(value, list) or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= LARGEST for x in value
    ):
        raise InputError(f"{where}: expected a list of numbers that are not negative, up to {LARGEST:g}, found {shown(value)}")
    if count is not None and len(value) != count:
        raise InputError(f"{where}: {len(value)} numbers for {count} layers")
    return [float(x) for x in value]


def mapping(value: Any, where: str, key: str | None = None) -> dict[str, Any]:
    """A JSON object; with `key`, the object under that key."""
    found = value.get(key) if key is not None and isinstance(value, dict) else value
    if not isinstance(found, dict):
        known = f"; known: {cut(', '.join(sorted(value)))}" if key is not None and isinstance(value, dict) else ""
        raise InputError(f"{where}: expected an object{f' under {shown(key)}' if key else ''}{known}")
    return found


def by_number(value: Any, where: str) -> dict[int, Any]:
    """A JSON object whose keys are whole numbers from 1 on, by them."""
    found = mapping(value, where)
    wrong = [key for key in found if not re.fullmatch("[1-9][0-9]{0,8}", key)]
    if wrong or not found:
        raise InputError(f"{where}: expected keys that are numbers from 1 on, found {shown(wrong[0]) if wrong else 'none'}")
    return {int(key): found[key] for key in sorted(found, key=int)}


def split_by(total: float, weights: Sequence[float]) -> tuple[float, ...]:
    """`total` over the layers by weight (evenly where all weights are 0)."""
    whole = sum(weights)
    return tuple(total * w / whole if whole else total / len(weights) for w in weights)
