"""How long does `auto` take, in how much memory, and how large is the proven gap, from 8 to 4,096 devices?

    python -m bench.planner.run [--only TEXT] [--per-device SAMPLES] [--memory FACTOR] [--synthetic] [-o table.json]

Each case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from bench.partitioners.profiles import SAILOR, profile
from hetpipe.exchange.importers.options import ImportOptions
from hetpipe.exchange.importers.sailor import import_sailor
from hetpipe.partitioners.auto import Auto
from hetpipe.planning.partition import Problem
from hetpipe.predict.simulator import simulate
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.profile import Profile

MODEL = "OPT-350"
TYPES: dict[str, float] = {"A100-40": 40, "V100-16": 16, "Titan-RTX": 24, "GH-96": 96}  # GB
SYNTHETIC = {"A100": 39, "V100": 15.7, "T4": 14.7, "A10": 22}
NODE = 8
INSIDE = {"bandwidth": "100 GB/s", "latency": "10 us"}
BETWEEN = {"bandwidth": "10 GB/s", "latency": "30 us"}
LIMIT_SECONDS = 300.0  # none of the cases should need it, however busy the machine
console = Console(width=160)


class Case(NamedTuple):
    """So many devices, of so many types in equal parts."""

    devices: int
    types: int


CASES = [Case(n, 2) for n in (8, 16, 32, 128, 512, 1024, 4096)]
CASES += [Case(n, 3) for n in (96, 192, 768)] + [Case(n, 4) for n in (256, 1024)]


def problem(case: Case, per_device: int, memory: float, *, synthetic: bool = False) -> Problem:
    """Nodes of 8 devices (4 where there are only 8 in all) of one type each."""
    found: Profile | None
    if SAILOR is not None and not synthetic:
        found, sizes = import_sailor(SAILOR, ImportOptions(model=MODEL)).profile, dict(TYPES)
    else:
        found, sizes = profile("gpt2-medium", list(SYNTHETIC)), dict(SYNTHETIC)
    assert found is not None
    kinds = list(sizes)[: case.types]
    each = case.devices // case.types
    in_node = min(NODE, each)
    nodes = [{kind: in_node} for kind in kinds for _ in range(each // in_node)]
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {kind: {"memory": f"{sizes[kind] * memory:.3f} GB"} for kind in kinds},
        "nodes": [{"name": f"n{i}", "devices": devices, "link": INSIDE} for i, devices in enumerate(nodes)],
        "link": BETWEEN,
    }
    cluster = Cluster.parse(document, "the benchmark's cluster")
    return Problem.create(cluster=cluster, profile=found, global_batch=per_device * len(cluster.devices))


def measure(case: Case, per_device: int, memory: float, synthetic: bool) -> dict[str, Any]:
    """One case, in this process."""
    given = problem(case, per_device, memory, synthetic=synthetic)
    began, worked = time.perf_counter(), time.process_time()
    solution = Auto(time_limit_seconds=LIMIT_SECONDS)(given)
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = simulate(solution.plan, given.profile, given.cluster).step_seconds
    bound = solution.lower_bound_seconds
    return {
        "devices": len(given.cluster.devices), "types": case.types, "samples_per_device": per_device,
        "seconds": seconds, "processor_seconds": processor, "peak_bytes": peak,
        "step_seconds": step, "lower_bound_seconds": bound,
        "gap": step / bound - 1 if bound else None,
    }  # fmt: skip


def main(
    only: Annotated[str, typer.Option(help="'DEVICESxTYPES': one case.")] = "",
    per_device: Annotated[int, typer.Option(help="Global batch, in samples per device.")] = 16,
    memory: Annotated[float, typer.Option(help="Device memory, times the real one.")] = 1.0,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="GPT-2 medium, though there are measurements.")] = False,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
) -> None:
    """Print the table."""
    cases = [case for case in CASES if only in ("", f"{case.devices}x{case.types}")]
    if here:
        print(json.dumps(measure(cases[0], per_device, memory, synthetic)))
        return
    table = Table("devices", "types", "samples/device", "seconds", "processor s", "peak MB", "step s", "bound s", "gap")
    rows = []
    for case in cases:
        name = f"{case.devices}x{case.types}"
        command = [sys.executable, "-m", "bench.planner.run", "--here", "--only", name,
                   "--per-device", str(per_device), "--memory", str(memory), *["--synthetic"] * synthetic]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            table.add_row(str(case.devices), str(case.types), str(per_device), done.stderr.strip()[-60:])
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        gap = "none" if row["gap"] is None else f"{row['gap']:.2%}"
        table.add_row(str(row["devices"]), str(row["types"]), str(per_device), f"{row['seconds']:.2f}",
                      f"{row['processor_seconds']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}", f"{row['step_seconds']:.4f}",
                      f"{row['lower_bound_seconds'] or 0:.4f}", gap)  # fmt: skip
    console.print(table)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
