"""Plan bert-large for so many devices, and print when the best of the simple rules was known and when the plan was there: wall
seconds since this process began, and its own processor seconds. `run` runs it by path.

    python bench/first_plan/worker.py DEVICES
    python bench/first_plan/worker.py ready       (compiles all that `auto` may use)
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()  # before hetpipe is imported

import json  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from hetpipe.partitioners import auto  # noqa: E402
from hetpipe.planning.planner import make_plan  # noqa: E402
from hetpipe.spec.cluster import Cluster  # noqa: E402
from hetpipe.spec.profile import Profile  # noqa: E402

PROFILE = Path(__file__).resolve().parents[2] / "configs" / "bert-large" / "profile.json"
EACH = 8  # samples of a step for each device
BOX = 4  # devices of a node


def cluster(devices: int) -> Cluster:
    """Half of them RTX 3090, half GTX 1080 Ti, in nodes of up to four."""
    kinds = [("rtx3090", devices - devices // 2), ("gtx1080ti", devices // 2)]
    boxes = [(kind, min(BOX, count - at)) for kind, count in kinds for at in range(0, count, BOX)]
    inside = {"bandwidth": "12 GB/s", "latency": "10 us"}
    nodes = [{"name": f"n{i}", "devices": {kind: count}, "link": inside} for i, (kind, count) in enumerate(boxes)]
    types = {"rtx3090": {"memory": "23.5 GiB"}, "gtx1080ti": {"memory": "10.9 GiB"}}
    document = {"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}
    return Cluster.parse(document | {"link": {"bandwidth": "3 GB/s", "latency": "30 us"}}, "the bench's cluster")


def so_far() -> tuple[float, float]:
    """Wall and processor seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter() - BEGAN, used.ru_utime + used.ru_stime


def main(devices: int) -> None:
    """Plan, and print the figures."""
    known, simple = list[tuple[float, float]](), vars(auto)["simple_plans"]

    def timed(*given: Any, **named: Any) -> Iterator[Any]:
        yield from simple(*given, **named)
        known.append(so_far())

    vars(auto)["simple_plans"] = timed
    plan = make_plan(Profile.load(PROFILE), cluster(devices), EACH * devices)
    done = so_far()
    assert plan.predicted is not None
    print(
        json.dumps(
            {
                "rules: wall": known[0][0],
                "rules: processor": known[0][1],
                "plan: wall": done[0],
                "plan: processor": done[1],
                "step": plan.predicted.step_seconds,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "ready":
        auto.ready()
        print(json.dumps({}))
    else:
        main(int(sys.argv[1]))
