"""Every formula of the cost model, once, with its source. Seconds and bytes; layers [lo, hi); micro-batches of b samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Cluster, Link, ReceiveBuffers
from hetpipe.documents.profile import Profile
from hetpipe.documents.schedule import FORWARD_ONLY
from hetpipe.files.messages import InputError

Array = NDArray[np.float64]
Real = TypeVar("Real", float, Array)


def _prefix(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one stage. `boundary` are the buffers at its two ends that are there for the whole step; `held_per_sample` is what
    each sample in flight keeps; `backward_per_sample` exists only while a micro-batch runs backward (the recomputed layer),
    `passing_per_sample` in receive buffers beside what is held."""

    static: float
    boundary: float
    held_per_sample: float
    backward_per_sample: float
    passing_per_sample: float

    @property
    def transient_per_sample(self) -> float:
        """What comes on top for each sample of one micro-batch."""
        return self.backward_per_sample + self.passing_per_sample

    def peak(self, sizes: Sequence[int], depth: int) -> int:
        """Greatest bytes at any time, for micro-batches of `sizes` samples of which at most `depth` are in flight."""
        return self.peak_of(most_in_flight(sizes, depth), max(sizes))

    def peak_of(self, window: int, largest: int) -> int:
        """Greatest bytes at any time, with at most `window` samples in flight, and micro-batches of at most `largest`."""
        return int(peak_of(self.static, self.boundary, self.held_per_sample, self.transient_per_sample, 1, window, largest))


def peak_of(static: Real, boundary: Real, held: Real, transient: Real, samples: int, window: int, largest: int) -> Real:
    """Greatest whole bytes of stages at any time, of numbers or of arrays: `static`, `boundary` for each of the `samples` of a
    step, `held` for each of at most `window` in flight, and `transient` for each of the `largest` micro-batch. Planners compile
    it into their loops, so this file is among those of which `hetpipe.predict.compiled` has the digest."""
    found: Real = np.rint(static + boundary * samples + held * window + transient * largest)
    return found


def most_in_flight(sizes: Sequence[int], depth: int) -> int:
    """Most samples in flight at once: the greatest sum of min(depth, m) consecutive micro-batches."""
    width = min(depth, len(sizes))
    if min(sizes) == max(sizes):
        return width * sizes[0]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    return int((ends[width:] - ends[:-width]).max())


class Bucket(NamedTuple):
    """Layers [lo, hi) whose gradients are one message, and its bytes."""

    lo: int
    hi: int
    size_bytes: float


class LayerBytes(NamedTuple):
    """Holds the bytes of all layers on a device type: prefix sums of parameters, of those that train, of buffers with the copies
    that a lower precision keeps of parameters, and of what one sample saves [L + 1]; and what it saves in each layer, behind
    another and as the first of a stage [L]."""

    parameters: Array
    trained: Array
    beside: Array
    saved: Array
    saved_by_layer: Array
    saved_first: Array


class RingParts(NamedTuple):
    """A ring all-reduce: the numbers of the nodes that it joins, if it is not on one; seconds of its bytes and of its latencies;
    bytes/s into and out of each node, alone."""

    nodes: tuple[int, ...]
    seconds: float
    latency: float
    rate: float


