"""How long does the front of price and time take over 0..8 × 0..8 nodes of 8 GPUs of two types?

    python -m bench.pareto.run [--global-batch 512] [--nodes 8] [--workers N] [--time-limit SECONDS] [-o FOLDER]

GPT-2 XL with the synthetic times of bench/partitioners/profiles.py (or --model, one of those or an imported profile.json of the
types A100 and A10) on p4d and g5 nodes as in configs/catalogues/aws.yaml.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.partitioners.profiles import memory_gib, profile
from hetpipe.documents.clusters.catalogue import Catalogue
from hetpipe.documents.profile import Profile
from hetpipe.planning.front import Front
from hetpipe.planning.pareto import make_front
from hetpipe.processes.environment import cores
from hetpipe.show.front_report import draw_front, front_csv, front_table

TYPES = {"A100": 4.10, "A10": 2.04}  # price per hour of one device of an on-demand p4d.24xlarge and g5.48xlarge
console = Console(width=160)


def catalogue(nodes: int) -> Catalogue:
    """0 to so many nodes of each type."""
    document = {
        "format": "hetpipe.catalogue/1",
        "device_types": {kind: {"memory": f"{memory_gib(kind)} GiB", "price_per_hour": price} for kind, price in TYPES.items()},
        "templates": {
            "p4d": {"devices": {"A100": 8}, "link": {"bandwidth": "300 GB/s", "latency": "5 us"}},
            "g5": {"devices": {"A10": 8}, "link": {"bandwidth": "24 GB/s", "latency": "10 us"}},
        },
        "nodes": {"p4d": f"0..{nodes}", "g5": f"0..{nodes}"},
        "link": {"bandwidth": "12 GB/s", "latency": "30 us"},
        "links": [{"between": ["p4d", "p4d"], "bandwidth": "50 GB/s", "latency": "20 us"}],
    }
    return Catalogue.parse(document, "the benchmark's catalogue")


def processor_seconds() -> float:
    """Of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def save(front: Front, folder: Path) -> None:
    """front.json, front.csv, front.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    front.save(folder / "front.json")
    (folder / "front.csv").write_text(front_csv(front))
    draw_front(front, folder / "front.svg")


def main(
    global_batch: Annotated[int, typer.Option()] = 512,
    nodes: Annotated[int, typer.Option(help="At most so many of each type.")] = 8,
    model: Annotated[str, typer.Option(help="Of bench/partitioners/profiles.py, or a profile.json.")] = "gpt2-xl",
    workers: Annotated[int, typer.Option(help="Processes.")] = cores(),
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the whole front.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A folder for the front.")] = None,
) -> None:
    """Print the front, how the other sub-clusters were ruled out, and the seconds."""
    measured = Profile.load(model) if model.endswith(".json") else profile(model, list(TYPES))
    assert measured is not None
    began, used = time.perf_counter(), processor_seconds()
    with console.status("bounds") as status:
        front = make_front(
            measured,
            catalogue(nodes),
            global_batch,
            workers=workers,
            time_limit_seconds=time_limit,
            progress=lambda done, total, text: status.update(f"{done} of {total}: {text}"),
        ).front
    seconds, used = time.perf_counter() - began, processor_seconds() - used
    console.print(front_table(front))
    console.print(f"{seconds:.1f} s with {workers} processes; {used:.1f} s of processor time")
    if output is not None:
        save(front, output)


if __name__ == "__main__":
    typer.run(main)
