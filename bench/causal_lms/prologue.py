"""What a stage computes once for all of its layers, masks and rotary angles, beside one of its layers: how long does it take?

python -m bench.causal_lms.prologue [--rounds N] [--readme]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import typer
from rich.console import Console
from torch import Tensor

from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main
from hetpipe.hf.replay.layers import Block
from hetpipe.layers.device import one_thread
from hetpipe.layers.recipe import layer_on
from hetpipe.planning import registry

README = Path(__file__).parent / "README.md"
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
TYPES = ("qwen3", "gemma3_text")  # all layers alike; windows in all but some
LENGTHS = (2048, 8192)
GIVEN = {"nothing": (), "a mask of padding": ("attention_mask",), "positions of packed samples": ("position_ids",)}
PACKED = 500  # tokens of a sample in a row
console = Console()


def beside(extras: tuple[str, ...], tokens: int) -> dict[str, Tensor]:
    """What comes beside the features of one row."""
    mask = torch.ones(1, tokens, dtype=torch.bool)
    mask[:, -tokens // 8 :] = False
    known = {"attention_mask": mask, "position_ids": (torch.arange(tokens) % PACKED)[None]}
    return {name: known[name] for name in extras}


def seconds(action: Callable[[], object], rounds: int) -> list[float]:
    """Of each round, sorted; one before them warms up."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return sorted(found[1:])


def rows_of(kind: str, rounds: int) -> list[list[str]]:
    """The rows of the table of one type."""
    rows = []
    device = torch.device("cpu")
    for what, extras in GIVEN.items():
        layers = registry.model("causal_lm")(type=kind, extras=list(extras), **SIZES)
        with layer_on(layers, layers[1], device) as block, torch.no_grad():
            assert isinstance(block, Block)
            assert block.number is not None
            for tokens in LENGTHS:
                hidden, given = torch.randn(1, tokens, SIZES["hidden_size"]), beside(extras, tokens)
                with block.ready() as skeleton:
                    once = seconds(partial(skeleton.calls, hidden, given), rounds)
                    call = skeleton.calls(hidden, given)[block.number]
                layer = seconds(partial(call.on, block.layer, hidden), max(1, rounds // 3))
                spread = f"{once[0] * 1e3:.1f} – {once[-1] * 1e3:.1f}"
                rows.append(
                    [
                        f"`{kind}`",
                        what,
                        f"{tokens:,}",
                        f"{median(once) * 1e3:.1f}",
                        spread,
                        f"{median(layer) * 1e3:,.0f}",
                        f"{median(once) / median(layer):.1%}",
                    ]
                )
                console.print(*rows[-1], markup=False)
    return rows


def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 9,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Time both on one thread."""
    transformers.logging.set_verbosity_error()
    where = environment()
    with one_thread(torch.device("cpu")):
        rows = [row for kind in TYPES for row in rows_of(kind, rounds)]
    header = [
        "type",
        "beside tokens",
        "tokens",
        "once a stage and micro-batch, ms (median)",
        "of all rounds",
        "forward of a layer, ms",
        "share",
    ]
    text = markdown(header, rows, words=2)
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "prologue", f"{where}.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
