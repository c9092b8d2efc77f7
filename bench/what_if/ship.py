"""The measurements that come with hetpipe, made of the files that the authors of Zorse and Cephalo published.

    python -m bench.what_if.ship [FOLDER] [-o hetpipe/whatif/zorse.json]

FOLDER holds model_latencies.json, model_stats.json and LICENSE; by default it is `zorse` in the folder that the environment
variable HETPIPE_DATA names. Kept are the language models whose sizes are published, at micro-batches of 1, 2, 4, … samples and
the most that were measured, in four digits. Where both implementations of a model were measured on a card, the one called
"deepspeed" is kept; what only the other has is filled in. Left out are image models, as how many tokens they had is not said,
and gpt_test, whose times are 20 times as long as its size explains.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hetpipe.building.datasets import data_folder
from hetpipe.cli.commands import main
from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.transformer import Cell
from hetpipe.exchange.importers.zorse import DTYPES, read_cell, read_sizes
from hetpipe.files.formats import read_mapping
from hetpipe.files.writing import write_text
from hetpipe.whatif.cards import known_cards
from hetpipe.whatif.shipped import MeasuredLayers, MeasuredModel

ROOM = Path(__file__).resolve().parents[2] / "hetpipe" / "whatif"
DEEPSPEED, VOCABULARY = "deepspeed", 49152  # with which the published totals of parameters were counted
LICENCE = "zorse-LICENSE.txt"


def name_of(model: str) -> str:
    """What people call it: llama-7b for deepspeedllama_7b."""
    return model.removeprefix(DEEPSPEED).replace("_", "-")


def thinned(cell: Cell) -> Cell:
    """At powers of two and the most samples only; seconds in four digits."""
    last = len(cell.sizes) - 1
    rows = [i for i, b in enumerate(cell.sizes) if i == last or b & (b - 1) == 0]
    forward, backward = (tuple(float(f"{times[i]:.4g}") for i in rows) for times in cell[1:])
    return Cell(tuple(cell.sizes[i] for i in rows), forward, backward)


def published(folder: Path) -> MeasuredLayers:
    """The files of Zorse's layout in the format that is shipped."""
    times, stats = read_mapping(folder / "model_latencies.json"), read_mapping(folder / "model_stats.json")
    models = {}
    for known in stats:
        own = [model for model in (known, known.removeprefix(DEEPSPEED)) if model in times]
        if not own or "vit" in known or "test" in known:
            continue
        sizes = read_sizes(stats[known], ImportOptions(model=known, vocabulary=VOCABULARY))
        cells: dict[str, Any] = {}
        for model in own:
            for card, tokens, dtype, cell in _cells(times[model]):
                of_card = cells.setdefault(known_cards().find(card), {}).setdefault(tokens, {})
                of_card.setdefault(DTYPES[dtype], thinned(read_cell(cell, f"{model}: {card}, {tokens} tokens, {dtype}")))
        models[name_of(known)] = MeasuredModel(
            hidden_size=sizes.hidden,
            layers=sizes.layers,
            layer_parameters=sizes.layer_parameters,
            embedding_parameters=sizes.embedding_parameters,
            head_parameters=sizes.head_parameters,
            vocabulary=VOCABULARY,
            cells=cells,
        )
    return MeasuredLayers(
        format="hetpipe.measured_layers/1",
        source="Zorse (Guo et al. 2025, arXiv 2507.10392, github.com/benson-guo/zorse) and Cephalo (ICS '25, arXiv 2411.01075)",
        licence=f"MIT, {LICENCE}",
        models=models,
    )


def _cells(cards: dict[str, Any]) -> Iterator[tuple[str, int, str, Any]]:
    for card, lengths in cards.items():
        for tokens, dtypes in lengths.items():
            for dtype, cell in dtypes.items():
                yield card, int(tokens), dtype, cell


def run(
    folder: Annotated[Path | None, typer.Argument(help="The published files.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write.")] = ROOM / "zorse.json",
) -> None:
    """Write the measurements, and their licence beside them."""
    source = folder if folder is not None else data_folder("zorse", "download its planner's measurements")
    made = published(source)
    write_text(output, json.dumps(made.model_dump(mode="json"), separators=(",", ":")) + "\n")
    shutil.copyfile(source / "LICENSE", output.with_name(LICENCE))
    print(f"{len(made.models)} models, {output.stat().st_size} bytes: {output}")


if __name__ == "__main__":
    main(lambda: typer.run(run))
