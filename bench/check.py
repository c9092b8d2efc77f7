"""Are the ratios that a bench found those that are kept beside it?

    python -m bench.check build/bench/throughput.json build/bench/overhead.json [--tolerance 0.15] [--keep]

A file of the name NAME.json is compared with bench/NAME/kept.json, as far as both have the same ratios. Those of names such as
"gpt on A: x over y" and "bert on B: x over y" by their geometric mean, "x over y": single rows vary with the plans that rules
choose from what was measured. Seconds are never compared, since they are those of a machine. The exit code is 1 where one is
off by more than the tolerance, or where nothing can be compared. `--keep` puts what was found into kept.json instead, after a
change that is meant to change it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.tables import geometric_mean
from hetpipe.cli.exits import main
from hetpipe.files.messages import InputError
from hetpipe.files.writing import write_text

HERE = Path(__file__).parent
console = Console(width=160)


def read(path: Path) -> dict[str, Any]:
    """A bench's results, with their ratios by name; InputError if it is no such file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        found["ratios"] = {name: float(value) for name, value in found["ratios"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} does not hold a bench's ratios ({why}); the bench's --json or -o writes them") from None
    return found


def means(found: dict[str, float], kept: dict[str, float]) -> dict[str, tuple[float, float]]:
    """(found, kept) of the ratios of both: of each name without its row the geometric means."""
    alike = dict[str, list[str]]()
    for name in found:
        if name in kept:
            alike.setdefault(name.partition(": ")[2] or name, []).append(name)
    return {of: (mean([found[name] for name in names]), mean([kept[name] for name in names])) for of, names in alike.items()}


def mean(values: Sequence[float]) -> float:
    """The geometric one; NaN where one is no ratio."""
    return geometric_mean(values) if all(value > 0 for value in values) else math.nan


def check(
    files: Annotated[list[Path], typer.Argument(help="What benches wrote: NAME.json of bench/NAME.")],
    tolerance: Annotated[float, typer.Option(min=0, help="By which part a ratio may be off.")] = 0.15,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what was found.")] = False,
) -> None:
    """Compare, and say what is off."""
    wrong = 0
    for file in files:
        found, path = read(file), HERE / file.stem / "kept.json"
        if keep:
            write_text(path, json.dumps({key: found[key] for key in ("environment", "ratios")}, indent=1) + "\n")
            console.print(f"{file.stem}: {len(found['ratios'])} ratios are kept")
            continue
        kept = read(path)
        compared = means(found["ratios"], kept["ratios"])
        apart = {name: pair for name, pair in compared.items() if not abs(pair[0] / pair[1] - 1) <= tolerance}
        within = f"{len(compared) - len(apart)} of {len(compared)} ratios"
        console.print(f"{file.stem}: {within} are within {tolerance:.0%} of those kept")
        for name, (now, then) in apart.items():
            console.print(f"  {name}: {now:.3f}, kept {then:.3f}", markup=False)
        wrong += len(apart) + (not compared)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    main(lambda: typer.run(check))
