"""How do planning, the start of a training and the Python work of a step grow with devices, layers and micro-batches?

python -m bench.scale.run [--only planning,starting,ranks,steps] [--largest N] [--repeats N] [--quick]
                          [-o all.json] [--json] [--readme]
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from bench.apart import figures, said
from bench.scale.jobs import Row, cluster, job, plan
from bench.scale.starting import FOLDER, PHASES
from bench.scale.texts import planning_text, ranks_text, starting_text, steps_text
from bench.tables import chosen, environment, replace_table
from hetpipe.cli.exits import main
from hetpipe.files.messages import counted
from hetpipe.files.writing import check_output, write_text
from hetpipe.processes.progress import Activity

README = Path(__file__).parent / "README.md"
DEVICES = (4, 16, 64, 256, 1024, 4096)
KINDS = ((2, 24), (3, 24), (2, 96))  # types, layers
MOST = 100_000  # devices times layers that are planned; more takes minutes
LAYERS, MICROBATCHES = (4, 16, 64, 256), (1, 4, 16, 64, 256)
RANKS = (1, 2, 4, 8)
QUICK = 16  # devices, layers, micro-batches


class Sizes(NamedTuple):
    """How far to go."""

    largest: int
    repeats: int
    quick: bool

    def up_to(self, sizes: Sequence[int]) -> list[int]:
        """Those of the sizes that are wanted."""
        return [size for size in sizes if size <= (QUICK if self.quick else math.inf)]

    @property
    def devices(self) -> list[int]:
        """Of clusters."""
        return [n for n in self.up_to(DEVICES) if n <= self.largest]


def apart(module: str, *words: object) -> Any:
    """The last line of what a module of this folder prints."""
    return figures(["-m", f"bench.scale.{module}", *map(str, words)])


def planning(sizes: Sizes) -> list[Row]:
    """A row a problem. Of three types there are 3/4 as many devices."""
    kinds = KINDS[:1] if sizes.quick else KINDS
    some = [(n, types, layers) for types, layers in kinds for n in sizes.devices if n * layers <= MOST]
    cases = [(n * 3 // 4 if types == 3 else n, types, layers) for n, types, layers in some]
    rows = []
    with Activity("bench/scale: planning", total=len(cases)) as activity:
        apart("planning", *cases[0])  # numba may have to compile
        for case in cases:
            activity.say(f"{case[0]} devices of {case[1]} types, {case[2]} layers")
            rows.append(apart("planning", *case))
            activity.advance(activity.text)
    return rows


def starting(sizes: Sizes) -> list[Row]:
    """Of each number of ranks the median of each phase."""
    counts = RANKS[:2] if sizes.quick else RANKS
    with (
        tempfile.TemporaryDirectory(prefix="hetpipe-scale-") as name,
        Activity("bench/scale: starting", total=len(counts) * sizes.repeats) as activity,
    ):
        folder, found = Path(name), dict[int, list[Row]]()
        for count in {1, *counts}:
            (folder / f"cluster{count}.json").write_text(json.dumps(cluster(count)))
            (folder / f"plan{count}.json").write_text(json.dumps(plan(count)))
        (folder / "job.yaml").write_text(json.dumps(job()))
        activity.say("measuring the model")
        profile = ["-m", "hetpipe", "profile", f"{folder}/job.yaml", "--set", f"cluster={folder}/cluster1.json"]
        said([*profile, "-o", f"{folder}/profile.json"])
        for count in list(counts) * sizes.repeats:
            activity.say(counted(count, "rank"))
            found.setdefault(count, []).append(start(folder, count))
            activity.advance(activity.text)
    return [{"ranks": count, **{key: median(row[key] for row in rows) for key in rows[0]}} for count, rows in found.items()]


def start(folder: Path, count: int) -> Row:
    """Seconds of each phase: from when all processes are through the phase before, until they are through it."""
    with tempfile.TemporaryDirectory(dir=folder) as moments:
        settings = {"cluster": f"cluster{count}.json", "plan.file": f"plan{count}.json", "profile": "profile.json"}
        began = time.monotonic()
        changes = [word for key, file in settings.items() for word in ("--set", f"{key}={folder}/{file}")]
        said(["-m", "bench.scale.starting", "train", f"{folder}/job.yaml", *changes], {FOLDER: moments})
        notes = [json.loads(file.read_text()) for file in Path(moments).iterdir()]
    return phases(began, notes)


def phases(began: float, notes: Sequence[Mapping[str, float]]) -> Row:
    """From the moments that each process noted."""
    ends = [max(note[phase] for note in notes if phase in note) for phase in PHASES]
    lengths = [end - begin for begin, end in pairwise([began, *ends])]
    return {**dict(zip(PHASES, lengths, strict=True)), "in all": ends[-1] - began}


def ranks(sizes: Sizes) -> list[Row]:
    """Seconds of what a rank of so many works out by itself."""
    rows = []
    with Activity("bench/scale: ranks", total=len(sizes.devices)) as activity:
        for n in sizes.devices:
            activity.say(f"{n} devices")
            rows.append({"devices": n, **apart("ranks", n)})
            activity.advance()
    return rows


def steps(sizes: Sizes) -> list[Row]:
    """Seconds of a step of the engine and of a plain loop."""
    layers, counts, rows = sizes.up_to(LAYERS), ",".join(map(str, sizes.up_to(MICROBATCHES))), list[Row]()
    with Activity("bench/scale: steps", total=len(layers)) as activity:
        for count in layers:
            activity.say(f"{count} layers")
            rows += apart("stepping", count, counts, sizes.repeats)
            activity.advance()
    return rows


PARTS: dict[str, tuple[Callable[[Sizes], list[Row]], Callable[[Sequence[Row]], str]]] = {
    "planning": (planning, planning_text),
    "starting": (starting, starting_text),
    "ranks": (ranks, ranks_text),
    "steps": (steps, steps_text),
}


def bench(
    only: Annotated[str, typer.Option(help="Names of parts, with commas between them.")] = ",".join(PARTS),
    largest: Annotated[int, typer.Option(min=4, help="Most devices of a cluster.")] = DEVICES[-1],
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each number of ranks, steps of each kind at least.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes only, once each: within a minute.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Put the tables into README.md beside this file.")] = False,
) -> None:
    """Measure each part and print its table."""
    names, found = chosen("--only", only, list(PARTS)), dict[str, list[Row]]()
    if output is not None:
        check_output(output)
    where, console = environment(), Console(width=200)
    for name in names:
        measured, told = PARTS[name]
        found[name] = measured(Sizes(largest, 1 if quick else repeats, quick))
        text = told(found[name])
        if not as_json:
            console.print(text, markup=False)
        if readme:
            replace_table(README, name, f"{where}.\n\n{text}")
        if output is not None:
            write_text(output, json.dumps({"environment": where, **found}, indent=1) + "\n")
    if as_json:
        sys.stdout.write(json.dumps({"environment": where, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
