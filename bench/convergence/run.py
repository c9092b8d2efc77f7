"""Do plans train what one device trains? The loss curves of three jobs, each on one device and by three plans.

python -m bench.convergence.run [--only gpt,bert] [--steps N] [-o curves.json] [--readme]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from rich.console import Console

from bench.reference import train_reference
from bench.tables import chosen, environment, markdown, replace_table
from bench.throughput.clusters import MIXES, cluster_document
from hetpipe.cli.exits import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_output, write_text
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.training.loop import Loop
from hetpipe.training.session import join, open_session
from hetpipe.training.start import profile_everywhere

MIX = next(mix for mix in MIXES if mix.name == "2×V100 | 2×T4")
JOBS = {  # of configs/jobs, and what is changed: random dropout differs between plans
    "gpt": ("first", ["checkpoint=null"]),
    "alexnet": ("alexnet-cifar10", ["model.args.dropout=0.0", "train.dtype=float64"]),
    "bert": ("bert-text", ["model.args.hidden_dropout_prob=0", "model.args.attention_probs_dropout_prob=0", "checkpoint=null"]),
}
WAYS = {"even pipeline": "even", "batches by speed": "uneven-data-parallel", "hetpipe's plan": "auto"}
ONE = "one device"
README = Path(__file__).parent / "README.md"
console = Console(width=160)


def losses(job: Job, plans: Mapping[str, Plan], profile: Profile) -> dict[str, list[float]]:
    """The program of every rank: each plan from the same values on. The losses of the plans whose first rank this is."""
    found = {}
    for name, plan in plans.items():
        session = open_session(job)
        engine = join(session, plan, profile)
        if engine is not None:
            result = Loop(job, session, engine).run()
            if engine.world.is_main:
                found[name] = result.losses
    return found


def curves(name: str, steps: int) -> dict[str, list[float]]:
    """The losses of each way, and of one device that has the whole batch at once."""
    file, changes = JOBS[name]
    cluster = Cluster.parse(cluster_document(MIX), MIX.name)
    with tempfile.TemporaryDirectory(prefix="hetpipe-convergence-") as folder:
        cluster.save(Path(folder) / "cluster.json")
        settings = [f"cluster={folder}/cluster.json", f"train.steps={steps}", "train.epochs=null", "log=null"]
        return _curves(name, Job.read(f"configs/jobs/{file}.yaml", [*changes, *settings]), cluster)


def _curves(name: str, job: Job, cluster: Cluster) -> dict[str, list[float]]:
    profile = profile_everywhere(job)
    assert profile is not None
    plans = dict[str, Plan]()
    with Activity(f"{name}: planning"):
        for way, rule in WAYS.items():
            try:
                plans[way] = make_plan(profile, cluster, job.train.global_batch, partitioner=rule)
            except PartitionError as error:
                console.print(f"{name}, {way}: {error}", markup=False)
    ranks = start_ranks(losses, (job, plans, profile), cluster.devices, modules_of(job))
    return {ONE: train_reference(job).losses} | {way: row for rank in ranks for way, row in rank.items()}


def differences(found: Mapping[str, list[float]]) -> dict[str, float]:
    """Of each plan the greatest distance of a loss from one device's, relative to it."""
    truth = found[ONE]
    pairs = {way: list(zip(row, truth, strict=True)) for way, row in found.items() if way != ONE}
    return {way: max(abs(a - b) / abs(b) for a, b in row) for way, row in pairs.items()}


def draw(found: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """A panel a job, a line a way: lines that coincide are drawn thinner one on another."""
    figure, panels = plt.subplots(1, len(found), figsize=(4 * len(found), 3), layout="constrained", squeeze=False)
    for panel, (name, ways) in zip(panels[0], found.items(), strict=True):
        for place, (way, row) in enumerate(ways.items()):
            panel.plot(range(1, len(row) + 1), row, label=way, linewidth=6 - 1.6 * place, alpha=0.8)
        panel.set(title=name, xlabel="step", ylabel="loss")
        panel.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bench(
    only: Annotated[str, typer.Option(help="Names of jobs, with commas between them.")] = ",".join(JOBS),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each way.")] = 40,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all losses as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put picture and table into README.md.")] = False,
) -> None:
    """Train every way, and say how far the losses are from one device's."""
    if output is not None:
        check_output(output)
    found, rows = dict[str, dict[str, list[float]]](), list[list[str]]()
    for name in chosen("--only", only, list(JOBS)):
        found[name] = curves(name, steps)
        apart = differences(found[name])
        for way, row in found[name].items():
            rows.append([name, way, f"{row[0]:.6f}", f"{row[-1]:.6f}", f"{apart[way]:.1e}" if way in apart else ""])
    text = markdown(["job", "way", "first loss", "last loss", "greatest relative difference"], rows, words=2)
    console.print(text, markup=False)
    if output is not None:
        apart_by_name = {name: differences(ways) for name, ways in found.items()}
        document = {"environment": environment(), "losses": found, "differences": apart_by_name}
        write_text(output, json.dumps(document, indent=1) + "\n")
    if readme:
        draw(found, README.with_name("curves.svg"))
        replace_table(README, "table", f"{steps} steps; {environment()}.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
