"""What does it take to have chats as tokens, at the first start and at the next? See README.md beside this file.

python -m bench.token_file.run [--rounds N] [--readme]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.beside import BEFORE, NEW, OLD, by_turns, checkouts, in_words
from bench.tables import environment, markdown, replace_table

HERE = Path(__file__).parent
SIZES, RANKS, STARTS = (400, 20_000), (1, 4), ("first", "next")
NAMES = ["chats", "ranks", "start", "which", "processor seconds of all ranks", "wall seconds", "MiB of a rank's own"]


def main(
    rounds: Annotated[int, typer.Option(help="Turns of each.")] = 3,
    readme: Annotated[bool, typer.Option(help="Write the table into README.md.")] = False,
) -> None:
    """Print the table of README.md."""
    where, rows = environment(), list[list[str]]()
    with checkouts() as folders, tempfile.TemporaryDirectory(prefix="hetpipe-chats-") as folder:
        for count, ranks in ((count, ranks) for count in SIZES for ranks in RANKS):
            for start in STARTS:
                found = by_turns(HERE / "worker.py", [folder, str(count), str(ranks), start], folders, rounds)
                for which in (OLD, NEW):
                    cells = [
                        in_words([each[f"data {what}"] for each in found[which]])
                        for what in ("processor seconds", "wall seconds")
                    ]
                    memory = in_words([each["data bytes"] / 2**20 for each in found[which]], ".0f")
                    rows.append([f"{count:,}", str(ranks), start, which, *cells, memory])
                    print(rows[-1], flush=True)
    text = f"{where}. Before: {BEFORE}. Rounds: {rounds}.\n\n{markdown(NAMES, rows, words=4)}"
    print(text)
    if readme:
        replace_table(HERE / "README.md", "starts", text)


if __name__ == "__main__":
    typer.run(main)
