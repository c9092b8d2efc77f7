"""The cluster file: device types, nodes, and the links inside and between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from hetpipe.documents.guesses import KeysOf
from hetpipe.documents.number_types import TYPE_OF, Precision
from hetpipe.files.formats import Bytes, BytesPerSecond, DeviceCount, Document, Factor, Flag, Name, Price, Seconds, Strict
from hetpipe.files.limits import MOST_DEVICES, MOST_FACTOR
from hetpipe.files.messages import Faults, InputError, nearest, shown, told


def _slowdown(given: Any) -> Any:
    """As it is; ValueError with every fault where it is neither a number nor one for each precision."""
    each = given if isinstance(given, Mapping) else {"": given}
    known = ", ".join(TYPE_OF)
    faults = [f"unknown precision {shown(key)}; known: {known}" for key in each if key not in ("", *TYPE_OF)]
    for key, value in each.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MOST_FACTOR:
            at = f"{key}: " if key else ""
            faults.append(f"{at}a slowdown is a number from 1 to {MOST_FACTOR:g}, got {shown(value)}")
    if not each:
        faults.append("write a number, or one for each precision that the device has: {fp32: 6.0, fp16: 1.5}")
    if faults:
        raise Faults(faults)
    return given


class Emulate(Strict):
    """A CPU rank whose every compute action lasts `slowdown` times what it takes on this host at the same precision. One number
    is that of every precision; a number for each precision by its name (`{fp32: 6.0, fp16: 1.5}`) makes a device that has
    exactly these."""

    slowdown: Annotated[float | dict[Precision, float], BeforeValidator(_slowdown)]

    @property
    def precisions(self) -> tuple[Precision, ...] | None:
        """Those that the device has; None where it has all that the host has."""
        return None if isinstance(self.slowdown, float | int) else tuple(self.slowdown)

    def slowdown_at(self, precision: Precision | None, device_type: str) -> float:
        """How many times as long a device of this type takes at a precision (without one, as the model is built: as in fp32).
        InputError if the device does not have it."""
        if isinstance(self.slowdown, float | int):
            return self.slowdown
        if (precision or "fp32") not in self.slowdown:
            raise InputError(
                f"the emulated device type {device_type!r} cannot compute in {precision or 'fp32'}, because the cluster file "
                f"gives its slowdown only for {', '.join(self.slowdown)}. Train it in one of these (train: {{precision: …}}), or "
                f"give its slowdown for {precision or 'fp32'}, too"
            )
        return self.slowdown[precision or "fp32"]


class DeviceType(Strict):
    """One kind of device: its memory in bytes and its price in currency units per hour."""

    guesses = KeysOf("device type")
    memory: Bytes
    price_per_hour: Price = 0.0
    emulate: Emulate | None = None


class Link(Strict):
    """A link: `latency` (s) and `bandwidth` (bytes/s), or measured `points` [[bytes, seconds], …], interpolated."""

    guesses = KeysOf("link")
    bandwidth: BytesPerSecond | None = None
    latency: Seconds = 0.0
    points: tuple[tuple[Bytes, Seconds], ...] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.bandwidth is None) == (self.points is None):
            raise ValueError("a link needs either 'bandwidth' (with 'latency') or measured 'points', and not both")
        if self.points is not None:
            sizes = [size for size, _ in self.points]
            if len(sizes) < 2 or any(b <= a for a, b in pairwise(sizes)):
                raise ValueError(f"'points' needs at least two [bytes, seconds] of increasing bytes, got sizes {shown(sizes)}")
        return self

    def seconds(self, size_bytes: float) -> float:
        """Seconds to send `size_bytes` one way. Beyond the last measured point the last slope goes on."""
        if self.points is None:
            assert self.bandwidth is not None
            return self.latency + size_bytes / self.bandwidth
        sizes, seconds = zip(*self.points, strict=True)
        if size_bytes > sizes[-1]:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return float(seconds[-1] + max(slope, 0.0) * (size_bytes - sizes[-1]))
        return float(np.interp(size_bytes, sizes, seconds))

    @property
    def peak(self) -> float:
        """The most bytes/s that a transfer gets: the bandwidth, or the greatest rate of any measured point or beyond the last."""
        if self.points is None:
            assert self.bandwidth is not None
            return self.bandwidth
        (x0, y0), (x1, y1) = self.points[-2:]
        rates = [x / y if y > 0 else inf for x, y in self.points if x > 0]
        return max(*rates, (x1 - x0) / (y1 - y0) if y1 > y0 else inf)


class LinkBetween(Link):
    """The link of one pair of nodes (twice the same node: inside it)."""

    between: tuple[Name, Name]


class Rates(NamedTuple):
    """Bytes/s that leave a node, and that enter it."""

    out: float
    into: float


class Adapter(Strict):
    """What joins a node to the others: bytes/s each way at once (`bandwidth_in`: of what enters, where that is another rate). If
    all nodes have one, the cluster needs no `link`: it is as fast as the fastest of them (what crosses a slower
    one is slower), and its latency is that of the two slowest together."""

    bandwidth: BytesPerSecond
    bandwidth_in: BytesPerSecond | None = None
    latency: Seconds = 0.0

    @property
    def rates(self) -> Rates:
        """Of one transfer, or of all."""
        return Rates(self.bandwidth, self.bandwidth if self.bandwidth_in is None else self.bandwidth_in)


class AdapterOf(Adapter):
    """What all adapters of one node carry together, as it was measured."""

    node: Name


AdapterCount = DeviceCount | Literal["per_device"]


class Node(Strict):
    """A machine: how many devices of which type, in the order of their local ranks, the link between them, and what joins it to
    other machines: one adapter, or so many alike (`per_device`: as many as devices). All that crosses them at once shares what
    they carry together. Where no `adapter` is given each is as fast as the fastest link to another node. `host_memory`: what
    stages may offload to, beside all else that the machine needs; the planner offloads nothing where it is not said."""

    guesses = KeysOf("node")
    name: Annotated[Name, Field(pattern=r"^[^/\s]+$")]
    devices: Annotated[dict[Name, DeviceCount], Field(min_length=1)]
    link: Link | None = None
    host: Name | None = None
    adapter: Adapter | None = None
    adapters: AdapterCount = 1
    host_memory: Bytes | None = None

    @property
    def device_count(self) -> int:
        """How many devices it has."""
        return sum(self.devices.values())

    @property
    def adapter_count(self) -> int:
        """How many adapters it has."""
        return self.device_count if self.adapters == "per_device" else self.adapters


BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's bucket_cap_mb
ReceiveBuffers = Literal["flight", "step", "one"]


class RuntimeOverhead(Strict):
    """What the framework itself takes. The defaults are those of this project's engine with nothing measured; how each
    can be measured, and values for DeepSpeed on GH200, stand in bench/prediction/README.md.

    `device_bytes` on each device: what the driver shows and the framework's allocator does not (CUDA context, kernels,
    communicators). `action_seconds` per forward and per backward. `parameter_copies`: copies of the parameters that train
    beside these, their gradients and optimizer state (1 where gradients are summed in one flat buffer). `backward_workspace`:
    what a backward needs while it runs, in units of what its largest layer saved. `allocator_factor`: bytes that the
    allocator holds over bytes in use. `receive_buffers`: for the micro-batches in flight (this engine), for all of a step
    (torch.distributed.pipelining) or one each way (DeepSpeed). `overlap_transfers`: false where sends and receives block the
    compute stream at both ends (DeepSpeed). `bucket_bytes`: gradients are summed in buckets of at most so many bytes, each as
    soon as the last backward has made it (this engine, whatever stands here); 0 where sums wait for its end (DeepSpeed's
    pipelines).
    """

    device_bytes: Bytes = 0
    action_seconds: Seconds = 0.0
    parameter_copies: Factor = 0.0
    backward_workspace: Factor = 0.0
    allocator_factor: Annotated[Factor, Field(ge=1)] = 1.0
    receive_buffers: ReceiveBuffers = "flight"
    overlap_transfers: Flag = True
    bucket_bytes: Bytes = BUCKET_BYTES


class Device(NamedTuple):
    """One device: `id` is `node/index`; the index is the local rank on the node."""

    id: str
    node: str
    index: int  # type: ignore[assignment]  # also the name of a method of tuples
    type: str


class Cluster(Document):
    """Unequal devices on nodes, and what joins them: a `link` is what one transfer gets that has the way for itself, an adapter
    what all get that cross it at the same time."""

    guesses = KeysOf("cluster")
    format: Literal["hetpipe.cluster/1"]
    device_types: Annotated[dict[Name, DeviceType], Field(min_length=1)]
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    link: Link | None = None
    links: tuple[LinkBetween, ...] = ()
    runtime_overhead: RuntimeOverhead = RuntimeOverhead()

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        types, names = list(self.device_types), Counter(node.name for node in self.nodes)
        several = [name for name, count in names.items() if count > 1]
        faults = told(several, lambda name: f"node name {name!r} is given {names[name]} times")
        strange = [(node.name, kind) for node in self.nodes for kind in node.devices if kind not in self.device_types]
        faults += told(strange, lambda x: f"node {x[0]!r}: unknown device type {x[1]!r}{nearest(x[1], types)}")
        ends = [end for link in self.links for end in link.between if end not in names]
        faults += told(ends, lambda end: f"links: unknown node {end!r}{nearest(end, list(names))}")
        if self.device_count > MOST_DEVICES:
            faults.append(f"the nodes have {self.device_count} devices, the most of a cluster are {MOST_DEVICES}")
        if faults:
            raise Faults(faults)
        adapters = [node.adapter for node in self.nodes if node.adapter is not None]
        if self.link is None and len(adapters) == len(self.nodes) > 1:  # what they make is the link
            latency = sum(sorted(adapter.latency for adapter in adapters)[-2:])
            fastest = max(max(adapter.rates) for adapter in adapters)
            object.__setattr__(self, "link", Link(bandwidth=fastest, latency=latency))
        return self

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return sum(sum(node.devices.values()) for node in self.nodes)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node, in the order of the file."""
        found = []
        for node in self.nodes:
            kinds = [kind for kind, count in node.devices.items() for _ in range(count)]
            found += [Device(f"{node.name}/{i}", node.name, i, kind) for i, kind in enumerate(kinds)]
        return tuple(found)

    @cached_property
    def _by_id(self) -> dict[str, Device]:
        return {device.id: device for device in self.devices}

    @cached_property
    def _pairs(self) -> dict[frozenset[str], Link]:
        pairs: dict[frozenset[str], Link] = {frozenset([node.name]): node.link for node in self.nodes if node.link is not None}
        return pairs | {frozenset(link.between): link for link in self.links}

    def device(self, device_id: str) -> Device:
        """The device with this id; InputError naming the nearest id if there is none."""
        if device_id not in self._by_id:
            raise InputError(self.unknown(device_id))
        return self._by_id[device_id]

    def unknown(self, device_id: str) -> str:
        """What is said of an id that no device has."""
        return f"the cluster has no device {shown(device_id)}{nearest(device_id, list(self._by_id))}"

    def type_of(self, device_id: str) -> DeviceType:
        """The device type (memory, price) of one device."""
        return self.device_types[self.device(device_id).type]

    @cached_property
    def shares_adapters(self) -> bool:
        """Whether an adapter may hold a transfer back: where two cross it at the same time, which no plan for two single devices
        has, or where it is slower than the link."""
        if self.device_count > 2 or len(self.nodes) < 2:
            return len(self.nodes) > 1
        link = self._pairs.get(frozenset(node.name for node in self.nodes), self.link)
        return link is not None and any(min(rates) < link.peak for rates in self.adapter_rates.values())

    @cached_property
    def adapter_rates(self) -> dict[str, Rates]:
        """What all adapters of each node carry together."""
        fastest: dict[str, list[float]] = {node.name: [] for node in self.nodes}
        for pair, link in self._pairs.items():
            for name in pair if len(pair) == 2 else ():
                fastest[name].append(link.peak)
        found = {}
        for node in self.nodes:
            if node.adapter is not None:
                rates = node.adapter.rates
            else:
                others = [self.link.peak] if self.link is not None and len(fastest[node.name]) < len(self.nodes) - 1 else []
                rates = Rates(*(2 * [max(fastest[node.name] + others, default=inf)]))
            found[node.name] = Rates(*(node.adapter_count * rate for rate in rates))
        return found

    def link_between(self, node_a: str, node_b: str) -> Link:
        """The link of two nodes (or inside one): `links`, else the node's own, else the cluster's."""
        link = self._pairs.get(frozenset([node_a, node_b]), self.link)
        if link is None:
            place = f"inside node {node_a!r}" if node_a == node_b else f"between nodes {node_a!r} and {node_b!r}"
            raise InputError(
                f"no link is known {place}: give the {'node' if node_a == node_b else 'cluster'} a "
                "'link: {bandwidth: 12 GB/s, latency: 10 us}', or measure the links with 'hetpipe profile'"
            )
        return link

    @property
    def borrowed_links(self) -> str:
        """What a command says of nodes of several devices for which nobody gives a link: the one between nodes is taken inside
        them, too. Empty where there are none."""
        if self.link is None or len(self.nodes) < 2:
            return ""
        names = [node.name for node in self.nodes if sum(node.devices.values()) > 1 and frozenset([node.name]) not in self._pairs]
        if not names:
            return ""
        first, many = ", ".join(names[:3]) + (f" and {len(names) - 3} more nodes" if len(names) > 3 else ""), len(names) > 1
        return (
            f"{first} {'have' if many else 'has'} several devices and no 'link', so what joins nodes ({self.link.peak / 1e9:.3g} "
            f"GB/s) is taken for what joins {'their' if many else 'its'} devices, too; give {'each' if many else 'it'} its own, "
            "such as link: {bandwidth: 12 GB/s, latency: 10 us}"
        )

    def with_links(self, links: tuple[LinkBetween, ...], adapters: tuple[AdapterOf, ...] = ()) -> Cluster:
        """This cluster with measured links, which override those of the file, and with measured adapters, which do not. Those of
        unknown nodes are left out."""
        names = {node.name for node in self.nodes}
        known = tuple(link for link in links if set(link.between) <= names)
        replaced = {frozenset(link.between) for link in known}
        kept = tuple(link for link in self.links if frozenset(link.between) not in replaced)
        found = {adapter.node: adapter for adapter in adapters}
        nodes = tuple(_joined(node, found.get(node.name)) for node in self.nodes)
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Cluster(**{**fields, "links": kept + known, "nodes": nodes})

    def limited(self, memory_bytes: Mapping[str, int]) -> Cluster:
        """This cluster, with no more memory of these device types than that."""
        lower = {
            kind: found.model_copy(update={"memory": memory_bytes[kind]})
            for kind, found in self.device_types.items()
            if memory_bytes.get(kind, found.memory) < found.memory
        }
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Cluster(**{**fields, "device_types": {**self.device_types, **lower}}) if lower else self

    def without(self, device_ids: Collection[str]) -> Cluster:
        """This cluster without some devices; those of their nodes that are left count anew."""
        kept: dict[str, dict[str, int]] = {}
        for device in self.devices:
            if device.id not in device_ids:
                counts = kept.setdefault(device.node, {})
                counts[device.type] = counts.get(device.type, 0) + 1
        return self.with_nodes(n.model_copy(update={"devices": kept[n.name]}) for n in self.nodes if n.name in kept)

    def with_nodes(self, nodes: Iterable[Node]) -> Cluster:
        """A cluster of these nodes, with the links that are given inside of them and between them."""
        found = tuple(nodes)
        names = {node.name for node in found}
        links = tuple(link for link in self.links if set(link.between) <= names)
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Cluster(**{**fields, "links": links, "nodes": found})


def _joined(node: Node, measured: AdapterOf | None) -> Node:
    """The node with each of its adapters as fast as they were measured together; as it is, if it says so itself."""
    if measured is None or node.adapter is not None:
        return node
    out, into = (rate / node.adapter_count for rate in measured.rates)
    return node.model_copy(update={"adapter": Adapter(bandwidth=out, bandwidth_in=into, latency=measured.latency)})
