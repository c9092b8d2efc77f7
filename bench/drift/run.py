"""A device becomes twice as slow in the midst of a run: is it seen, and what is it worth to move layers? And does anybody cry
wolf where nothing has happened?

python -m bench.drift.run [--seeds N] [--quiet-steps N] [-o all.json] [--readme]
"""

from __future__ import annotations

import json
import logging
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from bench.drift.slowed import Slower, slowed
from bench.kills.run import state
from bench.tables import environment, markdown, replace_table
from bench.throughput.clusters import CARDS, Mix
from hetpipe.cli.exits import main
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_output, write_text
from hetpipe.processes.progress import LOG
from hetpipe.processes.world import World
from hetpipe.training.directing.by_job import ByJob
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import WARMUP, Drift
from hetpipe.training.directing.seen import Seen
from hetpipe.training.observers.records import DriftRecord, StepRecord
from hetpipe.training.session import Session, new_plan
from hetpipe.training.start import profile_everywhere, run_everywhere
from hetpipe.training.trainer import Trainer

README = Path(__file__).parent / "README.md"
SLOWDOWN, QUIET_SLOWDOWN = 20.0, 5.0  # of an A6000: emulated devices sleep most of the time, or half of it
FACTOR = 2.0
STEPS, TURN = 150, 12  # steps of a run, and of each turn of the two plans that are compared
MLP: dict[str, Any] = {
    "model": {"name": "mlp", "args": {"layers": 12, "width": 64, "inputs": 16, "outputs": 8}},
    "data": {"name": "random_classification", "args": {"samples": 480, "inputs": 16, "classes": 8}},
}
GPT: dict[str, Any] = {
    "model": {"name": "gpt", "args": {"layers": 6, "width": 32, "heads": 2, "context": 16}},
    "data": {"name": "text", "args": {"context": 16, "limit_bytes": 100000}},
}
LOAD = """
import random, time
while True:
    end = time.time() + random.uniform(0.02, 0.2)
    while time.time() < end:
        pass
    time.sleep(0.5)
"""


class Case(NamedTuple):
    """`memory`: of each device, in MiB; where it is little, no device holds the whole model."""

    name: str
    job: dict[str, Any]
    mix: Mix
    memory: float = 1024.0


CASES = (
    Case("mlp", MLP, Mix("A6000 + 2×L4", ({"a6000": 1, "l4": 2},))),
    Case("mlp, little memory", MLP, Mix("A6000 + 2×L4", ({"a6000": 1, "l4": 2},)), 3.0),
    Case("gpt", GPT, Mix("2×A6000 | T4", ({"a6000": 2}, {"t4": 1}))),
)


def job_of(case: Case, folder: Path, *, slowdown: float | None = SLOWDOWN, **train: Any) -> Job:
    """A job of a case in a folder; without a slowdown at the machine's own speed."""
    kinds = {
        card: {
            "memory": round(case.memory * 2**20),
            **({"emulate": {"slowdown": slowdown * CARDS[card][0]}} if slowdown is not None else {}),
        }
        for card in case.mix.cards
    }
    cluster = {
        "format": "hetpipe.cluster/1",
        "device_types": kinds,
        "nodes": [{"name": f"n{i}", "devices": node} for i, node in enumerate(case.mix.nodes)],
    }
    name = "plain" if slowdown is None else "cluster"
    write_text(folder / f"{name}.json", json.dumps(cluster))
    section = {"global_batch": 24, "steps": STEPS, "optimizer": {"name": "AdamW", "lr": 1e-3}, "dtype": "float64"}
    document = {
        "format": "hetpipe.job/1",
        **case.job,
        "cluster": str(folder / f"{name}.json"),
        "profiler": {"microbatch_sizes": [1, 4, 8], "repeats": 5},
        "rebalance": "auto",
        "train": {**section, "evaluate_samples": 0, **train},
        "checkpoint": {"folder": str(folder / f"saved-{name}"), "every_steps": 10 * STEPS},
    }
    return Job.parse(document, case.name)


class Told(NamedTuple):
    """What one rank saw: the legs' first steps and plans, seconds of steps by their numbers, what was told of speeds, what was
    said of moves."""

    legs: list[tuple[int, Plan]]
    seconds: dict[int, float]
    drifts: list[DriftRecord]
    said: list[str]


