"""A folder of seven billion random parameters on four ranks, with LoRA over a base in 4 bits: what does each hold when it has
loaded its layers, and how long does that take?

    python -m bench.adapters.memory [--folder FOLDER] [--readme]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.causal_lms.memory import loaded, table
from bench.tables import replace_table
from hetpipe.cli.exits import main

README = Path(__file__).parent / "README.md"
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
CUTS = ([0, 12], [12, 20], [20, 28], [28, 34])  # of the embedding, 32 blocks and the head
console = Console()


def bench(
    folder: Annotated[Path | None, typer.Option(help="Where the weights are, or are to be written (14 GB).")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Write the folder, load it on four ranks, and tell what each holds."""
    text = table(loaded(folder, "llama", LLAMA, CUTS, {"r": 16, "base": "nf4"}))
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(README, "memory", text)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
