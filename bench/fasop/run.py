"""Is hetpipe's plan as fast as FASOP's on FASOP's own inputs? By both estimates.

python -m bench.fasop.run [--time-limit SECONDS]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from bench.fasop.fit import cluster_of, errors, fitted, plan_of
from bench.fasop.formula import Times, estimate
from bench.fasop.published import GPT2_XL, NUMBER_BITS, T5, Model
from bench.partitioners.run import shape
from hetpipe.cli.commands import main
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.partitioners.auto import Auto
from hetpipe.planning.partition import Problem
from hetpipe.planning.registry import partitioner
from hetpipe.predict.simulator import simulate
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile


class Row(NamedTuple):
    """A plan of a model: seconds of the step by hetpipe's simulator and by FASOP's formula."""

    model: str
    planner: str
    plan: str
    simulated: float
    by_formula: float


def profile_of(model: Model, times: Times) -> Profile:
    """As `hetpipe import fasop` reads it."""
    options = ImportOptions(
        model=model.name,
        hidden_size=model.hidden,
        sequence_length=model.sequence,
        attention_heads=model.heads,
        vocabulary=model.vocabulary,
        number_bytes=NUMBER_BITS // 8,
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, row in times.items():
            np.save(Path(folder) / f"{model.name}_{kind}_1.npy", np.array(row))
        return import_published("fasop", [Path(folder)], options)[0]


def compared(model: Model, times: Times, seconds: float) -> list[Row]:
    """FASOP's published choice, its rule's best grid by hetpipe's simulator, and hetpipe's plan."""
    cluster, profile = cluster_of(model.best.a100_node), profile_of(model, times)
    problem = Problem.create(cluster=cluster, profile=profile, global_batch=model.global_batch)

    def row(planner: str, plan: Plan) -> Row:
        simulated = simulate(plan, profile, cluster).step_seconds
        return Row(model.name, planner, shape(plan, problem), simulated, estimate(plan, model, times, cluster).step)

    return [
        row("FASOP, as published", plan_of(model, model.best)),
        row("FASOP's rule, simulated", partitioner("fasop")(problem).plan),
        row("hetpipe", Auto(time_limit_seconds=seconds)(problem).plan),
    ]


def run(time_limit: Annotated[float, typer.Option(help="Seconds for hetpipe's planner on each model.")] = 60.0) -> None:
    """Print the tables of README.md."""
    rows = list[Row]()
    for model in (GPT2_XL, T5):
        times = fitted(model)
        for kind, row in times.items():
            print(f"{model.name} on {kind}, ms forward: " + ", ".join(f"{x * 1e3:.3f}" for x in dict.fromkeys(row)))
        worst = max(max(abs(x) for x in pair) for pair in errors(model, times))
        print(f"FASOP's {len(model.searched)} estimates of {model.name}: at most {worst:.1%} off")
        rows += compared(model, times, time_limit)
    print("\n| model | plan | by hetpipe's simulator, s | by FASOP's formula, s |\n|---|---|--:|--:|")
    for found in rows:
        print(f"| {found.model} | {found.planner}: {found.plan} | {found.simulated:.3f} | {found.by_formula:.3f} |")


if __name__ == "__main__":
    main(lambda: typer.run(run))
