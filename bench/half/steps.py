"""Is a step in a precision for each device predicted as it is measured? On emulated devices whose slowdowns differ by precision.

python -m bench.half.steps [--models gpt,bert] [--only TEXT] [--steps N] [--rounds N] [-o steps.json] [--resume]
                            [--readme]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

from bench.tables import environment, markdown, replace_table
from bench.throughput.run import Ran, prepared, trained
from hetpipe.cli.exits import main
from hetpipe.files.messages import InputError, nearest
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import check_output, write_text
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.job import Job
from hetpipe.spec.number_types import Precision
from hetpipe.spec.plan import Plan
from hetpipe.spec.precisions import PrecisionChoice
from hetpipe.spec.profile import Profile
from hetpipe.training.runlog import WARMUP_STEPS

README = Path(__file__).parent / "README.md"
# Milliseconds of a layer of bert-large forward in float32 (512 tokens, one sample more), how many times as long that takes as in
# fp16, and GiB: measured by Zorse's authors on each card (model_latencies.json of github.com/benson-guo/zorse; Guo et al. 2025,
# arXiv 2507.10392). bf16 stands in for fp16 here.
CARDS = {"v100": (1.19, 6.0, 16), "t4": (3.70, 5.6, 16), "p40": (3.28, 1.06, 24)}
PROCESSORS = 0.3  # of two, that the devices of a cluster use together where each computes in what is fastest on it
AMPLE, BATCH = 2 * 2**30, 24
CHOICES: dict[str, PrecisionChoice] = {"fp32": "fp32", "bf16 for all": "bf16", "auto": "auto"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"name": "gpt", "args": {"layers": 3, "width": 128, "heads": 4, "context": 64}},
        "data": {"name": "text", "args": {"context": 64, "limit_bytes": 400000}},
    },
    "bert": {
        "model": {
            "name": "bert",
            "args": {
                "hidden_size": 128,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 512,
                "vocab_size": 2000,
                "max_position_embeddings": 64,
                "num_labels": 8,
            },
        },
        "data": {"name": "source_packages", "args": {"length": 64, "vocabulary": 2000, "samples": 400}},
    },
}
console = Console(width=200)


class Mix(NamedTuple):
    """A cluster: its nodes as {card: how many}. `tight`: the whole model does not fit the smallest card."""

    name: str
    nodes: Sequence[dict[str, int]]
    tight: bool = False

    @property
    def cards(self) -> list[str]:
        return [card for node in self.nodes for card, count in node.items() for _ in range(count)]


MIXES = (
    Mix("V100 + 2×P40", ({"v100": 1, "p40": 2},)),
    Mix("2×T4 | 2×P40", ({"t4": 2}, {"p40": 2})),
    Mix("V100 + P40, small memory", ({"v100": 1, "p40": 1},), tight=True),
)


def slowdowns(cards: Sequence[str]) -> dict[str, dict[Precision, float]]:
    """Of each card by precision: as they are to each other, and such that all together use `PROCESSORS` of this machine."""
    fastest = {card: CARDS[card][0] / CARDS[card][1] for card in cards}
    base = sum(1 / fastest[card] for card in cards) / PROCESSORS
    return {c: {"fp32": round(base * CARDS[c][0], 2), "bf16": round(base * fastest[c], 2)} for c in dict.fromkeys(cards)}


def cluster_document(mix: Mix, memory: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The cluster of emulated devices. `memory`: bytes of each card; by default ample."""
    types = {
        card: {"memory": (memory or {}).get(card, AMPLE), "emulate": {"slowdown": slowdown}}
        for card, slowdown in slowdowns(mix.cards).items()
    }
    nodes = [{"name": f"n{i}", "devices": node} for i, node in enumerate(mix.nodes)]
    return {"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}


def tight_memory(mix: Mix, whole_bytes: int) -> dict[str, int]:
    """Of each card: the smallest holds two thirds of the model with one sample, the others as much more as they really do."""
    least = min(CARDS[card][2] for card in mix.cards)
    return {card: round(whole_bytes * 2 / 3 * CARDS[card][2] / least) for card in mix.cards}


def job_of(model: str, mix: Mix, folder: Path, memory: Mapping[str, int] | None = None) -> Job:
    """The job, and its cluster file in the folder."""
    Cluster.parse(cluster_document(mix, memory), mix.name).save(folder / "cluster.json")
    document = {
        "format": "hetpipe.job/1",
        "cluster": str(folder / "cluster.json"),
        **MODELS[model],
        "profiler": {"microbatch_sizes": [1, 2, 4], "repeats": 5, "cache": str(folder / "cache")},
        "train": {
            "global_batch": BATCH,
            "steps": WARMUP_STEPS,
            "evaluate_samples": 0,
            "precision": "auto",
            "optimizer": {"name": "AdamW", "lr": 1e-4},
        },
    }
    return Job.parse(document, f"{model} on {mix.name}")


def plans_of(profile: Profile, cluster: Cluster) -> dict[str, Plan]:
    """The plan of each choice of precisions; none where nothing fits."""
    plans = dict[str, Plan]()
    for name, choice in CHOICES.items():
        try:
            plans[name] = make_plan(profile, cluster, BATCH, precision=choice)
        except PartitionError as error:
            console.print(f"{name}: {error}", markup=False)
    return plans


def gains(profile: Profile) -> dict[str, float]:
    """Of each device type how many times as long a micro-batch of the whole model takes in fp32 as in bf16."""
    found: dict[str, dict[Precision | None, float]] = {}
    for measurement in profile.measurements:
        seconds = float((measurement.forward + measurement.backward).sum(axis=1)[-1])
        found.setdefault(measurement.device_type, {})[measurement.precision] = seconds
    return {kind: of["fp32"] / of["bf16"] for kind, of in found.items()}


def measured(model: str, mix: Mix, steps: int, rounds: int) -> dict[str, Any]:
    """All plans of a cluster, trained in turn by the same ranks."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-half-") as name:
        folder = Path(name)
        job, profile, cluster = prepared(
            lambda memory: job_of(model, mix, folder, memory), (lambda whole: tight_memory(mix, whole)) if mix.tight else None
        )
        with Activity(f"{model} on {mix.name}: planning"):
            plans = plans_of(profile, cluster)
        counts = dict.fromkeys(plans, WARMUP_STEPS + steps)
        runs = start_ranks(trained, (job, plans, counts, profile, rounds), cluster.devices, modules_of(job))
    ran = {choice: run for found in runs for choice, run in found.items()}
    return {
        "model": model,
        "cluster": mix.name,
        "slowdowns": slowdowns(mix.cards),
        "gains": gains(profile),
        "plans": {choice: row_of(plans[choice], ran[choice]) for choice in plans},
    }


def row_of(plan: Plan, runs: Sequence[Ran]) -> dict[str, Any]:
    """What came out of one plan: quartiles of all its steps; of each device (measured, predicted) peak bytes."""
    low, middle, high = np.quantile([s for run in runs for s in run.seconds], [0.25, 0.5, 0.75]).tolist()
    stages = [
        " → ".join(f"{stage.device}: {stage.layers[1] - stage.layers[0]}" for stage in replica.stages)
        for replica in plan.replicas
    ]
    return {
        "precision": plan.precision,
        "predicted_seconds": runs[0].predicted,
        "step_seconds": middle,
        "quartiles": [low, high],
        "overrun_fraction": max(run.overrun for run in runs),
        "peaks": runs[-1].peaks,
        "layers": ", ".join(stages),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line of each plan."""
    lines = []
    for row in rows:
        for choice, found in row["plans"].items():
            step, (low, high) = found["step_seconds"], found["quartiles"]
            off = [predicted / real - 1 for real, predicted in found["peaks"].values() if real]
            most = max(real for real, _ in found["peaks"].values())
            lines.append(
                [
                    row["model"],
                    row["cluster"],
                    choice,
                    ", ".join(f"{k} {p}" for k, p in found["precision"].items()),
                    f"{found['predicted_seconds']:.3f}",
                    f"{step:.3f} ({low:.3f} to {high:.3f})",
                    f"{found['predicted_seconds'] / step - 1:+.1%}",
                    human_bytes(most),
                    f"{min(off):+.1%} to {max(off):+.1%}",
                    f"{found['overrun_fraction']:.1%}",
                    f"{row['plans']['fp32']['step_seconds'] / step:.2f}" if "fp32" in row["plans"] else "–",
                ]
            )
    names = [
        "model",
        "cluster",
        "precision",
        "which is",
        "predicted, s",
        "measured, s (quartiles)",
        "error of seconds",
        "most bytes of a device",
        "error of bytes, all devices",
        "overrun",
        "times as fast as fp32",
    ]
    return markdown(names, lines, words=4)


def accuracy(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean and worst absolute error of seconds and of peak bytes, and the greatest overrun."""
    plans = [found for row in rows for found in row["plans"].values()]
    seconds = [abs(found["predicted_seconds"] / found["step_seconds"] - 1) for found in plans]
    peaks = [abs(predicted / real - 1) for found in plans for real, predicted in found["peaks"].values() if real]
    return {
        "seconds_mean_error": sum(seconds) / len(seconds),
        "seconds_worst_error": max(seconds),
        "bytes_mean_error": sum(peaks) / len(peaks),
        "bytes_worst_error": max(peaks),
        "most_overrun": max(found["overrun_fraction"] for found in plans),
    }


def texts(rows: Sequence[dict[str, Any]]) -> str:
    """The table, what is over all of its lines, and what each type gains."""
    over = markdown(["over all lines", "figure"], [[k.replace("_", " "), f"{x:.2%}"] for k, x in accuracy(rows).items()])
    told = [
        f"{row['model']} on {row['cluster']}: " + ", ".join(f"{kind} {gain:.2f}" for kind, gain in row["gains"].items())
        for row in rows
    ]
    return f"{table(rows)}\n{over}\nTime of the model in fp32 over bf16, as measured:\n\n" + "\n".join(f"- {x}" for x in told)


def bench(
    models: Annotated[str, typer.Option(help="Names, with commas between them.")] = ",".join(MODELS),
    only: Annotated[str, typer.Option(help="Only clusters whose name has this.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run that count; two come before them.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each plan, in turn.")] = 2,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the output file has already.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Measure, plan in each precision, train, and say how far predictions are off."""
    if output is not None:
        check_output(output)
    rows, where = list[dict[str, Any]](), environment()
    if output is not None and resume and output.exists():
        before = json.loads(output.read_text("utf-8"))
        rows, where = before["rows"], before["environment"]
    for model in (name.strip() for name in models.split(",")):
        if model not in MODELS:
            raise InputError(f"--models: unknown value {model!r}{nearest(model, list(MODELS))}")
        for mix in MIXES:
            there = any((row["model"], row["cluster"]) == (model, mix.name) for row in rows)
            if only.lower() in mix.name.lower() and not there:
                rows.append(measured(model, mix, steps, rounds))
                console.print(table(rows[-1:]), markup=False)
                if output is not None:
                    write_text(output, json.dumps({"environment": where, "accuracy": accuracy(rows), "rows": rows}, indent=1))
    console.print(texts(rows), markup=False)
    if readme:
        replace_table(README, "steps", f"{where}.\n\n{texts(rows)}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
