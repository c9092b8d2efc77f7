"""A plan of `auto` for so many devices of so many types and so many layers.

python -m bench.scale.planning DEVICES TYPES LAYERS      (started by run.py, so that its peak memory is its own)
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bench.partitioners.profiles import MODELS, profile, transformer
from bench.planner.run import SYNTHETIC, Case, problem
from hetpipe.planning.planner import make_plan

PER_DEVICE = 16  # samples of the global batch


def peak_bytes() -> int:
    """Of this process, which imports no torch; `ru_maxrss` would be at least that of the process which started it."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def planned(devices: int, types: int, layers: int) -> dict[str, Any]:
    """Seconds and peak bytes of `make_plan`, and what it gave: a transformer of width 1,024, nodes of up to 8 devices alike."""
    given = problem(Case(devices, types), PER_DEVICE, 1.0, synthetic=True)
    MODELS["chain"] = transformer(layers - 2, 1024, 1024, 50257)
    chain = profile("chain", list(SYNTHETIC)[:types])
    assert chain is not None
    began = time.perf_counter()
    plan = make_plan(chain, given.cluster, given.global_batch, partitioner="auto")
    seconds, found = time.perf_counter() - began, plan.predicted
    assert found is not None
    return {
        "devices": len(given.cluster.devices),
        "types": types,
        "layers": layers,
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
        "gap": found.gap,
        "proof": found.proof,
        "replicas": len(plan.replicas),
        "stages": max(len(r.stages) for r in plan.replicas),
    }


if __name__ == "__main__":
    print(json.dumps(planned(*map(int, sys.argv[1:]))))
