"""The 11 runs of GPT-Neo-2.7B that Sailor's authors published beside those of OPT-350: the same engine and machines, another
model. What the engine takes is measured on these, and none of them is among the 15 that are predicted.

github.com/eth-easl/sailor (MIT licence), sailor/Planner/simulations/validation/clariden/GPT-NEO/N*/plan_config_*.json, read
in the fork saha18uiuc/sailor at commit 37ded108. Left out is N4_D4, which has the plan of an OPT-350 run (26 layers, not 34).
"""

from __future__ import annotations

from bench.prediction.runs import Run

MODEL = "GPT-Neo-2.7"


def _run(nodes: int, batch: tuple[int, int], layers: tuple[int, ...], seconds: tuple[float, float], mib: int) -> Run:
    """`batch`: global and micro; `seconds`: of an iteration, and of it the gradient sums; `mib`: the greatest memory of any
    device, as nvidia-smi shows it."""
    return Run(
        nodes=nodes,
        global_batch=batch[0],
        microbatch=batch[1],
        stages=len(layers),
        replicas=nodes // len(layers),
        degree=4,
        layers=layers,
        seconds=seconds[0],
        sums_seconds=seconds[1],
        peak_bytes=mib * 2**20,
        model=MODEL,
    )


TWO, FOUR, EIGHT = (16, 18), (7, 9, 9, 9), (3, 5, 5, 5, 4, 4, 4, 4)
GPT_NEO_RUNS = (
    _run(2, (1, 1), TWO, (0.2079, 0.0113), 15505),
    _run(4, (64, 1), FOUR, (2.50204, 0.00465), 15085),
    _run(4, (64, 1), TWO, (2.29028, 0.0996), 19084),
    _run(8, (1024, 4), FOUR, (13.86466, 0.15927), 27219),
    _run(8, (1024, 4), TWO, (12.66101, 0.26912), 41785),
    _run(16, (1024, 4), FOUR, (7.03897, 0.06771), 35554),
    _run(16, (1024, 4), TWO, (6.4286, 0.19674), 41994),
    _run(32, (1024, 4), FOUR, (3.69588, 0.07908), 35757),
    _run(32, (1024, 4), TWO, (3.42667, 0.17001), 42702),
    _run(64, (1024, 4), FOUR, (2.00042, 0.07454), 35650),
    _run(64, (1024, 4), EIGHT, (2.25506, 0.03834), 41018),
)