class Watched(ByJob):
    """The director of the job. Once it has moved, the plan to which it moves and the one for a profile that declares the slow
    device take turns, so that both meet the same other work of this machine."""

    def __init__(self, session: Session, device: str | None) -> None:
        super().__init__(session)
        self.device, self.told = device, Told([], {}, [], [])
        self._turns = list[Leg]()

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        """Of the job, until it moves."""
        if self._turns and event.step < STEPS:
            leg: Leg | None = self._turns[len(self.told.legs) % 2]
        else:
            leg = super().next_leg(event, world, profile)
            if leg is not None and event.why == "drift":
                assert self._rebalance is not None
                seen = Seen.by({self.device or "": FACTOR}, self.session.cluster, profile)
                self._turns = [Leg(self._rebalance._fresh(seen, event.plan, world), seen=seen), leg]
        if leg is not None:
            self.told.legs.append((event.step, leg.plan))
            leg = leg._replace(until=event.step + TURN) if self._turns else leg
        return leg

    def watch(self, record: StepRecord) -> Event | None:
        """With the seconds of the step before."""
        if record.step_seconds is not None:
            self.told.seconds[record.step - 1] = record.step_seconds
        return super().watch(record)

    def drifted(self, drift: Drift, world: World) -> DriftRecord | None:
        """With what is told."""
        record = super().drifted(drift, world)
        self.told.drifts.extend([record] if record is not None else [])
        return record


def watched(job: Job, changes: Sequence[Slower], profile: Profile, plan: Plan) -> Told | None:
    """The program of every rank."""
    directors = list[Watched]()

    def planned(session: Session, *_: Any) -> bool:
        directors.append(Watched(session, changes[0].device if changes else None))
        trainer.director = directors[0]
        return True

    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    said = list[str]()
    LOG.addHandler(handler)
    trainer = Trainer(job)
    with slowed(changes):
        found = trainer.run(plan, profile, planned)
    return directors[0].told._replace(said=[line for line in said if line.startswith("moved ")]) if found is not None else None


def plan_of(job: Job, profile: Profile) -> Plan | None:
    """The program of every rank: the plan of the begin."""
    from hetpipe.training.session import Request, open_session

    session = open_session(job)
    found = new_plan(session, profile, Request.by(job))
    return found if session.world.is_main else None


def slow_run(case: Case, seed: int) -> dict[str, Any]:
    """One run of a case, in which a device that is drawn becomes slow in a step that is."""
    draw = random.Random(f"{case.name} {seed}")
    with tempfile.TemporaryDirectory(prefix="hetpipe-drift-") as name:
        folder = Path(name)
        job = job_of(case, folder)
        profile = profile_everywhere(job)
        assert profile is not None
        plan: Plan = run_everywhere(job, plan_of, profile)
        begin = Slower(draw.choice(plan.device_ids), FACTOR, draw.randint(35, 45))
        told: Told = run_everywhere(job, watched, [begin], profile, plan)
        plain = job_of(case, folder, slowdown=None)
        run_everywhere(plain.model_copy(update={"rebalance": "off"}), undisturbed, plan, profile)
        apart = difference(folder)
    return {
        "case": case.name,
        "mix": case.mix.name,
        "device": begin.device,
        "first": begin.first,
        "apart": apart,
        **figures(told, begin),
    }


class Still(ByJob):
    """One plan to the end, whatever is measured."""

    def drifted(self, drift: Drift, world: World) -> None:
        """Nothing."""


def undisturbed(job: Job, plan: Plan, profile: Profile) -> bool | None:
    """The program of every rank: the same run by one plan, at the machine's own speed."""
    trainer = Trainer(job)

    def planned(session: Session, *_: Any) -> bool:
        trainer.director = Still(session)
        return True

    return True if trainer.run(plan, profile, planned) is not None else None


def difference(folder: Path) -> float:
    """The greatest of all parameters and optimizer states."""
    ours, theirs = (state(folder, saved) for saved in ("saved-cluster", "saved-plain"))
    assert ours.keys() == theirs.keys()
    return max(float((tensor.double() - theirs[key].double()).abs().max()) for key, tensor in ours.items() if tensor.numel())


