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

from bench.prediction.deepspeed import HBM3_BYTES_PER_SECOND, deepspeed_on_gh200
from bench.prediction.earlier import earlier_runs
from bench.prediction.gpt_neo import GPT_NEO_RUNS
from bench.prediction.predicted import DEFAULTS, System, mean_error, predict_all
from bench.prediction.runs import Run, read_runs
from bench.prediction.vtrain import predict_from_zorse, predict_pipelines
from bench.tables import markdown
from hetpipe.building.datasets import data_folder, find_data
from hetpipe.cli.commands import main
from hetpipe.documents.cluster import RuntimeOverhead

console = Console()
GB = 1e9
COLUMNS = ("run", "measured s", "predicted s", "pipeline", "sync", "error", "measured GB", "predicted GB", "error")
BOTH = ("time_error", "memory_error")


def show(title: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table under its title."""
    console.print(f"{title}\n\n{markdown(names, lines)}", markup=False, soft_wrap=True)


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Row by row; the last one is the mean absolute error."""
    lines = [
        [
            row["run"],
            *(f"{row[f'{key}_seconds']:.3f}" for key in ("measured", "predicted", "pipeline", "gradient_sync")),
            f"{row['time_error']:+.1%}",
            *(f"{row[f'{key}_bytes'] / GB:.2f}" for key in ("measured", "predicted")),
            f"{row['memory_error']:+.1%}",
        ]
        for row in rows
    ]
    time, memory = (f"{mean_error(rows, key):.1%}" for key in BOTH)
    show(title, COLUMNS, [*lines, ["mean absolute error", "", "", "", "", time, "", "", memory]])


def beside(title: str, plain: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Errors of time and memory: with nothing but the defaults, and with what was measured of the framework."""
    pairs = zip(plain, rows, strict=True)
    lines = [[one["run"], *(f"{row[key]:+.1%}" for key in BOTH for row in (one, other))] for one, other in pairs]
    means = [f"{mean_error(part, key):.1%}" for key in BOTH for part in (plain, rows)]
    names = ("run", "time: defaults", "measured", "memory: defaults", "measured")
    show(title, names, [*lines, ["mean absolute error", *means]])


def second_table(rows: list[dict[str, Any]], pipelines: list[dict[str, Any]]) -> None:
    """Errors by micro-batch size: of all runs from others' layers, and of those with a pipeline from those without."""
    lines = []
    for b in (*sorted({row["microbatch"] for row in rows}), None):
        cells = []
        for kept in ([row for row in part if b in (None, row["microbatch"])] for part in (rows, pipelines)):
            mean = fmean(row["time_error"] for row in kept)
            cells += [str(len(kept)), f"{mean_error(kept, 'time_error'):.1%}", f"{mean:+.1%}"]
        lines.append(["all" if b is None else str(b), *cells])
    names = ("micro-batch", "runs", "from Zorse's layer", "mean", "pipelines", "from runs without", "mean")
    show("vTrain's runs on A100: mean absolute error, and the mean", names, lines)


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


def known_table(parts: dict[str, Sequence[Run]], data: Path) -> None:
    """Mean absolute errors of time."""
    lines = [
        [name, *(f"{mean_error(predict_all(runs, data, system), 'time_error'):.1%}" for runs in parts.values())]
        for name, system in known_unmeasured().items()
    ]
    show("What could be known without measuring: mean absolute errors of time", ["", *parts], lines)


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
    table("OPT-350 on GH200 nodes: measured, and predicted from profile and plan alone", rows)
    beside("OPT-350 on GH200 nodes: errors with the defaults, and with measured overheads", plain, rows)
    known_table({"OPT-350": runs, "measured earlier": earlier_runs(runs), "GPT-Neo": GPT_NEO_RUNS}, data)
    neo = predict_all(GPT_NEO_RUNS, data, DEFAULTS)
    beside("GPT-Neo-2.7B: the same", neo, others)
    without = {"all of it": rows} | {name: predict_all(runs, data, part) for name, part in parts_of(system).items()}
    lines = [[name, *(f"{mean_error(found, key):.1%}" for key in BOTH)] for name, found in without.items()]
    show("What each part is worth: mean absolute errors", ("", "time", "memory"), lines)
    table("The same plans, measured earlier", earlier)
    table("GPT-Neo-2.7B: the runs that device_bytes and both slowdowns were measured on", others)
    if second[0]:
        second_table(*second)
    console.print(taken)


if __name__ == "__main__":
    main(lambda: typer.run(run))
