"""What all importers share: their options, the cluster that a list of nodes describes, and checks of what was read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from hetpipe.cluster import Cluster, DeviceType, Link, LinkBetween, Node
from hetpipe.formats import Bytes, BytesPerSecond, InputError
from hetpipe.profiles import Profile

_NODE = re.compile(r"(?:(\d+)x)?([A-Za-z][\w.+-]*?)x(\d+)")
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
}


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

    def require(self, layout: str, *names: str) -> None:
        """InputError that names every option the layout needs and that is not given."""
        missing = [f"--{name.replace('_', '-')}" for name in names if not getattr(self, name)]
        if missing:
            raise InputError(f"{layout}'s layout does not hold what {', '.join(missing)} would say; give it")


def parse_quantities(
    link: str | None, inside: Sequence[str], memory: Sequence[str]
) -> tuple[dict[str, Link], dict[str, int]]:
    """Links by device type ("" between nodes) and bytes by device type, from '5 GB/s', 'A100=230 GB/s' and 'A100=40 GiB'."""
    try:
        links = {kind: Link(bandwidth=_rate(value)) for kind, value in _pairs(inside, "A100=230 GB/s")}
        sizes = {kind: _size(value) for kind, value in _pairs(memory, "A100=40 GiB")}
        return ({"": Link(bandwidth=_rate(link)), **links} if link is not None else links), sizes
    except ValidationError as error:
        raise InputError(
            "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        ) from None


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
                f"cannot read nodes {part.strip()!r}; write, for example, '4xGH-96x4' (nodes x type x devices of each)"
            )
        found.append(NodeSpec(int(match[1] or 1), match[2], int(match[3])))
    return found


def memory_bytes(kind: str, options: ImportOptions) -> int:
    """Bytes of a device: as given, else what its name or its vendor's data sheet says, in decimal gigabytes (an A100-40 has
    a little more)."""
    if kind in options.memory:
        return options.memory[kind]
    ending = re.search(r"-(\d+)$", kind)
    size = _MEMORY.get(kind, int(ending[1]) if ending else 0)
    if not size:
        raise InputError(f"how much memory {kind!r} has is not known; say it: --memory '{kind}=24 GB'")
    return size * 10**9


def make_cluster(
    specs: Sequence[NodeSpec],
    options: ImportOptions,
    inside: Callable[[str], Link],
    between: Callable[[str, str], Link],
) -> Cluster:
    """Nodes n0, n1, … of these kinds; the link between most pairs is the cluster's, other pairs are listed."""
    kinds = [spec.kind for spec in specs for _ in range(spec.nodes)]
    counts = [spec.devices for spec in specs for _ in range(spec.nodes)]
    nodes = tuple(
        Node(name=f"n{i}", devices={kind: count}, link=inside(kind) if count > 1 else None)
        for i, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    )
    pairs = {(a, b): (kinds[a], kinds[b]) for a, b in combinations(range(len(kinds)), 2)}
    links = {ends: between(*ends) for ends in set(pairs.values())}
    usual = Counter(pairs.values()).most_common(1)[0][0] if pairs else None
    special = tuple(
        LinkBetween(between=(f"n{a}", f"n{b}"), **dict(links[ends]))
        for (a, b), ends in pairs.items()
        if usual is not None and links[ends] != links[usual]
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
            f"the link inside nodes of {', '.join(missing)} is not known; say it: --inside '{missing[0]}=12 GB/s'"
        )
    if link is None:
        raise InputError("the link between nodes is not known; say it: --link '5 GB/s'")
    return make_cluster(specs, options, lambda kind: options.inside[kind], lambda a, b: link)


def numbers(value: Any, where: str, count: int | None = None) -> list[float]:
    """A list of finite numbers that are not negative, `count` of them."""
    if not isinstance(value, list) or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < float("inf") for x in value
    ):
        raise InputError(
            f"{where}: expected a list of numbers that are not negative, found {str(value)[:60]}"
        )
    if count is not None and len(value) != count:
        raise InputError(f"{where}: {len(value)} numbers for {count} layers")
    return [float(x) for x in value]


def mapping(value: Any, where: str, key: str | None = None) -> dict[str, Any]:
    """A JSON object; with `key`, the object under that key."""
    found = value.get(key) if key is not None and isinstance(value, dict) else value
    if not isinstance(found, dict):
        known = f"; known: {', '.join(sorted(value))}" if key is not None and isinstance(value, dict) else ""
        raise InputError(f"{where}: expected an object{f' under {key!r}' if key else ''}{known}")
    return found


def split_by(total: float, weights: Sequence[float]) -> tuple[float, ...]:
    """`total` over the layers by weight (evenly where all weights are 0)."""
    whole = sum(weights)
    return tuple(total * w / whole if whole else total / len(weights) for w in weights)
