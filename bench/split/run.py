"""What do stages that are split over two devices gain, and are they predicted? The plan of the planner, which weighs widths,
beside the best plan of whole layers and the best of split ones, measured on the same emulated devices.

python -m bench.split.run [--only TEXT] [--seconds S] [--rounds N] [-o all.json] [--readme]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from torch import Tensor

from bench.tables import environment, markdown, replace_table
from bench.throughput.clusters import Mix, cluster_document, tight_memory
from bench.throughput.run import prepared, steps_of
from hetpipe.building.build import build_model
from hetpipe.cli.exits import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_output, write_text
from hetpipe.layers.shards.sums import Group
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.predict.cost import Costs
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.loop import Loop
from hetpipe.training.runlog import WARMUP_STEPS
from hetpipe.training.session import join, open_session

README = Path(__file__).parent / "README.md"
OURS, WHOLE, SPLIT = "hetpipe", "whole layers", "split layers"
BATCH = 24
COMMON: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "profiler": {"microbatch_sizes": [1, 4, 12], "repeats": 5, "tensor_parallel": [2]},
    "train": {"global_batch": BATCH, "steps": WARMUP_STEPS, "evaluate_samples": 0, "optimizer": {"name": "AdamW", "lr": 1e-4}},
}
WIDE: dict[str, Any] = {
    "model": {"name": "mlp", "args": {"layers": 3, "inputs": 32, "width": 640, "expansion": 4, "outputs": 10}},
    "data": {"name": "random_classification", "args": {"inputs": 32, "classes": 10, "samples": 480}},
}
GPT: dict[str, Any] = {
    "model": {"name": "gpt", "args": {"layers": 2, "width": 256, "heads": 4, "context": 64}},
    "data": {"name": "text", "args": {"context": 64, "limit_bytes": 400000}},
}


class Case(NamedTuple):
    """`holds`: the part of the whole model, with one sample, that the smallest card holds."""

    name: str
    job: dict[str, Any]
    mix: Mix
    holds: float = 2.0


CASES = (
    Case("three wide layers", WIDE, Mix("2×A6000", ({"a6000": 2},)), 0.75),
    Case("three wide layers", WIDE, Mix("2×A6000 + T4", ({"a6000": 2, "t4": 1},)), 0.75),
    Case("three wide layers, little memory", WIDE, Mix("2×A6000", ({"a6000": 2},)), 0.58),
    Case("gpt of two blocks", GPT, Mix("2×A6000", ({"a6000": 2},)), 0.75),
    Case("gpt of two blocks", GPT, Mix("2×A6000 + 2×T4", ({"a6000": 2, "t4": 2},)), 0.75),
)


class Seen(NamedTuple):
    """What one device did in the last step: median seconds of a forward and a backward, and bytes that split layers summed."""

    forward: float
    backward: float
    summed: int


class Ran(NamedTuple):
    """Holds what one run of a plan showed: seconds of its steps, the part of them by which emulated devices were late, losses,
    and what each device did."""

    seconds: list[float]
    overrun: float
    losses: list[float]
    seen: dict[str, Seen]


class _Counted:
    """Counts the bytes that an engine gives to sums of split layers, in the step that began last."""

    def __init__(self, engine: PlanEngine) -> None:
        self.bytes, self._plain, self._begin = 0, Group.add_up, engine.recorders[0].begin_step
        engine.recorders[0].begin_step = self.begin  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begin a step."""
        self.bytes = 0
        self._begin()

    def __enter__(self) -> _Counted:
        def add_up(group: Group, tensor: Tensor) -> Tensor:
            self.bytes += tensor.numel() * tensor.element_size()
            return self._plain(group, tensor)

        Group.add_up = add_up  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Group.add_up = self._plain  # type: ignore[method-assign]


def trained(job: Job, plans: Mapping[str, Plan], steps: Mapping[str, int], profile: Profile, rounds: int) -> dict[str, list[Ran]]:
    """The program of every rank: each plan `rounds` times in turn, for so many steps. Returns what this rank saw of its own."""
    session, found = open_session(job), dict[str, list[Ran]]()
    for _ in range(rounds):
        for name, plan in plans.items():
            session = replace(session, model=build_model(job, session.data))
            engine = join(session, plan, profile)
            if engine is None:
                continue
            assert isinstance(engine, PlanEngine)
            own = job.model_copy(update={"train": job.train.model_copy(update={"steps": steps[name]})})
            with _Counted(engine) as counted:
                result = Loop(own, session, engine).run()
            spans = engine.recorders[0].spans
            forward, backward = (median([end - begin for k, _, begin, end in spans if k == kind]) for kind in "FB")
            seen = Seen(forward, backward, counted.bytes)
            device = engine.world.device_id or ""
            run = Ran(result.steady_seconds, result.overrun_fraction, result.losses, {device: seen})
            found.setdefault(name, []).append(run)
    return found


