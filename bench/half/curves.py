"""Does training with a precision for each device converge as in fp32? One plan of unequal replicas, in several precisions.

python -m bench.half.curves [--only gpt,bert] [--steps N] [--seeds 0,1,2] [-o curves.json] [--resume]
                             [--readme]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from rich.console import Console

from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main
from hetpipe.files.messages import InputError, nearest
from hetpipe.files.writing import check_output, write_text
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan
from hetpipe.training.loop import Loop
from hetpipe.training.session import join, open_session

README = Path(__file__).parent / "README.md"
PICTURE = "![Losses of each model in five ways and from each seed, and how far they are from those in fp32](curves.svg)"
LAST = 20  # steps whose mean loss is the final one
TYPES = ("first", "second", "alone")  # device types: the two stages of a pipeline, and the whole model on one device
FULL = "fp32 everywhere"
WAYS: dict[str, tuple[str, str, str]] = {
    FULL: ("fp32", "fp32", "fp32"),
    "bf16 everywhere": ("bf16", "bf16", "bf16"),
    "fp16 everywhere": ("fp16", "fp16", "fp16"),
    "bf16 → fp32, beside fp32": ("bf16", "fp32", "fp32"),
    "bf16 → fp16, beside fp32": ("bf16", "fp16", "fp32"),
}
MODELS: dict[str, dict[str, Any]] = {  # `cut`: where the second stage begins; `pipeline`, `alone`: samples of micro-batches
    "gpt": {
        "model": {"name": "gpt", "args": {"size": "tiny", "context": 64}},
        "data": {"name": "text", "args": {"context": 64}},
        "train": {"optimizer": {"name": "AdamW", "lr": 1e-3}, "clip_norm": 1.0},
        "cut": 6,
        "layers": 10,
        "pipeline": [4, 4, 4],
        "alone": [2, 2],
    },
    "bert": {
        "model": {
            "name": "bert",
            "args": {
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "initializer_range": 0.08,
                "vocab_size": 2000,
                "max_position_embeddings": 32,
                "num_labels": 8,
                "hidden_dropout_prob": 0,
                "attention_probs_dropout_prob": 0,
            },
        },
        "data": {"name": "source_packages", "args": {"length": 32, "vocabulary": 2000, "samples": 400}},
        "train": {
            "optimizer": {"name": "AdamW", "lr": 2e-3},
            "scheduler": {"name": "LinearLR", "warmup_steps": 10},
            "clip_norm": 1.0,
        },
        "cut": 4,
        "layers": 6,
        "pipeline": [12, 12, 12],
        "alone": [6, 6],
    },
}
Losses = dict[str, dict[str, dict[str, list[float]]]]  # of each model, way and seed, one a step
console = Console(width=160)


def cluster_of_three() -> Cluster:
    """This machine as three devices of three types, which are plain CPU processes: nothing is emulated."""
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {kind: {"memory": "1 GiB"} for kind in TYPES},
            "nodes": [{"name": "n0", "devices": dict.fromkeys(TYPES, 1)}],
        },
        "three devices",
    )


def plan_of(model: str, way: str) -> Plan:
    """A pipeline of two stages with most of the samples beside one device with the others, in the precisions of the way."""
    given = MODELS[model]
    ranges = [[[0, given["cut"]], [given["cut"], given["layers"]]], [[0, given["layers"]]]]
    numbers = iter(range(len(TYPES)))
    replicas = [
        {"microbatch_sizes": sizes, "stages": [{"layers": layers, "devices": [f"n0/{next(numbers)}"]} for layers in stages]}
        for sizes, stages in zip((given["pipeline"], given["alone"]), ranges, strict=True)
    ]
    document = {
        "format": "hetpipe.plan/1",
        "model": model,
        "global_batch": sum(given["pipeline"] + given["alone"]),
        "schedule": "1f1b",
        "replicas": replicas,
        "precision": dict(zip(TYPES, WAYS[way], strict=True)),
    }
    return Plan.parse(document, f"{model}, {way}")


def job_of(model: str, seed: int, steps: int, cluster: str) -> Job:
    """The job of one seed, which decides the first values of parameters and the order of the samples."""
    given = MODELS[model]
    train = {
        **given["train"],
        "global_batch": sum(given["pipeline"] + given["alone"]),
        "steps": steps,
        "seed": seed,
        "evaluate_samples": 0,
    }
    document = {"format": "hetpipe.job/1", "cluster": cluster, "model": given["model"], "data": given["data"], "train": train}
    return Job.parse(document, f"{model}, seed {seed}")


def losses(job: Job, plans: Mapping[str, Plan]) -> dict[str, list[float]]:
    """The program of every rank: each plan from the same values on. The losses of the plans whose first rank this is."""
    found = {}
    for way, plan in plans.items():
        session = open_session(job)
        engine = join(session, plan, None)
        assert engine is not None  # each plan uses all devices
        result = Loop(job, session, engine).run()
        if engine.world.is_main:
            found[way] = result.losses
    return found


def curves(model: str, seed: int, steps: int) -> dict[str, list[float]]:
    """The losses of each way."""
    cluster, plans = cluster_of_three(), {way: plan_of(model, way) for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="hetpipe-half-") as folder:
        cluster.save(Path(folder) / "cluster.json")
        job = job_of(model, seed, steps, f"{folder}/cluster.json")
        ranks = start_ranks(losses, (job, plans), cluster.devices, [f"hetpipe.models.{model}"])
    return {way: row for rank in ranks for way, row in rank.items()}


def final(row: Sequence[float]) -> float:
    """The mean loss of the last steps."""
    return fmean(row[-LAST:])


def summary(ways: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """Of each way the final losses by seed, their mean and spread (greatest less least), how far the mean is from that of fp32,
    the furthest that a seed is from the same seed in fp32, and whether both lie within fp32's spread."""
    full = {seed: final(row) for seed, row in ways[FULL].items()}
    spread, found = max(full.values()) - min(full.values()), dict[str, dict[str, Any]]()
    for way, rows in ways.items():
        finals = {seed: final(row) for seed, row in rows.items()}
        apart = fmean(finals.values()) - fmean(full.values())
        furthest = max((finals[seed] - full[seed] for seed in full), key=abs)
        found[way] = {
            "finals": finals,
            "mean": fmean(finals.values()),
            "spread": max(finals.values()) - min(finals.values()),
            "apart": apart,
            "furthest": furthest,
            "within": max(abs(apart), abs(furthest)) <= spread,
        }
    return found


