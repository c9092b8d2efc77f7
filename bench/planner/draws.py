"""Planning problems drawn from a seed: of measured layers on mixed clusters, and of a wider kind that nobody measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from bench.partitioners.drawn import fields
from bench.partitioners.profiles import memory_gib, profile
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Problem

DEVICES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
BETWEEN, INSIDE = (0.12, 1.2, 3, 12, 25), (12, 50, 300)  # GB/s: Ethernet of 1 to 200 Gbit/s; PCIe to NVLink
PER_DEVICE = (2, 4, 8, 16, 16, 32, 64)  # samples
SIZES = (1, 2, 4, 8)  # micro-batches of the wider kind


def measured(seed: int, folder: Path) -> Problem:
    """A model and two to four types that Zorse's and Cephalo's authors measured it on, up to 1,024 devices in nodes of 1 to 8 of
    a type, one link between all nodes, 2 to 64 samples a device."""
    dice = random.Random(f"measured {seed}")
    name, gpus = dice.choice(sorted((name, gpus) for name, gpus in fields(folder).items() if name.endswith(":512")))
    types = dice.sample(gpus, min(len(gpus), dice.choice([2, 2, 3, 3, 4])))
    found = profile(name, types)
    assert found is not None
    document = cluster(dice, types, dice.choice(DEVICES))
    for kind in types:
        document["device_types"][kind] = {"memory": f"{memory_gib(kind)} GiB", "price_per_hour": 1.0}
    return Problem.create(cluster=Cluster.parse(document, name), profile=found, global_batch=batch(dice, document))


def cluster(dice: random.Random, types: list[str], devices: int) -> dict[str, Any]:
    """A cluster file without device types: about so many devices of types in unequal parts."""
    weights, nodes = [dice.uniform(0.5, 2) for _ in types], list[dict[str, Any]]()
    for kind, weight in zip(types, weights, strict=True):
        left, most = max(1, round(devices * weight / sum(weights))), dice.choice([1, 2, 4, 8])
        while left > 0:
            inside = {"bandwidth": f"{dice.choice(INSIDE)} GB/s", "latency": "8 us"}
            nodes.append({"name": f"n{len(nodes)}", "devices": {kind: min(most, left)}, "link": inside})
            left -= most
    link = {"bandwidth": f"{dice.choice(BETWEEN)} GB/s", "latency": "30 us"}
    return {"format": "hetpipe.cluster/1", "device_types": {}, "nodes": nodes, "link": link}


def batch(dice: random.Random, document: dict[str, Any]) -> int:
    """Samples of a step, by the devices of a cluster file."""
    devices: int = sum(count for node in document["nodes"] for count in node["devices"].values())
    return devices * dice.choice(PER_DEVICE)


def wide(seed: int, most_devices: int = 256) -> Problem:
    """A chain of 4 to 60 layers whose times and bytes are drawn one by one; types 1 to 12 times as slow, some of them measured
    split; its ends tied or not; transfers that overlap or block, sums in buckets or at the end; memory for 1.1 to 8 times the
    state; in a third of them a limit on price or time."""
    dice = random.Random(f"wide {seed}")
    L, types = dice.randint(4, 60), ["a", "b", "c", "d"][: dice.randint(1, 4)]
    document = cluster(dice, types, dice.choice([n for n in DEVICES if n <= most_devices]))
    heavy, layers = dice.uniform(0.1, 1.5), list[dict[str, Any]]()
    work = [1e-3 * dice.lognormvariate(0, heavy) for _ in range(L)]
    for i in range(L):
        sizes = {
            key: int(10 ** dice.uniform(*ends))
            for key, ends in (
                ("parameter_bytes", (4, 9)),
                ("output_bytes_per_sample", (4, 7)),
                ("saved_bytes_per_sample", (5, 8)),
            )
        }
        layers.append({"name": f"layer.{i}"} | sizes)
    if dice.random() < 0.3:
        shared = min(layers[0]["parameter_bytes"], layers[-1]["parameter_bytes"])
        for layer in (layers[0], layers[-1]):
            layer.update(tied="ends", tied_parameter_bytes=shared)
    measurements = list[dict[str, Any]]()
    for kind in types:
        slow, fixed = dice.uniform(1, 12), dice.uniform(0, 0.8)
        own = [slow * t * dice.lognormvariate(0, 0.2) for t in work]
        for degree in (1, 2) if dice.random() < 0.2 else (1,):
            rows = [[t * (fixed + (1 - fixed) * b) / degree**0.8 for t in own] for b in SIZES]
            measurements.append(
                {
                    "device_type": kind,
                    "tensor_parallel": degree,
                    "microbatch_sizes": SIZES,
                    "forward_seconds": rows,
                    "backward_seconds": [[2 * t for t in row] for row in rows],
                    "optimizer_seconds": [layer["parameter_bytes"] / 1e11 for layer in layers],
                }
            )
    state = 4 * sum(layer["parameter_bytes"] for layer in layers)
    devices = sum(count for node in document["nodes"] for count in node["devices"].values())
    for kind in types:
        ample = dice.uniform(1.1, 8) * state / min(devices, L) * dice.uniform(0.5, 2)
        most = max(layer["saved_bytes_per_sample"] for layer in layers) + 4 * max(x["parameter_bytes"] for x in layers)
        document["device_types"][kind] = {"memory": int(max(ample, 1.5 * most)), "price_per_hour": dice.uniform(0.2, 3)}
    document["runtime_overhead"] = {"overlap_transfers": dice.random() < 0.7, "action_seconds": dice.choice([0.0, 2e-4])}
    if dice.random() < 0.3:
        document["runtime_overhead"]["bucket_bytes"] = 0
    parsed = Profile.parse(
        {
            "format": "hetpipe.profile/1",
            "model": f"wide {seed}",
            "layers": layers,
            "measurements": measurements,
            "optimizer": {"state_bytes_per_parameter_byte": 2.0},
        },
        "the draw's profile",
    )
    built, samples = Cluster.parse(document, "the draw's cluster"), batch(dice, document)
    free, limit = Problem.create(cluster=built, profile=parsed, global_batch=samples), dice.random()
    if limit < 1 / 6:
        price = sum(built.type_of(device.id).price_per_hour for device in built.devices)
        return Problem.create(
            cluster=built, profile=parsed, global_batch=samples, max_price_per_hour=dice.uniform(0.4, 1) * price
        )
    if limit < 1 / 3:
        late = dice.uniform(1.5, 5) * fluid_bound(free)
        return Problem.create(cluster=built, profile=parsed, global_batch=samples, deadline_seconds_per_step=late)
    return free
