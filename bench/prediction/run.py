"""How well is a step predicted? The 15 measured runs of OPT-350 on 1 to 32 GH200 nodes, from profile and plan alone.

python -m bench.prediction.run [--data FOLDER] [--json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.prediction.deepspeed import deepspeed_on_gh200
from bench.prediction.runs import DEVICES_PER_NODE, FOLDER, Run, read_runs
from hetpipe.cli import main
from hetpipe.cluster import Cluster, RuntimeOverhead
from hetpipe.importers import ImportOptions, import_published
from hetpipe.profiles import Profile
from hetpipe.simulator import simulate

console = Console()
GB = 1e9


def predict(run: Run, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Predicted against measured, with relative errors (predicted / measured − 1)."""
    timeline = simulate(run.plan(), profile, cluster)
    peak = max(timeline.peak_bytes.values())
    return {
        "run": run.name,
        "measured_seconds": run.seconds,
        "predicted_seconds": timeline.step_seconds,
        "pipeline_seconds": timeline.pipeline_seconds,
        "gradient_sync_seconds": timeline.sync_seconds,
        "optimizer_seconds": timeline.optimizer_seconds,
        "time_error": timeline.step_seconds / run.seconds - 1,
        "measured_bytes": run.peak_bytes,
        "predicted_bytes": peak,
        "memory_error": peak / run.peak_bytes - 1,
    }


def predict_all(folder: Path, overhead: RuntimeOverhead) -> list[dict[str, Any]]:
    """All rows, in the order of the file."""
    found = []
    for run in read_runs(folder / "measured_opt350_gh200.csv"):
        options = ImportOptions(model="OPT-350", nodes=f"{run.nodes}xGH-96x{DEVICES_PER_NODE}")
        profile, cluster = import_published("sailor", [folder], options)
        assert cluster is not None
        found.append(predict(run, profile, cluster.model_copy(update={"runtime_overhead": overhead})))
    return found


def mean_error(rows: list[dict[str, Any]], key: str) -> float:
    """Mean absolute relative error."""
    return fmean(abs(row[key]) for row in rows)


def table(rows: list[dict[str, Any]]) -> Table:
    """Row by row; the last one is the mean absolute error."""
    found = Table("run", title="OPT-350 on GH200 nodes: measured, and predicted from profile and plan alone")
    for column in (
        "measured s",
        "predicted s",
        "pipeline",
        "sync",
        "error",
        "measured GB",
        "predicted GB",
        "error",
    ):
        found.add_column(column, justify="right")
    for row in rows:
        found.add_row(
            row["run"], f"{row['measured_seconds']:.3f}", f"{row['predicted_seconds']:.3f}", f"{row['pipeline_seconds']:.3f}",
            f"{row['gradient_sync_seconds']:.3f}", f"{row['time_error']:+.1%}", f"{row['measured_bytes'] / GB:.2f}",
            f"{row['predicted_bytes'] / GB:.2f}", f"{row['memory_error']:+.1%}",
        )  # fmt: skip
    found.add_section()
    found.add_row(
        "mean absolute error",
        "",
        "",
        "",
        "",
        f"{mean_error(rows, 'time_error'):.1%}",
        "",
        "",
        f"{mean_error(rows, 'memory_error'):.1%}",
    )
    return found


def run(
    data: Annotated[
        Path, typer.Option(help="Folder with Sailor's published files and the measured runs.")
    ] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the table, and the errors without each part of the runtime's section."""
    whole = deepspeed_on_gh200()
    rows = predict_all(data, whole)
    parts = {"nothing but profile and plan (the defaults)": RuntimeOverhead()}
    defaults = RuntimeOverhead()
    for name in RuntimeOverhead.model_fields:
        if getattr(whole, name) != getattr(defaults, name):
            parts[f"without {name}"] = whole.model_copy(update={name: getattr(defaults, name)})
    ablation = {name: predict_all(data, overhead) for name, overhead in parts.items()}
    if as_json:
        sys.stdout.write(json.dumps({"rows": rows, "runtime_overhead": whole.model_dump()}, indent=1) + "\n")
        return
    console.print(table(rows))
    less = Table("runtime_overhead", title="What each part is worth: mean absolute errors")
    less.add_column("time", justify="right")
    less.add_column("memory", justify="right")
    for name, found in {"all of it": rows, **ablation}.items():
        less.add_row(
            name, f"{mean_error(found, 'time_error'):.1%}", f"{mean_error(found, 'memory_error'):.1%}"
        )
    console.print(less)
    console.print(f"runtime_overhead: {whole.model_dump()}")


if __name__ == "__main__":
    main(lambda: typer.run(run))
