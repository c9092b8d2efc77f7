"""How many tokens a second does LoRA train on cards that are not alike, beside what people do with them today?

python -m bench.finetune.run [--quick] [--only "3090 + 3060"] [--seconds S] [--rounds N] [-o all.json] [--readme]
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import typer
from rich.console import Console

from bench.finetune.cards import CLUSTERS, LARGE, NAMES, SMALL, memory, times
from bench.finetune.figures import draw, means, ratios, tables
from bench.finetune.ways import OURS, plans_of
from bench.tables import chosen, environment, replace_table
from bench.throughput.clusters import Mix, cluster_document
from bench.throughput.run import Ran, steps_of, trained
from hetpipe.cli.exits import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_output, write_text
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.training.runlog import WARMUP_STEPS
from hetpipe.training.start import profile_everywhere

README = Path(__file__).parent / "README.md"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "finetune.svg"
BATCH, LENGTH, WORDS = 16, 128, 512
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16}
QUICK = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8}
EQUAL = 1e-5  # by which part a loss may be off that was summed in another order
console = Console(width=160)


def job_of(document: dict[str, Any], folder: Path, quick: bool) -> Job:
    """LoRA on this cluster, whose file is put into the folder."""
    Cluster.parse(document, "the bench's cluster").save(folder / "cluster.json")
    sizes = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_attention_heads": 4} | (QUICK if quick else SIZES)
    job = {
        "format": "hetpipe.job/1",
        "cluster": str(folder / "cluster.json"),
        "model": {"name": "causal_lm", "args": {"type": "llama", "extras": [], **sizes}},
        "adapter": {"r": 8},
        "data": {"target": "bench.causal_lms.jobs:tokens", "args": {"words": WORDS, "samples": 512, "length": LENGTH}},
        "loss": {"name": "cross_entropy", "weight": "tokens"},
        "profiler": {"microbatch_sizes": [1, 2, 4], "repeats": 5, "cache": str(folder / "cache")},
        "train": {"global_batch": BATCH, "steps": WARMUP_STEPS, "optimizer": {"name": "AdamW", "lr": 1e-2}},
    }
    return Job.parse(job, "the bench's job")


def losses_apart(runs: dict[str, list[Ran]], equal: float = EQUAL) -> float:
    """The greatest relative distance of a loss from that of hetpipe's plan at that step. RuntimeError if it is no rounding."""
    truth = runs[OURS][0].losses
    pairs = [(way, a, b) for way, found in runs.items() for run in found for a, b in zip(run.losses, truth, strict=False)]
    apart, way = max((abs(a - b) / abs(b), way) for way, a, b in pairs)
    if not apart <= equal:
        raise RuntimeError(f"{way!r} trains something else: a loss is {apart:.1e} off, more than {equal:.0e}")
    return apart


def compare(mix: Mix, case: str, job: Job, profile: Profile, seconds: float, rounds: int) -> dict[str, Any]:
    """All ways on one cluster."""
    cluster = job.read_cluster()
    assert cluster is not None
    with Activity(f"{mix.name}: planning"):
        plans = plans_of(profile, cluster, BATCH)
    steps = {way: steps_of(plan, seconds) for way, plan in plans.items()}
    ranks = start_ranks(trained, (job, plans, steps, profile, rounds), cluster.devices, modules_of(job))
    runs = {way: run for found in ranks for way, run in found.items()}
    ours = plans[OURS].predicted
    assert ours is not None and ours.fluid_bound_seconds is not None
    return {
        "cluster": mix.name,
        "case": case,
        "cards": {device.id: (device.type, cluster.type_of(device.id).memory) for device in cluster.devices},
        "fluid_tokens_per_second": BATCH * LENGTH / ours.fluid_bound_seconds,
        "losses_apart": losses_apart(runs),
        "ways": {way: row_of(runs[way]) for way in plans},
        "plan": plans[OURS].model_dump(mode="json")["replicas"],
    }


def row_of(runs: list[Ran]) -> dict[str, Any]:
    """One way's figures: tokens per second of each round by its median step, and the most bytes of each card."""
    speeds = [BATCH * LENGTH / median(run.seconds) for run in runs]
    return {
        "rounds": speeds,
        "tokens_per_second": median(speeds),
        "predicted_tokens_per_second": BATCH * LENGTH / runs[0].predicted,
        "peak_bytes": {device: max(run.peaks[device][0] for run in runs) for device in runs[0].peaks},
        "overrun_fraction": max(run.overrun for run in runs),
    }


def both_cases(mix: Mix, seconds: float, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """The model on one cluster: measured once, then with room on each card, and with too little on each."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-finetune-") as name:
        job = job_of(cluster_document(mix, times=times(mix)), Path(name), quick)
        profile, cluster = profile_everywhere(job), job.read_cluster()
        assert profile is not None and cluster is not None
        rows = []
        for case in (SMALL, LARGE):
            job = job_of(cluster_document(mix, memory(mix, case, profile, cluster, BATCH), times(mix)), Path(name), quick)
            rows.append(compare(mix, case, job, profile, seconds, rounds))
            console.print(tables(rows[-1:]).splitlines()[2], markup=False, soft_wrap=True)
    return rows


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round, the first cluster.")] = False,
    only: Annotated[str, typer.Option(help="Clusters, with commas between them.")] = ",".join(NAMES),
    seconds: Annotated[float, typer.Option(min=0.001, help="That a run's steps take at least, without the first two.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")] = 3,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put tables and picture into the documentation.")] = False,
) -> None:
    """Measure, plan and train every way on every cluster."""
    where, rows = environment(), list[dict[str, Any]]()
    if output is not None:
        check_output(output)
    names = chosen("--only", only, NAMES)
    rounds, seconds, names = (1, 0.5, names[:1]) if quick else (rounds, seconds, names)
    for mix in CLUSTERS:
        rows += both_cases(mix, seconds, rounds, quick) if mix.name in names else []
        if output is not None and rows:
            document = {"environment": where, "summary": means(rows), "ratios": ratios(rows), "rows": rows}
            write_text(output, json.dumps(document, indent=1) + "\n")
    text = tables(rows)
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        draw(rows, PICTURE)
        replace_table(README, "table", f"{where}. Rounds: {rounds}.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