class Costs:
    """The costs of a profile on a cluster. Prefix sums are kept per (device type, degree, micro-batch size)."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile = profile = profile.on(cluster)
        self.cluster = cluster
        self._times: dict[tuple[str, int, int], tuple[Array, Array]] = {}
        self._bytes: dict[tuple[str, int], LayerBytes] = {}
        self._optimizer: dict[tuple[str, int], Array] = {}
        self._inputs = _prefix(profile.input_bytes)
        self.first_trained = profile.first_trained
        least, most = profile.widths.min(axis=0), profile.output_bytes
        self._cast_outputs = np.where(least < most, least, 0.0)
        self._tied_bytes = _prefix(profile.tied_trained_bytes)
        self._buckets: dict[object, list[Bucket]] = {}
        self._copies = {x.device_type: x for x in profile.overheads if x.host_bytes_per_second is not None}
        self._among: tuple[object, tuple[int, Counter[str], list[Link]]] = (None, (0, Counter(), []))
        pairs = (frozenset(link.between) for link in cluster.links)
        self._pairs = [pair for pair in pairs if len(pair) == 2]

    @property
    def layer_count(self) -> int:
        """L."""
        return len(self.profile.layers)

    def has_backward(self, hi: int) -> bool:
        """Whether a stage that ends before layer hi has one, and gets gradients from the next: something in it, or before it,
        trains. One that has none runs forwards only."""
        return hi > self.first_trained

    def time_prefix(self, device_type: str, size: int, degree: int = 1) -> tuple[Array, Array]:
        """Prefix sums of forward and backward seconds, [L + 1] each: a range costs prefix[hi] − prefix[lo]."""
        key = (device_type, degree, size)
        if key not in self._times:
            forward, backward = self.profile.measurement(device_type, degree).times(size)
            self._times[key] = (_prefix(forward), _prefix(backward))
        return self._times[key]

    def stage_seconds(
        self, device_type: str, lo: int, hi: int, size: int, *, recompute: bool = False, offload: bool = False, degree: int = 1
    ) -> tuple[float, float]:
        """F and B of one micro-batch; B is 0 where there is none (`has_backward`). Recompute runs the forward of what has a
        backward again before it (Chen et al. 2016); offload copies what is saved to the host beside the forward, and back beside
        the backward (Rhu et al. 2016, vDNN)."""
        forward, backward = self.time_prefix(device_type, size, degree)
        overhead = self.cluster.runtime_overhead.action_seconds
        f, b = float(forward[hi] - forward[lo]), float(backward[hi] - backward[lo])
        if not self.has_backward(hi):
            return f + overhead, 0.0
        again = float(self.again(forward)[hi] - self.again(forward)[lo]) if recompute else 0.0
        if offload:
            saved = self._layer_bytes(device_type, degree).saved
            f, b = (float(self._beside_copies(device_type, x, (saved[hi] - saved[lo]) * size)) for x in (f, b))
        return f + overhead, b + again + overhead

    def again(self, forward: Array) -> Array:
        """Of seconds of all layers before each [..., L + 1], those that recompute takes: first layers that need no backward are
        not run again."""
        found: Array = np.maximum(forward - forward[..., self.first_trained, None], 0.0)
        return found

    def backward_below(
        self, device_type: str, lo: int, hi: int, size: int, *, recompute: bool = False, offload: bool = False, degree: int = 1
    ) -> Array:
        """Seconds that the backward of a stage of layers [lo, hi) still takes when it has made the gradients of each layer, and
        of all above it [hi − lo]."""
        forward, backward = self.time_prefix(device_type, size, degree)
        below: Array = backward[lo:hi] - backward[lo]
        if offload:
            saved = self._layer_bytes(device_type, degree).saved
            below = np.asarray(self._beside_copies(device_type, below, (saved[lo:hi] - saved[lo]) * size))
        return below + (self.again(forward)[lo:hi] - self.again(forward)[lo]) if recompute else below

    def _beside_copies(self, device_type: str, computing: float | Array, size_bytes: float | Array) -> float | Array:
        """Seconds of computing, and of copying so many bytes between device and host, of which a part of the shorter is hidden
        (`host_copy_overlap`): with all of it they take as long as the longer, with none as one after the other."""
        copies = self._copies.get(device_type)
        if copies is None or copies.host_bytes_per_second is None:
            raise InputError(
                f"the plan offloads on device type {device_type!r}, but the profile of {self.profile.model!r} has no "
                "host_bytes_per_second for it. Measure again with 'hetpipe profile', or write offload: false"
            )
        copying = size_bytes / copies.host_bytes_per_second
        return computing + copying - (copies.host_copy_overlap or 0.0) * np.minimum(computing, copying)

    def copies(self, device_type: str, degree: int = 1) -> tuple[Array, float] | None:
        """Seconds in which what all layers before each save of a sample goes to the host, or comes back [L + 1], and the part of
        the shorter of copying and computing that is hidden; None where that was not measured."""
        found = self._copies.get(device_type)
        if found is None or found.host_bytes_per_second is None:
            return None
        return self._layer_bytes(device_type, degree).saved / found.host_bytes_per_second, found.host_copy_overlap or 0.0

    def host_bytes_per_sample(self, device_type: str, lo: int, hi: int, degree: int = 1) -> float:
        """Bytes of host memory that each sample in flight of an offloaded stage takes, for all devices that split it."""
        saved = self._layer_bytes(device_type, degree).saved
        return degree * float(saved[hi] - saved[lo])

    def optimizer_seconds(self, device_type: str, lo: int, hi: int, degree: int = 1) -> float:
        """Seconds of one optimizer step over the range."""
        key = (device_type, degree)
        if key not in self._optimizer:
            self._optimizer[key] = _prefix(np.array(self.profile.measurement(device_type, degree).optimizer_seconds))
        return float(self._optimizer[key][hi] - self._optimizer[key][lo])

    def parameter_bytes(self, device_type: str, lo: int, hi: int, degree: int = 1) -> tuple[float, float]:
        """Parameter bytes of a range on one device (of `degree` that split it), and those of them that train; a parameter that
        layers of the range share is counted once."""
        of, (repeated, again) = self._layer_bytes(device_type, degree), self.profile.repeated_bytes(lo, hi)
        held, trained = float(of.parameters[hi] - of.parameters[lo]), float(of.trained[hi] - of.trained[lo])
        return held - repeated / degree, trained - again / degree

    def trained_bytes(self, device_type: str, lo: int, hi: int, degree: int = 1) -> float:
        """Parameter bytes of a range that train on one device, what layers share counted with each."""
        trained = self._layer_bytes(device_type, degree).trained
        return float(trained[hi] - trained[lo])

    @property
    def bucket_bytes(self) -> float:
        """Most bytes of layers in one bucket; infinite where sums wait for the end of backward."""
        return self.cluster.runtime_overhead.bucket_bytes or float("inf")

    def summed_bytes(self, kinds: frozenset[tuple[str, int]], lo: int, hi: int) -> float:
        """Bytes of the gradients of layers [lo, hi) in all shards together, without what is tied, which is summed apart: the most
        of all (device type, degree) that hold them (shards repeat what Megatron does not split, so their sum grows with the
        degree). What does not train has none."""
        held = max(degree * self.trained_bytes(kind, lo, hi, degree) for kind, degree in kinds)
        return held - float(self._tied_bytes[hi] - self._tied_bytes[lo])

    def buckets(self, kinds: frozenset[tuple[str, int]], lo: int, hi: int, pieces: int, most: float) -> list[Bucket]:
        """How the gradients of layers [lo, hi), each in so many pieces, are cut: from the last layer to the first, a new bucket
        where the next layer would bring it over `most` bytes (as `runtime.gradients` does with parameters, of which a profile
        does not know; Li et al. 2020, PyTorch Distributed, section 3.2). A layer without gradients is in none."""
        key = kinds, lo, hi, pieces, most
        if key not in self._buckets:
            ranges = list[tuple[int, int]]()
            for l in range(hi - 1, lo - 1, -1):  # noqa: E741
                if self.summed_bytes(kinds, l, l + 1) > 0:
                    if ranges and self.summed_bytes(kinds, l, ranges[-1][1]) / pieces <= most:
                        ranges[-1] = l, ranges[-1][1]
                    else:
                        ranges.append((l, l + 1))
            self._buckets[key] = [Bucket(*part, self.summed_bytes(kinds, *part) / pieces) for part in ranges]
        return self._buckets[key]

    def stage_memory(
        self, device_type: str, lo: int, hi: int, *, samples: int, recompute: bool = False, offload: bool = False, degree: int = 1
    ) -> StageMemory:
        """Memory of a stage: parameters, gradients and optimizer state of those that train, buffers, and the copies of parameters
        in a lower precision, which a step keeps from its first forward on, recomputed or not; for each sample in flight what
        autograd saves and the stage's output (under recompute: the layers' inputs, and while in backward the largest layer's
        saved bytes; under offload nothing of it but what two layers saved that run one after the other), and where
        device types compute in unlike precisions also the input as cast. The first stage holds the inputs of all `samples` of the
        step, and the last one their targets. A later stage has receive buffers for the inputs in flight and one more, and an
        earlier one for the gradient in use and the next (`runtime.stages.executor`). What enters a stage is thus there, whether
        autograd saves it or not. Layers that need no backward save nothing; a stage of them only runs forward, recomputed or not,
        and has room for FORWARD_ONLY outputs, and for one input more. On top, what the cluster file's `runtime_overhead` says of
        the framework."""
        _, _, beside, saved, plain, first = self._layer_bytes(device_type, degree)
        runtime, (parameters, trained) = self.cluster.runtime_overhead, self.parameter_bytes(device_type, lo, hi, degree)
        more = 1 + self.profile.optimizer.state_bytes_per_parameter_byte + runtime.parameter_copies
        static = parameters + more * trained + float(beside[hi] - beside[lo])
        output, largest = float(self.profile.output_bytes[hi - 1]), float(plain[lo:hi].max())
        given, returned = float(self.profile.input_bytes[lo]), output if hi < self.layer_count else 0.0
        begins = plain if runtime.receive_buffers == "one" else first  # of which each micro-batch in flight has what entered
        transient, held = runtime.backward_workspace * largest, float(begins[lo] + saved[hi] - saved[lo + 1])
        back = self.has_backward(hi)
        recompute, returned = recompute and back, returned if back else 0.0
        if recompute:
            held, transient = float(self._inputs[hi] - self._inputs[max(lo + 1, self.first_trained)]), transient + largest
        elif offload and back:
            held, transient = 0.0, transient + float((plain[lo:hi] + np.roll(plain[lo:hi], -1)).max())
        held += float(self._cast_outputs[lo - 1]) if lo and lo >= self.first_trained else 0.0
        boundary, kept, passing = _receive_buffers(runtime.receive_buffers, given, returned, first=lo == 0, recompute=recompute)
        boundary += self.profile.target_bytes_per_sample if hi == self.layer_count else 0.0
        held, factor = held + kept + output, runtime.allocator_factor
        if not back:  # of as many micro-batches as are in flight on any such stage, whatever its depth
            held, passing = 0.0, passing + FORWARD_ONLY * held
        return StageMemory(
            static=factor * static + runtime.device_bytes,
            boundary=factor * boundary * samples,
            held_per_sample=factor * held,
            backward_per_sample=factor * transient,
            passing_per_sample=factor * passing,
        )

    def _layer_bytes(self, device_type: str, degree: int) -> LayerBytes:
        key, profile = (device_type, degree), self.profile
        if key not in self._bytes:
            parameters, trained = (of(degree, device_type) for of in (profile.parameter_bytes, profile.trained_bytes))
            beside = profile.buffer_bytes(degree, device_type) + profile.cast_bytes(degree, device_type)
            saved = profile.saved_bytes(degree, device_type)
            first = profile.first_saved_bytes(degree, device_type)
            saved[: self.first_trained] = first[: self.first_trained] = 0.0
            self._bytes[key] = LayerBytes(_prefix(parameters), _prefix(trained), _prefix(beside), _prefix(saved), saved, first)
        return self._bytes[key]

    def link(self, device_a: str, device_b: str) -> Link:
        """The link of two devices, by their nodes."""
        return self.cluster.link_between(self.cluster.device(device_a).node, self.cluster.device(device_b).node)

    def transfer(
        self, device_a: str, device_b: str, boundary: int, size: int, degrees: tuple[int, int] = (1, 1)
    ) -> tuple[float, float]:
        """(seconds that the link is occupied, latency) for the output of layer `boundary` − 1, or its gradient.

        Between tensor-parallel groups of these degrees every device of the smaller one sends its part over its own link, and
        the receivers gather the parts by a ring inside their node (the scatter/gather of Narayanan et al. 2021): one group
        the output, the other its gradient, so each way is given half of both; where transfers block both ends, which
        counts each way twice, a quarter, as no sender waits for the receivers to gather."""
        link, parts = self.link(device_a, device_b), min(degrees)
        share = 2 if self.cluster.runtime_overhead.overlap_transfers else 4
        size_bytes, latency = float(self.profile.output_bytes[boundary - 1]) * size, link.seconds(0)
        occupied = occupied_seconds(link, size_bytes / parts)
        for device, degree in zip((device_a, device_b), degrees, strict=True):
            if degree > 1:
                latency += (degree - 1) * self.link(device, device).seconds(size_bytes / degree) / share
        return occupied, latency

    def transfer_rate(self, device_a: str, device_b: str, boundary: int, size: int, parts: int) -> float:
        """Bytes/s of one of so many parts of a transfer (see `transfer`) that has its link for itself; 0 if it takes no time."""
        link = self.link(device_a, device_b)
        return rate_alone(link, float(self.profile.output_bytes[boundary - 1]) * size / parts)

    def all_reduce_seconds(self, devices: Sequence[str], size_bytes: float) -> float:
        """Ring all-reduce (Patarasu and Yuan 2009): 2(k − 1) rounds of size/k bytes over the slowest link of the group."""
        k, _, links = self._joined(devices)
        return ring_seconds(links, k, size_bytes) if k > 1 and size_bytes > 0 else 0.0

    def ring(self, devices: Sequence[str], size_bytes: float, node_number: Mapping[str, int]) -> RingParts:
        """The all-reduce as a flow: the rings of NCCL and gloo visit the devices of a node one after the other, so each byte of a
        round leaves and enters every node once."""
        k, nodes, links = self._joined(devices)
        seconds = self.all_reduce_seconds(devices, size_bytes)
        link = max(links, key=lambda link: (link.seconds(size_bytes / k), link.seconds(0)))
        latency, rate = 2 * (k - 1) * link.seconds(0), rate_alone(link, size_bytes / k)
        if len(nodes) == 1 or rate == 0:
            return RingParts((), seconds, 0.0, 0.0)
        return RingParts(tuple(sorted(node_number[node] for node in nodes)), seconds - latency, latency, rate)

    def _joined(self, devices: Sequence[str]) -> tuple[int, Counter[str], list[Link]]:
        """How many devices these are, on which nodes, and the links among them: kept, as they sum bucket after bucket."""
        if self._among[0] is not devices:
            nodes = Counter(self.cluster.device(d).node for d in dict.fromkeys(devices))
            self._among = devices, (nodes.total(), nodes, self.links_among(nodes) if nodes.total() > 1 else [])
        return self._among[1]

    def links_among(self, nodes: Mapping[str, int]) -> list[Link]:
        """The different links between devices of these nodes, of which each has so many; as sets have no order that all
        processes share, in that of the nodes and the cluster file."""
        own = dict.fromkeys(pair for pair in self._pairs if pair <= nodes.keys())
        pairs = [(a, a) for a, count in nodes.items() if count > 1] + [tuple(sorted(pair)) for pair in own]
        if len(own) < comb(len(nodes), 2):  # the others have the link of the cluster
            pairs.append(next(pair for pair in combinations(nodes, 2) if frozenset(pair) not in own))
        return list(dict.fromkeys(self.cluster.link_between(a, b) for a, b in pairs))


def _receive_buffers(
    kind: ReceiveBuffers, given: float, returned: float, *, first: bool, recompute: bool
) -> tuple[float, float, float]:
    """Bytes of what a stage receives (inputs `given`, gradients `returned` per sample): for each sample of the step, for each
    in flight, and for each of one micro-batch."""
    if kind == "step":
        return given + returned, 0.0, 0.0
    if kind == "one":  # under recompute each micro-batch in flight keeps its own input
        return 0.0, given if recompute else 0.0, given + returned
    if first:
        return given, 0.0, 2 * returned
    return 0.0, given, given + 2 * returned


def occupied_seconds(link: Link, size_bytes: float) -> float:
    """Seconds that a transfer holds a link: all but the latency."""
    return max(0.0, link.seconds(size_bytes) - link.seconds(0))


def rate_alone(link: Link, size_bytes: float) -> float:
    """Bytes/s while a transfer holds a link that it has for itself, at most the link's peak; 0 where it takes no time."""
    seconds = occupied_seconds(link, size_bytes)
    return min(size_bytes / seconds, link.peak) if seconds > 0 else 0.0


def ring_seconds(links: Iterable[Link], k: int, size_bytes: float) -> float:
    """Ring all-reduce of `size_bytes` by k devices that these links join."""
    return 2 * (k - 1) * max(link.seconds(size_bytes / k) for link in links)
