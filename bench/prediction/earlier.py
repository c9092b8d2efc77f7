"""The same plans, measured earlier: the first version of the files whose later one is measured_opt350_gh200.csv.

github.com/eth-easl/sailor (MIT licence), sailor/Planner/simulations/validation/clariden/OPT-350/N*/plan_config_*.json, read in
the fork saha18uiuc/sailor at commit 37ded108, which has 14 of the 15. Nothing is measured on them either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bench.prediction.runs import Run

# (nodes, replicas, global batch): seconds of an iteration, greatest memory in MiB
EARLIER = {
    (1, 1, 1): (0.08387, 9591),
    (1, 1, 32): (2.32437, 10135),
    (2, 1, 32): (0.65073, 26120),
    (2, 2, 32): (0.80822, 12582),
    (4, 1, 64): (1.6451, 7474),
    (4, 2, 64): (1.60179, 8187),
    (8, 2, 512): (2.48342, 24575),
    (8, 4, 512): (2.33427, 26208),
    (16, 4, 1024): (2.52323, 24600),
    (16, 8, 1024): (2.33938, 26217),
    (16, 16, 1024): (1.98837, 31585),
    (32, 8, 1024): (1.37054, 26274),
    (32, 16, 1024): (1.23537, 26274),
    (32, 32, 1024): (1.02662, 31774),
}


def earlier_runs(runs: Iterable[Run]) -> list[Run]:
    """Of these runs, those that were measured before, as they were measured then."""
    found = []
    for run in runs:
        key = run.nodes, run.replicas, run.global_batch
        if key in EARLIER:
            seconds, mib = EARLIER[key]
            found.append(replace(run, seconds=seconds, peak_bytes=mib * 2**20))
    return found
