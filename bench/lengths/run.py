"""Samples of unequal lengths: padded to the longest of all, to a few sizes, or packed into rows. How many tokens a second?

    python -m bench.lengths.run [--steps N] [--rounds N] [-o lengths.json] [--readme]

Lengths are drawn so that prompts and answers have the published means and deviations of instruction data (Alpaca: 19.67 ± 15.19
and 64.51 ± 64.85 tokens; Yan et al. 2025, arXiv 2512.17843, table 1), each log-normal.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

from bench.tables import environment, markdown, replace_table
from hetpipe.building.datasets import DataSplits
from hetpipe.building.lengths import size_shares
from hetpipe.cli.exits import main
from hetpipe.files.writing import check_output, write_text
from hetpipe.language.samples import IGNORED, Packed, Padded, Sequences, default_sizes
from hetpipe.processes.progress import Activity
from hetpipe.spec.job import Job
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank

README = Path(__file__).parent / "README.md"
TURNS = ((19.67, 15.19), (64.51, 64.85))  # mean and deviation of a prompt's tokens, and of an answer's
SAMPLES, WORDS, MOST, BATCH = 2000, 512, 512, 16
WAYS = {"longest": "padded to the longest of all", "sizes": "padded to a few sizes", "packed": "packed into rows"}
MODEL = {
    "name": "causal_lm",
    "args": {
        "type": "qwen3",
        "vocab_size": WORDS,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
CLUSTER = {
    "format": "hetpipe.cluster/1",
    "link": {"bandwidth": "1 GB/s", "latency": "100 us"},
    "device_types": {
        kind: {"memory": "4 GiB", "emulate": {"slowdown": slowdown}} for kind, slowdown in (("fast", 4.0), ("slow", 10.0))
    },
    "nodes": [{"name": "n0", "devices": {"fast": 1}}, {"name": "n1", "devices": {"slow": 2}}],
}
console = Console(width=200)


def lengths() -> torch.Tensor:
    """Of the samples, at most MOST: int64 [SAMPLES]."""
    draw, total = torch.Generator().manual_seed(0), torch.zeros(SAMPLES)
    for mean, deviation in TURNS:
        spread = math.log(1 + (deviation / mean) ** 2)
        total += torch.exp(math.log(mean) - spread / 2 + math.sqrt(spread) * torch.randn(SAMPLES, generator=draw))
    return total.round().long().clamp(2, MOST)


def chats(way: str) -> DataSplits:
    """Tokens that count up, of such lengths."""
    own = lengths()
    tokens = torch.cat([torch.arange(int(length)) % WORDS for length in own]).int()
    targets, train = tokens.roll(-1), None
    targets[own.cumsum(0) - 1] = IGNORED
    samples = Sequences(tokens, targets, own)
    if way == "packed":
        train = Packed(samples, MOST, 0)
    else:
        train = Padded(samples, [int(own.max())] if way == "longest" else default_sizes(own), 0)  # type: ignore[assignment]
    return DataSplits(train=train, names=("input_ids", "position_ids")[: 1 + (way == "packed")])  # type: ignore[arg-type]


def job_of(way: str, folder: Path, steps: int) -> Job:
    """A job in which a step has about as many tokens, whichever way."""
    per_row = MOST / float(lengths().float().mean()) if way == "packed" else 1.0
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    return Job.parse(
        {
            "format": "hetpipe.job/1",
            "cluster": str(folder / "cluster.json"),
            "model": MODEL,
            "data": {"target": "bench.lengths.run:chats", "args": {"way": way}},
            "loss": {"name": "cross_entropy", "weight": "tokens"},
            "profiler": {"microbatch_sizes": [1, 2, 4], "repeats": 3, "cache": str(folder / "cache")},
            "train": {
                "global_batch": max(1, round(BATCH / per_row)),
                "steps": steps,
                "evaluate_samples": 0,
                "optimizer": {"name": "AdamW", "lr": 1e-4},
            },
        },
        way,
    )


class Way(NamedTuple):
    """What came of one: tokens of samples in a step, in the mean; which part of its tensors is padding; seconds of a step,
    predicted, and measured in each round; the part of the time by which emulated devices were late."""

    tokens: float
    padding: float
    predicted: float
    seconds: list[float]
    late: float


def measured(way: str, steps: int, rounds: int) -> Way:
    """Run one."""
    data, own = chats(way).train, lengths()
    with tempfile.TemporaryDirectory() as name:
        job = job_of(way, Path(name), steps)
        batch: Any = job.train.global_batch
        if isinstance(data, Packed):
            tokens, cells = float(own.sum()) / len(data) * batch, float(MOST * batch)
        else:
            assert isinstance(data, Padded)
            shares = size_shares(data, job.train)
            tokens, cells = float(own.float().mean()) * batch, batch * sum(size * share for size, share in shares.items())
        seconds, results = list[float](), list[TrainResult]()
        for _ in range(rounds):
            result = run_everywhere(job, train_rank)
            assert isinstance(result, TrainResult)
            seconds.append(fmean(result.steady_seconds))
            results.append(result)
        assert results[0].predicted is not None
        late = max(result.overrun_fraction for result in results)
        return Way(tokens, 1 - tokens / cells, results[0].predicted.step_seconds, seconds, late)


def table(found: dict[str, Way]) -> str:
    """A row for each way; rates beside that of the first."""
    rows, first = list[list[str]](), 0.0
    for name, way in found.items():
        middle = sorted(way.seconds)[len(way.seconds) // 2]
        rate = way.tokens / middle
        first = first or rate
        rows.append(
            [
                WAYS[name],
                f"{way.padding:.0%}",
                f"{way.tokens:,.0f}",
                f"{way.predicted:.3f}",
                f"{middle:.3f}",
                f"{min(way.seconds):.3f} – {max(way.seconds):.3f}",
                f"{rate:,.0f}",
                f"{rate / first:.2f}",
            ]
        )
    header = [
        "samples are",
        "padding",
        "tokens a step",
        "predicted, s a step",
        "measured, s a step",
        "of all rounds",
        "tokens a second",
        "times the first",
    ]
    return markdown(header, rows)


def bench(
    steps: Annotated[int, typer.Option(min=10, help="Of each run.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, one after the other.")] = 3,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all numbers as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Train the same model on the same samples, each way."""
    if output is not None:
        check_output(output)
    found = dict[str, Way]()
    with Activity("measuring ways", len(WAYS)) as activity:
        for way in WAYS:
            found[way] = measured(way, steps, rounds)
            activity.advance(WAYS[way])
    text = table(found)
    console.print(text, markup=False, soft_wrap=True)
    worst = max(way.late for way in found.values())
    if output is not None:
        write_text(output, json.dumps({name: way._asdict() for name, way in found.items()}, indent=1) + "\n")
    if readme:
        replace_table(README, "ways", f"{environment()} Emulated devices were late by at most {worst:.1%} of a step.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