def table(found: Losses) -> str:
    """A line of each model and way."""
    seeds = list(next(iter(found.values()))[FULL])
    names = [
        "model",
        "precisions",
        *(f"seed {seed}" for seed in seeds),
        "mean",
        "spread of seeds",
        "mean less fp32's",
        "furthest of a seed",
        "within fp32's spread",
    ]
    lines = []
    for model, ways in found.items():
        for way, row in summary(ways).items():
            numbers = [*row["finals"].values(), row["mean"], row["spread"]]
            beside = (
                ["", "", ""]
                if way == FULL
                else [f"{row['apart']:+.4f}", f"{row['furthest']:+.4f}", "yes" if row["within"] else "**no**"]
            )
            lines.append([model, way, *(f"{x:.4f}" for x in numbers), *beside])
    return markdown(names, lines, words=2)


def smooth(row: Sequence[float]) -> list[float]:
    """Of each step the mean of the steps up to it, `LAST` at most."""
    return [fmean(row[max(0, at + 1 - LAST) : at + 1]) for at in range(len(row))]


def draw(found: Losses, path: Path) -> None:
    """A column a model: above the losses, a line of each way and seed; below how far they are from the same seed's in fp32."""
    plt.rcParams["svg.hashsalt"] = "hetpipe"  # the same names in each run
    figure, panels = plt.subplots(2, len(found), figsize=(5 * len(found), 6), layout="constrained", squeeze=False, sharex=True)
    for column, (model, ways) in enumerate(found.items()):
        above, below = panels[:, column]
        for number, (way, rows) in enumerate(ways.items()):
            for seed, row in rows.items():
                style = {
                    "color": f"C{number}",
                    "linewidth": 3 - 0.6 * number,
                    "alpha": 0.8,
                    "label": way if seed == next(iter(rows)) else None,
                }
                truth, steps = smooth(ways[FULL][seed]), range(1, len(row) + 1)
                above.plot(steps, smooth(row), **style)
                if way != FULL:
                    apart = [a - b for a, b in zip(smooth(row), truth, strict=True)]
                    below.plot(steps, apart, **{**style, "linewidth": 1})
        above.set(title=model, ylabel=f"loss, mean of {LAST} steps")
        below.set(xlabel="step", ylabel="less the same seed's in fp32")
        above.legend()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def bench(
    only: Annotated[str, typer.Option(help="Names of models, with commas between them.")] = ",".join(MODELS),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 200,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "0,1,2",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all losses as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the output file has already.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Put picture and table into README.md.")] = False,
) -> None:
    """Train in every way from every seed, and say how far the final losses are from those in fp32."""
    if output is not None:
        check_output(output)
    found, where, wanted = Losses(), environment(), seeds.split(",")
    if output is not None and resume and output.exists():
        before = json.loads(output.read_text("utf-8"))
        found, where = before["losses"], before["environment"]
    models = [name.strip() for name in only.split(",")]
    for model in models:
        if model not in MODELS:
            raise InputError(f"--only: unknown value {model!r}{nearest(model, list(MODELS))}")
        ways = found.setdefault(model, {way: {} for way in WAYS})
        for seed in wanted:
            if all(len(ways[way].get(seed, ())) == steps for way in WAYS):
                continue
            for way, row in curves(model, int(seed), steps).items():
                ways[way][seed] = row
                console.print(f"{model}, seed {seed}, {way}: {final(row):.4f}", markup=False)
            if output is not None:
                write_text(output, json.dumps({"environment": where, "losses": found}, indent=1) + "\n")
    found = {model: {way: {seed: found[model][way][seed] for seed in wanted} for way in WAYS} for model in models}
    text = table(found)
    console.print(text, markup=False)
    if readme:
        draw(found, README.with_name("curves.svg"))
        replace_table(README, "curves", f"{steps} steps; {where}.\n\n{PICTURE}\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
