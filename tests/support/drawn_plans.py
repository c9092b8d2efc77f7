"""Small plans to draw, and the texts of what was drawn."""

from __future__ import annotations

from xml.etree import ElementTree

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile

SVG = "{http://www.w3.org/2000/svg}"

CLUSTER = Cluster.parse(
    {
        "format": "hetpipe.cluster/1",
        "device_types": {"fast": {"memory": "4 GiB"}, "slow": {"memory": "2 GiB"}},
        "nodes": [{"name": "n0", "devices": {"fast": 2, "slow": 1}}],
        "link": {"bandwidth": "1 GB/s"},
    },
    "the cluster",
)


def profile(names: list[str], model: str = "net") -> Profile:
    count = len(names)
    return Profile.parse(
        {
            "format": "hetpipe.profile/1",
            "model": model,
            "optimizer": {"state_bytes_per_parameter_byte": 0},
            "layers": [
                {"name": name, "parameter_bytes": 4, "output_bytes_per_sample": 4, "saved_bytes_per_sample": 8} for name in names
            ],
            "measurements": [
                {
                    "device_type": kind,
                    "microbatch_sizes": [1],
                    "forward_seconds": [[f] * count],
                    "backward_seconds": [[2 * f] * count],
                    "optimizer_seconds": [0.0] * count,
                }
                for kind, f in (("fast", 0.001), ("slow", 0.002))
            ],
        },
        "the profile",
    )


def plan(*replicas: list[tuple[int, int, str]], model: str = "net", **changes: object) -> Plan:
    return Plan.parse(
        {
            "format": "hetpipe.plan/1",
            "model": model,
            "global_batch": 3 * len(replicas),
            "replicas": [
                {"microbatch_sizes": [2, 1], "stages": [{"layers": [lo, hi], "devices": [d]} for lo, hi, d in stages]}
                for stages in replicas
            ],
            **changes,
        },
        "the plan",
    )


TWO_REPLICAS = plan([(0, 3, "n0/0"), (3, 4, "n0/2")], [(0, 4, "n0/1")])


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
