"""The one home of hypothesis strategies: clusters, profiles, problems; and plain builders for cases drawn by
hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.planning.partition import Problem

UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
RUNTIME: dict[str, Any] = {
    "device_bytes": 100,
    "parameter_copies": 0.5,
    "backward_workspace": 1.5,
    "allocator_factor": 1.25,
    "receive_buffers": "one",
    "overlap_transfers": False,
    "bucket_bytes": 1_000,
}
OVERHEADS: list[dict[str, Any]] = [{}, {"bucket_bytes": 1_000}, {"action_seconds": 0.01, "bucket_bytes": 0}, RUNTIME]
LINK = {"bandwidth": 1e9, "latency": 1e-4}


def make_cluster(
    nodes: Sequence[dict[str, int]],
    memory: int | dict[str, int] = 10**12,
    price: dict[str, float] | None = None,
    link: dict[str, Any] | None = None,
    inside: dict[str, Any] | None = None,
    overhead: dict[str, Any] | None = None,
) -> Cluster:
    """Nodes n0, n1, … with so many devices of each type; one link between all, `inside` within a node."""
    kinds = sorted({kind for node in nodes for kind in node})
    sizes = memory if isinstance(memory, dict) else dict.fromkeys(kinds, memory)
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {kind: {"memory": sizes[kind], "price_per_hour": (price or {}).get(kind, 0.0)} for kind in kinds},
        "nodes": [{"name": f"n{i}", "devices": devices, "link": inside or link or LINK} for i, devices in enumerate(nodes)],
        "link": link or LINK,
        "runtime_overhead": overhead or {},
    }
    return Cluster.parse(document, "the test's cluster")


def make_profile(
    forward: Mapping[str, Sequence[float]],
    sizes: Sequence[int] = (1,),
    layer: dict[str, int] | None = None,
    layers: Sequence[dict[str, Any]] | None = None,
    backward: float = 2.0,
    fixed: float = 0.0,
    optimizer: float = 0.0,
) -> Profile:
    """Times that grow linearly with the micro-batch: type → forward seconds of each layer for one sample; b
    samples take fixed + (1 − fixed)·b times as long; backward is `backward` × forward, the optimizer
    `optimizer` ×."""
    count = len(next(iter(forward.values())))
    plain = {"parameter_bytes": 0, "output_bytes_per_sample": 0, "saved_bytes_per_sample": 0} | (layer or {})
    given = layers or [{}] * count
    measurements = []
    for kind, times in forward.items():
        rows = [[t * (fixed + (1 - fixed) * b) for t in times] for b in sizes]
        measurements.append(
            {
                "device_type": kind,
                "microbatch_sizes": list(sizes),
                "forward_seconds": rows,
                "backward_seconds": [[backward * t for t in row] for row in rows],
                "optimizer_seconds": [optimizer * t for t in times],
            }
        )
    document = {
        "format": "hetpipe.profile/1",
        "model": "test",
        "layers": [plain | {"name": f"layer.{i}"} | own for i, own in enumerate(given)],
        "measurements": measurements,
        "optimizer": {"state_bytes_per_parameter_byte": 2.0},
    }
    return Profile.parse(document, "the test's profile")


def make_problem(cluster: Cluster, profile: Profile, global_batch: int, **options: Any) -> Problem:
    """A Problem."""
    return Problem.create(cluster=cluster, profile=profile, global_batch=global_batch, **options)


def _seconds(low: float = 0.05, high: float = 1.0) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


def _mostly_large(most: int) -> st.SearchStrategy[int]:
    """1 to `most`, and `most` in half of all cases: the search is where the size is."""
    return st.one_of(st.just(most), st.integers(1, most))


@st.composite
def links(draw: st.DrawFn) -> dict[str, Any]:
    """Latency and bandwidth, or measured points; from negligible to slower than a layer."""
    if draw(st.integers(0, 4)) == 0:
        y = sorted(draw(st.lists(_seconds(1e-5, 0.2), min_size=3, max_size=3)))
        return {"points": [[1, y[0]], [500, y[1]], [20_000, y[2]]]}
    return {"bandwidth": draw(st.sampled_from([2e3, 1e4, 1e5, 1e9])), "latency": draw(st.sampled_from([0.0, 1e-3, 0.05]))}


@st.composite
def clusters(draw: st.DrawFn, most_devices: int = 5, most_kinds: int = 3, least_devices: int = 1) -> Cluster:
    """One to three nodes with up to three types in all; prices; memories from too small to ample."""
    kinds = ["a", "b", "c"][: draw(_mostly_large(most_kinds))]
    total = max(least_devices, draw(_mostly_large(most_devices)))
    nodes: list[dict[str, int]] = [{} for _ in range(draw(st.integers(1, min(3, total))))]
    for i in range(total):
        node = nodes[i] if i < len(nodes) else draw(st.sampled_from(nodes))
        kind = draw(st.sampled_from(kinds))
        node[kind] = node.get(kind, 0) + 1
    return make_cluster(
        nodes,
        memory={kind: draw(st.sampled_from([4_000, 8_000, 16_000, 40_000])) + draw(st.integers(0, 4_000)) for kind in kinds},
        price={kind: draw(st.sampled_from([0.5, 1.0, 3.0])) for kind in kinds},
        link=draw(links()),
        inside=draw(links()),
        overhead=draw(st.sampled_from(OVERHEADS)),
    )


@st.composite
def split(draw: st.DrawFn, profile: Profile) -> Profile:
    """The profile with tensor-parallel measurements: one type at degree 2, at 2 and 3, or at 2 alone, with bytes of its
    own or without, sometimes with other micro-batch sizes; from no faster to faster than by the degree."""
    document = profile.model_dump()
    kind = draw(st.sampled_from([m["device_type"] for m in document["measurements"]]))
    (one,) = [m for m in document["measurements"] if m["device_type"] == kind]
    degrees = draw(st.sampled_from([(2,), (2,), (2, 3)]))
    sizes = draw(st.sampled_from([one["microbatch_sizes"], one["microbatch_sizes"], (2,)]))
    found = []
    for degree in degrees:
        speed, shard = draw(st.sampled_from([0.4, 0.6, 1.0])), draw(st.sampled_from([None, 0.5, 0.7]))
        rows = {
            key: [[t * speed * b / one["microbatch_sizes"][0] for t in one[key][0]] for b in sizes]
            for key in ("forward_seconds", "backward_seconds")
        }
        own = {
            key: None if shard is None else [int(shard * layer[key]) for layer in document["layers"]]
            for key in ("parameter_bytes", "saved_bytes_per_sample")
        }
        optimizer = [t * draw(st.sampled_from([0.5, 1.0])) for t in one["optimizer_seconds"]]
        found.append(one | rows | own | {"tensor_parallel": degree, "microbatch_sizes": sizes, "optimizer_seconds": optimizer})
    keep = 1 not in sizes or draw(st.integers(0, 4)) > 0  # a batch of one sample needs a size of one
    rest = [m for m in document["measurements"] if m is not one or keep]
    return Profile.parse(document | {"measurements": [*rest, *found]}, "the test's profile")


@st.composite
def frozen(draw: st.DrawFn, layers: list[dict[str, Any]]) -> None:
    """Of each layer's parameters none, a part or all train, in half of all cases of some first layers none; what layers share
    trains in all of them or in none."""
    ties, below = draw(st.booleans()), draw(st.just(0) | st.integers(0, len(layers) - 1))
    for number, layer in enumerate(layers):
        shared = layer.get("tied_parameter_bytes", 0)
        tied, own = shared * ties, (layer["parameter_bytes"] - shared) * (number >= below)
        layer["trained_bytes"] = tied + draw(st.sampled_from([0, 0, own, draw(st.integers(0, own))]))
        if shared:
            layer["tied_trained_bytes"] = tied


@st.composite
def profiles(draw: st.DrawFn, kinds: Sequence[str] = ("a", "b", "c"), most_layers: int = 7) -> Profile:
    """Up to seven uneven layers, sometimes with two tied; measured sizes {1}, {1, 2} or {1, 3}; uneven speed
    by layer."""
    count = draw(_mostly_large(most_layers))
    bytes_ = st.integers(0, 1_500)
    layers: list[dict[str, Any]] = [
        {
            "parameter_bytes": draw(bytes_),
            "output_bytes_per_sample": draw(st.sampled_from([1, 10])) * draw(st.integers(0, 50)),
            "saved_bytes_per_sample": draw(st.sampled_from([1, 2, 4])) * draw(bytes_),
            "first_saved_bytes_per_sample": draw(st.none() | bytes_),
            "buffer_bytes": draw(st.integers(0, 50)),
        }
        for _ in range(count)
    ]
    if count > 1 and draw(st.integers(0, 3)) == 0:
        shared = min(layers[0]["parameter_bytes"], layers[-1]["parameter_bytes"])
        for i in (0, -1):
            layers[i] |= {"tied": "wte", "tied_parameter_bytes": shared}
    if draw(st.integers(0, 2)) == 0:
        draw(frozen(layers))
    times = {kind: draw(st.lists(_seconds(), min_size=count, max_size=count)) for kind in kinds}
    return make_profile(
        times,
        sizes=draw(st.sampled_from([(1,), (1, 2), (1, 3)])),
        layers=layers,
        backward=draw(st.sampled_from([0.5, 1.0, 2.0])),
        fixed=draw(st.sampled_from([0.0, 0.5])),
        optimizer=draw(st.sampled_from([0.0, 0.3])),
    )


@st.composite
def problems(
    draw: st.DrawFn,
    most_devices: int = 5,
    most_layers: int = 7,
    most_batch: int = 7,
    tensor_parallel: bool = False,
    least_devices: int = 1,
) -> Problem:
    """A small problem with everything that a planner must heed; `tensor_parallel`: one type measured split as well."""
    cluster = draw(clusters(most_devices, least_devices=least_devices))
    options = {
        "schedule": draw(st.sampled_from(["auto", "auto", "auto", "gpipe", "1f1b"])),
        "allow_recompute": draw(st.sampled_from([True, True, False])),
        "memory_reserve": draw(st.sampled_from([0.0, 0.1])),
    }
    if options["schedule"] != "1f1b":
        options["backend"] = draw(st.sampled_from(["torch", "torch", "torch", "fairscale"]))
    profile = draw(profiles(most_layers=most_layers))
    if tensor_parallel:
        profile = draw(split(profile))
    return make_problem(cluster, profile, draw(_mostly_large(most_batch)), **options)


@st.composite
def crowds(draw: st.DrawFn, most_devices: int, prices: bool = False) -> Problem:
    """2 to that many devices of up to three types on nodes of 1 to 8, joined by slow links."""
    kinds = ["a", "b", "c"][: draw(st.integers(1, 3))]
    left, nodes = draw(st.one_of(st.integers(2, most_devices), st.just(most_devices))), list[dict[str, int]]()
    for i, kind in enumerate(kinds):
        mine, node = (left if i == len(kinds) - 1 else draw(st.integers(0, left))), draw(st.sampled_from([1, 2, 4, 8]))
        nodes += [{kind: min(node, mine - at)} for at in range(0, mine, node)]
        left -= mine
    slow = {"bandwidth": draw(st.sampled_from([2e3, 1e4, 1e5])), "latency": draw(st.sampled_from([0.0, 1e-3, 0.05]))}
    cluster = make_cluster(
        nodes,
        memory={kind: draw(st.sampled_from([3_000, 8_000, 60_000])) for kind in kinds},
        price={kind: draw(st.sampled_from([1.0, 2.5])) for kind in kinds} if prices else None,
        link=slow,
        inside=draw(st.sampled_from([None, LINK])),
        overhead=draw(st.sampled_from([{}, {"bucket_bytes": 1_000}, RUNTIME])),
    )
    layer = {
        "parameter_bytes": draw(st.sampled_from([100, 1000])),
        "output_bytes_per_sample": draw(st.sampled_from([10, 100])),
        "saved_bytes_per_sample": 50,
    }
    times = [draw(_seconds(0.05, 0.2)) for _ in range(draw(st.integers(2, 9)))]
    trained = draw(st.sampled_from([None, None, 0, 30]))
    layers = [{} if trained is None else {"trained_bytes": trained}] * (len(times) - 1) + [{}]  # all of the last one trains
    speeds = {kind: draw(st.sampled_from([1.0, 1.7, 4.0])) for kind in kinds}
    rows = {kind: [speed * t for t in times] for kind, speed in speeds.items()}
    profile = make_profile(rows, (1, 2, 4), layer, layers, fixed=0.3)
    options = draw(st.sampled_from([{}, {}, {}, {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"backend": "fairscale"}]))
    batch = draw(st.sampled_from([1, 2, 7])) * len(cluster.devices) + draw(st.integers(0, 3))
    return make_problem(cluster, profile, batch, **({} if prices else options))


def mixed(copies: int, batch: int) -> Problem:
    """So many pairs of nodes, of two fast and of four slow devices; free links."""
    cluster = make_cluster(
        [{"a": 2}, {"b": 4}] * copies, memory={"a": 9_000, "b": 5_000}, link={"bandwidth": 1e12, "latency": 0.0}
    )
    times = [0.02, 0.03, 0.05, 0.04, 0.06, 0.03]
    layer = {"parameter_bytes": 400, "output_bytes_per_sample": 50, "saved_bytes_per_sample": 300}
    profile = make_profile({"a": times, "b": [2.3 * t for t in times]}, sizes=(1, 2), layer=layer, fixed=0.3)
    return make_problem(cluster, profile, batch)
