"""Cross-entropy over a large vocabulary, with and without all of its logits: memory and seconds.

python -m bench.fused_loss.run [--rounds N] [--readme]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from bench.beside import NEW, OLD, by_turns, checkouts, in_words
from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main
from hetpipe.layers.losses.chunked import CHUNK, token_losses
from hetpipe.processes.progress import Activity

README = Path(__file__).parent / "README.md"
WORDS, TOKENS = 151_936, 1024
WIDTHS = (512, 1024)
console = Console(width=200)


def plain(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Of all logits."""
    return nn.functional.cross_entropy(features @ weight.T, labels, reduction="sum")


def chunked(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """hetpipe's."""
    return token_losses(features, weight, None, labels)[0].sum()


def of_torch(reduction: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's own, in chunks."""

    def loss(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        return nn.functional.linear_cross_entropy(features, weight, labels, reduction=reduction, options=options).sum()

    return loss


WAYS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "plain": ("all logits at once", plain),
    "chunked": ("`fused: true`", chunked),
    "torch": ("torch's `linear_cross_entropy`, of each token", of_torch("none")),
    "torch-sum": ("torch's, their sum", of_torch("sum")),
}


def measured(way: str, width: int, trained: bool, rounds: int) -> dict[str, Any]:
    """In this process: seconds of each round, and bytes at most beyond those before."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(TOKENS, width, generator=draw).requires_grad_()
    weight = torch.randn(WORDS, width, generator=draw).mul_(0.02).requires_grad_(trained)
    labels = torch.randint(WORDS, (TOKENS,), generator=draw)
    loss, seconds = WAYS[way][1], list[float]()
    before = _kib("VmRSS")
    for _ in range(rounds + 1):
        features.grad = weight.grad = None
        began = time.perf_counter()
        loss(features, weight, labels).backward()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[1:], "bytes": (_kib("VmHWM") - before) * 1024}


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def beside_before(rounds: int) -> str:
    """Return a table of hetpipe's loss by the earlier commit and by this one, in turns."""
    lines = list[list[str]]()
    with checkouts() as folders:
        for width in WIDTHS:
            for kind in ("trained", "frozen"):
                found = by_turns(Path(__file__).with_name("worker.py"), [str(width), kind], folders, rounds)
                lines.append([f"{width:,}", kind, *(in_words([one["step"] for one in found[name]]) for name in (OLD, NEW))])
    return markdown(["width", "weight is", OLD, NEW], lines, words=2)


def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Of each way; one before them warms up.")] = 3,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
    one: Annotated[str, typer.Option(hidden=True, help="Measure this in this process.")] = "",
) -> None:
    """Run each way in a process of its own."""
    if one:
        own = one.split(",")
        sys.stdout.write(json.dumps(measured(own[0], int(own[1]), own[2] == "trained", rounds)) + "\n")
        return
    where, rows = environment(), list[list[str]]()
    cases = [(width, kind, way) for width in WIDTHS for kind in ("trained", "frozen") for way in WAYS]
    with Activity("measuring", len(cases)) as activity:
        for width, kind, way in cases:
            command = [sys.executable, "-m", "bench.fused_loss.run", "--rounds", str(rounds), "--one", f"{way},{width},{kind}"]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            seconds = sorted(found["seconds"])
            rows.append(
                [
                    f"{width:,}",
                    kind,
                    WAYS[way][0],
                    f"{found['bytes'] / 2**20:,.0f}",
                    f"{median(seconds):.1f}",
                    f"{seconds[0]:.1f} – {seconds[-1]:.1f}",
                ]
            )
            activity.advance(f"{WAYS[way][0]}, width {width}, weight {kind}")
    text = markdown(["width", "weight is", "loss", "MiB more at most", "seconds (median)", "of all rounds"], rows, words=3)
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "losses", f"{where}.\n\n{text}")
    text = beside_before(rounds)
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "before", text)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