def plans_of(profile: Profile, cluster: Cluster) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plan of each way, and why the others have none."""

    def of(*widths: int) -> Profile:
        kept = tuple(m for m in profile.measurements if m.tensor_parallel in widths)
        return profile.model_copy(update={"measurements": kept})

    plans, reasons = dict[str, Plan](), dict[str, str]()
    for way, measured in ((WHOLE, of(1)), (SPLIT, of(2)), (OURS, profile)):
        kinds = {m.device_type for m in measured.measurements}
        try:
            plans[way] = make_plan(measured, with_types(cluster, kinds), BATCH)
        except PartitionError as error:
            reasons[way] = str(error)
    return plans, reasons


def with_types(cluster: Cluster, kinds: Collection[str]) -> Cluster:
    """The cluster without devices of other types."""
    nodes = [
        node.model_copy(update={"devices": {kind: count for kind, count in node.devices.items() if kind in kinds}})
        for node in cluster.nodes
    ]
    return cluster.with_nodes([node for node in nodes if node.devices])


def compare(case: Case, seconds: float, rounds: int) -> dict[str, Any]:
    """All ways of one case."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-split-") as name:
        folder = Path(name)

        def job_of(memory: dict[str, int] | None) -> Job:
            Cluster.parse(cluster_document(case.mix, memory), case.mix.name).save(folder / "cluster.json")
            return Job.parse({**COMMON, **case.job, "cluster": str(folder / "cluster.json")}, case.name)

        job, profile, cluster = prepared(job_of, lambda whole: tight_memory(case.mix, round(whole * case.holds * 1.5)))
        with Activity(f"{case.name} on {case.mix.name}: planning"):
            plans, reasons = plans_of(profile, cluster)
        steps = {way: steps_of(plan, seconds) for way, plan in plans.items()}
        runs = start_ranks(trained, (job, plans, steps, profile, rounds), cluster.devices, modules_of(job))
    return {
        "model": case.name,
        "cluster": case.mix.name,
        "reasons": reasons,
        "ways": {
            way: row_of(plan, [found[way] for found in runs if way in found], profile, cluster) for way, plan in plans.items()
        },
    }


def row_of(plan: Plan, ranks: Sequence[Sequence[Ran]], profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """One way's figures, of what each rank saw of its runs."""
    assert plan.predicted is not None
    seconds = sorted(s for run in ranks[0] for s in run.seconds)
    middle = median(seconds)
    return {
        "stages": " | ".join("-".join(f"{s.layers[1] - s.layers[0]}×{len(s.devices)}" for s in r.stages) for r in plan.replicas),
        "step_seconds": middle,
        "predicted_seconds": plan.predicted.step_seconds,
        "relative_spread": (seconds[-1 - len(seconds) // 4] - seconds[len(seconds) // 4]) / middle,
        "overrun_fraction": max(run.overrun for runs in ranks for run in runs),
        "losses": ranks[0][0].losses[:3],
        "actions": actions(plan, {d: seen for runs in ranks for d, seen in runs[-1].seen.items()}, profile, cluster),
    }


def actions(plan: Plan, seen: Mapping[str, Seen], profile: Profile, cluster: Cluster) -> list[dict[str, Any]]:
    """Return a row for the first device of each split stage: seconds of an action as predicted and as measured, and the bytes
    that it summed in a step."""
    costs, rows = Costs(profile, cluster), list[dict[str, Any]]()
    for replica in plan.replicas:
        for stage in replica.stages:
            if len(stage.devices) == 1:
                continue
            kind, size = cluster.device(stage.device).type, replica.microbatch_sizes[0]
            forward, backward = costs.stage_seconds(kind, *stage.layers, size, degree=len(stage.devices))
            found = seen[stage.device]
            rows.append(
                {
                    "device": stage.device,
                    "layers": list(stage.layers),
                    "predicted": [forward, backward],
                    "measured": [found.forward, found.backward],
                    "summed_bytes": found.summed,
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of a step of each way, predicted and measured, and how many times as fast it is as whole layers."""
    lines = []
    for row in rows:
        whole = row["ways"].get(WHOLE)
        for way, found in row["ways"].items():
            step = found["step_seconds"]
            lines.append(
                [
                    row["model"],
                    row["cluster"],
                    way,
                    found["stages"],
                    f"{1e3 * found['predicted_seconds']:.0f}",
                    f"{1e3 * step:.0f}",
                    f"{found['relative_spread']:.0%}",
                    f"{whole['step_seconds'] / step:.2f}" if whole is not None else "does not fit",
                ]
            )
    names = [
        "model",
        "cluster",
        "plan",
        "layers × devices of each stage",
        "predicted, ms",
        "measured, ms",
        "spread",
        "over whole layers",
    ]
    return markdown(names, lines, words=4)


def action_table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of the actions of split stages, predicted and measured, and the bytes that they sum."""
    lines = [
        [
            row["model"],
            row["cluster"],
            way,
            f"{action['layers'][0]} to {action['layers'][1]}",
            *(f"{1e3 * action[side][at]:.1f}" for at in range(2) for side in ("predicted", "measured")),
            f"{action['summed_bytes'] / 2**20:.2f}",
        ]
        for row in rows
        for way, found in row["ways"].items()
        for action in found["actions"]
    ]
    names = ["model", "cluster", "plan", "layers", "forward, predicted, ms", "measured", "backward, predicted, ms", "measured"]
    return markdown([*names, "summed in a step, MiB"], lines, words=4)


def bench(
    only: Annotated[str, typer.Option(help="Only cases whose name or cluster has this.")] = "",
    seconds: Annotated[float, typer.Option(min=0.001, help="That a run's steps take at least, without the first two.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")] = 2,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the tables into README.md beside this file.")] = False,
) -> None:
    """Measure, plan and train every way in every case."""
    console, rows, where = Console(width=200), list[dict[str, Any]](), environment()
    if output is not None:
        check_output(output)
    for case in CASES:
        if only.lower() not in f"{case.name} {case.mix.name}".lower():
            continue
        rows.append(compare(case, seconds, rounds))
        console.print(table(rows[-1:]), action_table(rows[-1:]), rows[-1]["reasons"], markup=False)
        if output is not None:
            write_text(output, json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    if readme:
        replace_table(README, "table", f"{where}.\n\n{table(rows)}\n{action_table(rows)}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