def figures(told: Told, begin: Slower) -> dict[str, Any]:
    """Medians of the parts of a run: before, slow by the plan of before, by that to which it moves, and by that of the file that
    declares it."""
    starts = [step for step, _ in told.legs] + [STEPS]
    first = next((drift for drift in told.drifts if drift.step >= begin.first and drift.factors), None)

    def middle(*spans: tuple[int, int]) -> float | None:
        known = [seconds for step, seconds in told.seconds.items() if any(low < step <= high for low, high in spans)]
        return median(known) if known else None

    turns = [(low + WARMUP, high) for low, high in pairwise(starts[1:])]
    moved = [re.search(r"moved (\d+) layers?, (\S+ \S+), in (\S+ \S+):", line) for line in told.said]
    return {
        "told_after_steps": first.step - begin.first + 1 if first is not None else None,
        "factors": first.factors if first is not None else {},
        "others_told": len(told.drifts) - (first is not None),
        "before": middle((WARMUP, begin.first - 1)),
        "slow": middle((begin.first, starts[1])),
        "moved": middle(*turns[::2]),
        "declared": middle(*turns[1::2]),
        "same": len(told.legs) > 2 and told.legs[1][1].fingerprint == told.legs[2][1].fingerprint,
        "move": moved[0].groups() if moved and moved[0] is not None else None,
    }


def quiet(case: Case, steps: int) -> dict[str, Any]:
    """A long run in which nothing changes, beside a process that takes a processor now and then."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-drift-") as name, subprocess.Popen([sys.executable, "-c", LOAD]) as load:
        try:
            job = job_of(case, Path(name), slowdown=QUIET_SLOWDOWN, steps=steps)
            profile = profile_everywhere(job)
            assert profile is not None
            told: Told = run_everywhere(job, watched, [], profile, run_everywhere(job, plan_of, profile))
        finally:
            load.kill()
    changes = [drift for drift in told.drifts if drift.factors]
    ordered = sorted(told.seconds.values())
    at = [ordered[round(part * (len(ordered) - 1))] for part in (0.5, 0.95, 0.999)]
    return {"case": case.name, "steps": len(ordered), "told": [drift.told for drift in changes], "quantiles": at}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each run."""
    lines = []
    for row in rows:
        ms = [f"{1e3 * row[key]:.0f}" if row[key] is not None else "" for key in ("before", "slow", "moved", "declared")]
        speed = f"{row['declared'] / row['moved']:.0%}{', the same plan' if row['same'] else ''}" if row["declared"] else ""
        layers, size, seconds = row["move"] or ("", "", "")
        told = [str(row["told_after_steps"]), " ".join(f"{factor:.2f}" for factor in row["factors"].values())]
        move = [f"{layers} ({size})", seconds]
        lines.append([row["case"], row["mix"], row["device"], *told, *ms, speed, *move, f"{row['apart']:.0e}"])
    names = ["model", "cluster", "slow device", "told after steps", "times as slow", "step before, ms", "slow, ms", "moved, ms"]
    names += ["declared, ms", "of its speed", "layers moved", "in", "parameters apart by"]
    return markdown(names, lines, words=3)


def quiet_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each long run."""
    lines = [
        [row["case"], f"{row['steps']:,}", *(f"{1e3 * x:.0f}" for x in row["quantiles"]), str(len(row["told"]))] for row in rows
    ]
    return markdown(["model", "steps", "median, ms", "95 %, ms", "99.9 %, ms", "told"], lines)


def bench(
    seeds: Annotated[int, typer.Option(min=0, help="Runs of each case, each with another slow device.")] = 3,
    quiet_steps: Annotated[int, typer.Option(min=0, help="Steps of each long run.")] = 2000,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the tables into README.md beside this file.")] = False,
) -> None:
    """Run all."""
    console, where = Console(width=240), environment()
    if output is not None:
        check_output(output)
    rows, long = list[dict[str, Any]](), list[dict[str, Any]]()
    for seed in range(seeds):
        for case in CASES:
            rows.append(slow_run(case, seed))
            console.print(table(rows[-1:]), markup=False)
    for case in CASES if quiet_steps else ():
        long.append(quiet(case, quiet_steps))
        console.print(quiet_table(long[-1:]), *long[-1]["told"], markup=False)
    if output is not None:
        write_text(output, json.dumps({"environment": where, "rows": rows, "quiet": long}, indent=1) + "\n")
    if readme:
        replace_table(README, "table", f"{where}.\n\n{table(rows)}\n{quiet_table(long)}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
