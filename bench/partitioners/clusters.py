"""The mixed clusters: consumer cards in one box, nodes of two generations, and those of papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.partitioners.profiles import memory_gib
from hetpipe.documents.cluster import Cluster

# Inside a node: (bytes/s, seconds). PCIe 3 and 4 ×16 as programs see them; NVLink of V100 and A100 nodes as all-reduce sees it.
INSIDE = {"pcie3": (10e9, 20e-6), "pcie4": (20e9, 20e-6), "nvlink2": (110e9, 10e-6), "nvlink3": (230e9, 10e-6)}
# Between nodes: Ethernet of so many Gbit/s, 90 % of the wire.
BETWEEN = {g: (g * 1e9 / 8 * 0.9, 50e-6) for g in (1, 10, 25, 50, 100)}


class Case(NamedTuple):
    """One line of the table: nodes as ({type: count}, link inside), Gbit/s between them, the model, the global batch."""

    name: str
    model: str
    batch: int
    nodes: Sequence[tuple[dict[str, int], str]]
    gbit: int = 10

    @property
    def types(self) -> list[str]:
        """Device types in the order of their first node."""
        return list(dict.fromkeys(kind for devices, _ in self.nodes for kind in devices))

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return sum(sum(devices.values()) for devices, _ in self.nodes)


def cluster(case: Case) -> Cluster:
    """The cluster file of a case."""
    bandwidth, latency = BETWEEN[case.gbit]
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {kind: {"memory": f"{memory_gib(kind)} GiB"} for kind in case.types},
        "nodes": [
            {"name": f"n{i}", "devices": devices, "link": {"bandwidth": INSIDE[inside][0], "latency": INSIDE[inside][1]}}
            for i, (devices, inside) in enumerate(case.nodes)
        ],
        "link": {"bandwidth": bandwidth, "latency": latency},
    }
    return Cluster.parse(document, case.name)


def _papers(scale: int) -> Case:
    """Sailor's mixed clusters: one A100 to three V100, nodes of 4, measured layers of GPT-Neo 2.7B."""
    nodes = [({"sailor:A100": 4}, "nvlink3")] * (8 * scale) + [({"sailor:V100": 4}, "nvlink2")] * (24 * scale)
    return Case(f"{32 * scale}×A100 + {96 * scale}×V100 (Sailor)", "sailor:GPT-Neo-2.7", 2048, nodes, 25)


CASES = [
    # one box
    Case("3090 + 2×1080Ti", "bert-large", 64, [({"3090": 1, "1080Ti": 2}, "pcie3")]),
    Case("3090 + 2080 + TitanRTX", "bert-large", 64, [({"3090": 1, "2080": 1, "TitanRTX": 1}, "pcie3")]),
    Case("3090 + 2080 + TitanRTX, vgg16", "vgg16", 96, [({"3090": 1, "2080": 1, "TitanRTX": 1}, "pcie3")]),
    Case(
        "3090 + 2080 + TitanRTX (measured)",
        "sailor:OPT-350",
        32,
        [({"sailor:3090": 1, "sailor:2080": 1, "sailor:TitanRTX": 1}, "pcie3")],
    ),
    Case("4090 + 3090", "gpt2-medium", 64, [({"4090": 1, "3090": 1}, "pcie4")]),
    Case("4090 + 2×3060", "bert-large", 64, [({"4090": 1, "3060": 2}, "pcie4")]),
    Case("A6000 + 2×3090", "gpt2-medium", 64, [({"A6000": 1, "3090": 2}, "pcie4")]),
    Case("2×3090 + 2×2080Ti", "bert-large", 64, [({"3090": 2, "2080Ti": 2}, "pcie3")]),
    Case("3090 + 3×1080Ti, vgg16", "vgg16", 128, [({"3090": 1, "1080Ti": 3}, "pcie3")]),
    Case("A6000 + 3090 + TitanRTX + 1080Ti", "bert-large", 64, [({"A6000": 1, "3090": 1, "TitanRTX": 1, "1080Ti": 1}, "pcie3")]),
    # nodes of two generations
    Case("2×2080Ti | 2×1080Ti, 1 Gbit", "bert-large", 64, [({"2080Ti": 2}, "pcie3"), ({"1080Ti": 2}, "pcie3")], 1),
    Case("2×V100 | 2×T4", "gpt2-medium", 64, [({"V100": 2}, "nvlink2"), ({"T4": 2}, "pcie3")]),
    Case("2×A100 | 2×V100", "gpt2-medium", 64, [({"A100": 2}, "nvlink3"), ({"V100": 2}, "nvlink2")], 25),
    Case("2×A100 | 4×T4", "gpt2-medium", 64, [({"A100": 2}, "nvlink3"), ({"T4": 4}, "pcie3")], 25),
    Case("4×V100 | 4×T4", "gpt2-medium", 128, [({"V100": 4}, "nvlink2"), ({"T4": 4}, "pcie3")], 25),
    Case("2×H100 | 2×A100", "gpt2-xl", 64, [({"H100": 2}, "nvlink3"), ({"A100": 2}, "nvlink3")], 100),
    Case("2×A100 | 4×A10", "gpt2-xl", 64, [({"A100": 2}, "nvlink3"), ({"A10": 4}, "pcie4")], 50),
    Case("2×A10 | 2×L4 | 2×T4", "gpt2-medium", 64, [({"A10": 2}, "pcie4"), ({"L4": 2}, "pcie4"), ({"T4": 2}, "pcie3")], 10),
    Case("2×V100 | 2×P100", "bert-large", 64, [({"V100": 2}, "nvlink2"), ({"P100": 2}, "pcie3")]),
    Case(
        "2×A100 | 2×V100 (measured)", "sailor:OPT-350", 64, [({"sailor:A100": 2}, "nvlink3"), ({"sailor:V100": 2}, "nvlink2")], 25
    ),
    Case(
        "2×V100 | 3090 + TitanRTX (measured)",
        "sailor:OPT-350",
        64,
        [({"sailor:V100": 2}, "nvlink2"), ({"sailor:3090": 1, "sailor:TitanRTX": 1}, "pcie3")],
        10,
    ),
    # batches that do not divide: the best shares have a remainder in several replicas, or micro-batches of their own
    Case("A6000 + 2×3090, batch 75", "gpt2-medium", 75, [({"A6000": 1, "3090": 2}, "pcie4")]),
    Case("2×H100 | 2×A100, batch 20", "vgg16", 20, [({"H100": 2}, "nvlink3"), ({"A100": 2}, "nvlink3")], 100),
    Case(
        "2×A100 | 2×V100, batch 50 (measured)",
        "sailor:OPT-350",
        50,
        [({"sailor:A100": 2}, "nvlink3"), ({"sailor:V100": 2}, "nvlink2")],
        25,
    ),
    # papers
    Case("4×A100 + 12×A10 (FASOP)", "gpt2-xl", 128, [({"A100": 4}, "nvlink3")] + [({"A10": 4}, "pcie4")] * 3, 50),
    Case("12×V100 + 4×T4", "gpt2-medium", 256, [({"V100": 4}, "nvlink2")] * 3 + [({"T4": 4}, "pcie3")], 25),
]
LARGE = [_papers(1), _papers(2), _papers(4)]
