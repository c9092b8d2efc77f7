"""How well is a step predicted? The 15 measured runs of OPT-350 on 1 to 32 GH200 nodes, from profile and plan alone; and runs
that others measured.

python -m bench.prediction.run [--data FOLDER] [--json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.prediction.deepspeed import HBM3_BYTES_PER_SECOND, deepspeed_on_gh200
from bench.prediction.earlier import earlier_runs
from bench.prediction.gpt_neo import GPT_NEO_RUNS
from bench.prediction.predicted import DEFAULTS, System, mean_error, predict_all
from bench.prediction.runs import Run, read_runs
from bench.prediction.vtrain import predict_from_zorse, predict_pipelines
from hetpipe.building.datasets import data_folder, find_data
from hetpipe.cli.commands import main
from hetpipe.spec.cluster import RuntimeOverhead

console = Console()
GB = 1e9
COLUMNS = ("measured s", "predicted s", "pipeline", "sync", "error", "measured GB", "predicted GB", "error")


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Row by row; the last one is the mean absolute error."""
    found = Table("run", title=title)
    for column in COLUMNS:
        found.add_column(column, justify="right")
    for row in rows:
        found.add_row(
            row["run"],
            f"{row['measured_seconds']:.3f}",
            f"{row['predicted_seconds']:.3f}",
            f"{row['pipeline_seconds']:.3f}",
            f"{row['gradient_sync_seconds']:.3f}",
            f"{row['time_error']:+.1%}",
            f"{row['measured_bytes'] / GB:.2f}",
            f"{row['predicted_bytes'] / GB:.2f}",
            f"{row['memory_error']:+.1%}",
        )
    found.add_section()
    means = [f"{mean_error(rows, key):.1%}" for key in ("time_error", "memory_error")]
    found.add_row("mean absolute error", "", "", "", "", means[0], "", "", means[1])
    return found


def beside(title: str, plain: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Table:
    """Errors of time and memory: with nothing but the defaults, and with what was measured of the framework."""
    found = Table("run", title=title)
    for column in ("time: defaults", "measured", "memory: defaults", "measured"):
        found.add_column(column, justify="right")
    for one, other in zip(plain, rows, strict=True):
        found.add_row(one["run"], *(f"{row[key]:+.1%}" for key in ("time_error", "memory_error") for row in (one, other)))
    found.add_section()
    means = (f"{mean_error(part, key):.1%}" for key in ("time_error", "memory_error") for part in (plain, rows))
    found.add_row("mean absolute error", *means)
    return found


def second_table(rows: list[dict[str, Any]], pipelines: list[dict[str, Any]]) -> Table:
    """Errors by micro-batch size: of all runs from others' layers, and of those with a pipeline from those without."""
    found = Table("micro-batch", title="vTrain's runs on A100: mean absolute error, and the mean")
    for name in ("runs", "from Zorse's layer", "mean", "pipelines", "from runs without", "mean"):
        found.add_column(name, justify="right")
    for b in (*sorted({row["microbatch"] for row in rows}), None):
        cells = []
        for kept in ([row for row in part if b in (None, row["microbatch"])] for part in (rows, pipelines)):
            mean = fmean(row["time_error"] for row in kept)
            cells += [str(len(kept)), f"{mean_error(kept, 'time_error'):.1%}", f"{mean:+.1%}"]
        found.add_row("all" if b is None else str(b), *cells)
    return found


def parts_of(system: System) -> dict[str, System]:
    """The system without each of its parts: one value set back to its default."""
    defaults = System()
    found = {"nothing but profile and plan": defaults}
    for name in ("slowdown", "sums_slowdown", "memory_rate"):
        found[f"without {name}"] = system._replace(**{name: getattr(defaults, name)})
    for name in RuntimeOverhead.model_fields:
        default = getattr(defaults.overhead, name)
        if getattr(system.overhead, name) != default:
            less = system.overhead.model_copy(update={name: default})
            found[f"without {name}"] = system._replace(overhead=less)
    return found


def known_unmeasured() -> dict[str, System]:
    """The defaults, and with them what a data sheet and the engine's source say of time."""
    blocking = RuntimeOverhead(overlap_transfers=False)
    added = DEFAULTS._replace(memory_rate=HBM3_BYTES_PER_SECOND)
    return {
        "the defaults": DEFAULTS,
        "and gradients are added up, at the data sheet's rate": added,
        "and transfers block, as in DeepSpeed": DEFAULTS._replace(overhead=blocking),
        "and both": added._replace(overhead=blocking),
    }


def known_table(parts: dict[str, Sequence[Run]], data: Path) -> Table:
    """Mean absolute errors of time."""
    found = Table("", title="What could be known without measuring: mean absolute errors of time")
    for name in parts:
        found.add_column(name, justify="right")
    for name, system in known_unmeasured().items():
        found.add_row(name, *(f"{mean_error(predict_all(runs, data, system), 'time_error'):.1%}" for runs in parts.values()))
    return found


def run(
    data: Annotated[
        Path | None, typer.Option(help="Folder with Sailor's published files and the measured runs; else HETPIPE_DATA's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the table, the errors without each part, an earlier measurement, and the runs that three parts come from."""
    data = data if data is not None else data_folder("sailor", "give --data")
    runs, system = read_runs(data / "measured_opt350_gh200.csv"), deepspeed_on_gh200(data)
    rows, others = predict_all(runs, data, system), predict_all(GPT_NEO_RUNS, data, system)
    plain = predict_all(runs, data, DEFAULTS)
    earlier = predict_all(earlier_runs(runs), data, system)
    taken = {**system._asdict(), "overhead": system.overhead.model_dump()}
    zorse = find_data("zorse")
    second = (predict_from_zorse(zorse), predict_pipelines(zorse)) if zorse is not None else ([], [])
    if as_json:
        told = {"rows": rows, "default_rows": plain, "earlier_rows": earlier, "gpt_neo_rows": others}
        told |= {"vtrain_rows": second[0], "vtrain_pipeline_rows": second[1], **taken}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return
    console.print(table("OPT-350 on GH200 nodes: measured, and predicted from profile and plan alone", rows))
    console.print(beside("OPT-350 on GH200 nodes: errors with the defaults, and with measured overheads", plain, rows))
    console.print(known_table({"OPT-350": runs, "measured earlier": earlier_runs(runs), "GPT-Neo": GPT_NEO_RUNS}, data))
    neo = predict_all(GPT_NEO_RUNS, data, DEFAULTS)
    console.print(beside("GPT-Neo-2.7B: the same", neo, others))
    less = Table("", title="What each part is worth: mean absolute errors")
    less.add_column("time", justify="right")
    less.add_column("memory", justify="right")
    for name, part in {"all of it": system, **parts_of(system)}.items():
        found = rows if part is system else predict_all(runs, data, part)
        less.add_row(name, f"{mean_error(found, 'time_error'):.1%}", f"{mean_error(found, 'memory_error'):.1%}")
    console.print(less)
    console.print(table("The same plans, measured earlier", earlier))
    console.print(table("GPT-Neo-2.7B: the runs that device_bytes and both slowdowns were measured on", others))
    if second[0]:
        console.print(second_table(*second))
    console.print(taken)


if __name__ == "__main__":
    main(lambda: typer.run(run))
