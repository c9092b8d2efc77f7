"""How long does a simulation take? Pipelines of many stages and micro-batches, every duration different; and many of them that
share network adapters.

python -m bench.simulator.run [--repeats N] [--json]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer

from bench.tables import environment, markdown
from hetpipe.cli.commands import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.schedule import default_depths
from hetpipe.predict.pipeline import PipelineCosts, pipeline_times, ready
from hetpipe.predict.simulator import simulate

SHAPES = ((4, 8), (8, 64), (16, 128), (64, 512), (128, 1024))
NODE = 8  # devices of a node, where adapters are shared
CROWDS = ((1, 64, 512), (16, 64, 64), (128, 8, 32), (512, 2, 16), (1024, 1, 4))  # replicas, stages, micro-batches


def deep_depths(n: int, m: int) -> tuple[int, ...]:
    """1F1B with depths 2(n − s) − 1: a round trip more of slack per stage."""
    return tuple(max(1, min(m, 2 * (n - s) - 1)) for s in range(n))


def random_costs(n: int, m: int) -> PipelineCosts:
    """n stages, m micro-batches; transfers take about a tenth of a forward."""
    draw = np.random.default_rng(0)
    forward = draw.uniform(0.5, 1.5, (n, m))
    return PipelineCosts(
        forward=forward,
        backward=2 * forward,
        occupied=draw.uniform(0.0, 0.2, (n - 1, m)),
        latency=np.full(n - 1, 0.01),
        which=np.arange(m),
    )


def whole_plan(n: int, m: int, R: int = 1, node: int = 0) -> tuple[Plan, Profile, Cluster]:
    """A plan of R replicas of n stages of one layer, each on a device of its own, and what it takes to simulate it. All on one
    node, or on nodes of so many: stage s of all replicas before stage s + 1 of any. Of several replicas each has up to a quarter
    more micro-batches, or fewer."""
    draw = random.Random(0)
    seconds = [draw.uniform(0.5, 1.5) for _ in range(n)]
    layers = [
        {
            "name": f"layer.{i}",
            "parameter_bytes": 10**6,
            "output_bytes_per_sample": 10**7 if node else 10**4,
            "saved_bytes_per_sample": 10**5,
        }
        for i in range(n)
    ]
    measured = {
        "device_type": "gpu",
        "microbatch_sizes": [1],
        "forward_seconds": [seconds],
        "backward_seconds": [[2 * t for t in seconds]],
        "optimizer_seconds": [0.01] * n,
    }
    profile = {
        "format": "hetpipe.profile/1",
        "model": "chain",
        "layers": layers,
        "measurements": [measured],
        "optimizer": {"state_bytes_per_parameter_byte": 2.0},
    }
    cluster = {
        "format": "hetpipe.cluster/1",
        "device_types": {"gpu": {"memory": 10**12}},
        "nodes": [
            {"name": f"n{i}", "devices": {"gpu": node or n}, "link": {"bandwidth": 1e9, "latency": 1e-5}}
            for i in range(R * n // (node or n))
        ],
        "link": {"bandwidth": 1e9, "latency": 1e-5},
    }
    place = [f"n{i // (node or n)}/{i % (node or n)}" for i in range(R * n)]
    counts = [m + (draw.randint(-m // 4, m // 4) if R > 1 else 0) for _ in range(R)]
    replicas = [
        {"microbatch_sizes": [1] * count, "stages": [{"layers": [s, s + 1], "devices": [place[s * R + r]]} for s in range(n)]}
        for r, count in enumerate(counts)
    ]
    plan = {"format": "hetpipe.plan/1", "model": "chain", "global_batch": sum(counts), "replicas": replicas}
    return Plan.parse(plan, "plan"), Profile.parse(profile, "profile"), Cluster.parse(cluster, "cluster")


def seconds_of(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(least, median) seconds of processor time: other work on the machine does not count."""
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        action()
        found.append(time.process_time() - begin)
    return min(found), statistics.median(found)


def measure(n: int, m: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds of the longest path for three schedules, of `simulate`, and of `simulate` with its spans read; compiled before."""
    ready()
    costs, plan = random_costs(n, m), whole_plan(n, m)
    actions: dict[str, Callable[[], object]] = {
        "1f1b": lambda: pipeline_times(costs, default_depths("1f1b", n, m)),
        "deep 1f1b": lambda: pipeline_times(costs, deep_depths(n, m)),
        "gpipe": lambda: pipeline_times(costs, default_depths("gpipe", n, m)),
        "simulate": lambda: simulate(*plan),
        "simulate and spans": lambda: len(simulate(*plan).spans),
    }
    return {name: seconds_of(action, repeats) for name, action in actions.items()}


def crowd(R: int, n: int, m: int, repeats: int) -> tuple[float, float]:
    """Seconds of `simulate` where nodes share adapters; compiled before."""
    plan = whole_plan(n, m, R, NODE)
    simulate(*plan)
    return seconds_of(lambda: simulate(*plan), repeats)


def shown(seconds: tuple[float, float]) -> str:
    """Milliseconds: the least and the median."""
    return " / ".join(f"{1e3 * each:.1f}" for each in seconds)


def run(repeats: Annotated[int, typer.Option(min=1)] = 9, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print the least and the median of the repeats."""
    rows = {f"{n} × {m}": measure(n, m, repeats) for n, m in SHAPES}
    crowds = {f"{R} × {n} × {m}": crowd(R, n, m, repeats) for R, n, m in CROWDS}
    if as_json:
        sys.stdout.write(json.dumps({**rows, **crowds}, indent=1) + "\n")
        return
    heads = ["stages × micro-batches", *next(iter(rows.values()))]
    print(markdown(heads, [[shape, *map(shown, row.values())] for shape, row in rows.items()]))
    print(markdown(["replicas × stages × micro-batches", "simulate"], [[shape, shown(took)] for shape, took in crowds.items()]))
    print(f"Milliseconds of processor time, least / median. {environment()}, one processor in use")


if __name__ == "__main__":
    main(lambda: typer.run(run))
