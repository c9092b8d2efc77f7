"""What does planning a precision of each device type gain over one for all?

    python -m bench.precision.run [--only TEXT] [--markdown table.md]

Needs `zorse` in the folder that the environment variable HETPIPE_DATA names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from bench.partitioners.clusters import Case, cluster
from bench.partitioners.zorse_profiles import PREFIX, imported, thinned
from bench.tables import geometric_mean, markdown
from hetpipe.building.datasets import data_folder
from hetpipe.cli.commands import main
from hetpipe.documents.number_types import Precision
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import write_text
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan

console = Console(width=160)

# NVIDIA's compute capability: 6 Pascal, 7.0 Volta, 7.5 Turing, 8.0 and 8.6 Ampere, 8.9 Ada, 9 Hopper. bf16 from 8 on.
CAPABILITY = {
    "p100": 6.0,
    "p40": 6.1,
    "v100x16": 7.0,
    "v100x32": 7.0,
    "t4": 7.5,
    "a100x40": 8.0,
    "a6000": 8.6,
    "a10g": 8.6,
    "l4": 8.9,
    "h100-nvl": 9.0,
}
POLICIES = ("fp32 for all", "fp16 for all", "bf16, else fp32", "one for each", "auto")


def precision_of(policy: str, kind: str) -> Precision | None:
    """What a policy computes in on a device type; None leaves it to the profile."""
    capability = CAPABILITY[kind]
    if policy == "one for each":
        return "fp32" if capability < 7 else "fp16" if capability < 8 else "bf16"
    if policy == "bf16, else fp32":
        return "bf16" if capability >= 8 else "fp32"
    return None if policy == "auto" else "fp16" if policy == "fp16 for all" else "fp32"


CASES = [
    Case("2×a6000 + 2×p40", f"{PREFIX}deepspeedgpt_1.3b", 64, [({"a6000": 2, "p40": 2}, "pcie3")]),
    Case("2×a6000 + 2×p40", f"{PREFIX}deepspeedgpt_2.7b", 64, [({"a6000": 2, "p40": 2}, "pcie3")]),
    Case("2×l4 + 1×a6000 + 1×p40", f"{PREFIX}deepspeedllama_tiny", 128, [({"l4": 2, "a6000": 1, "p40": 1}, "pcie3")]),
    Case("2×v100x16 | 2×p100", f"{PREFIX}deepspeedgpt_2.7b", 64, [({"v100x16": 2}, "nvlink2"), ({"p100": 2}, "pcie3")]),
    Case("2×v100x16 | 4×t4", f"{PREFIX}deepspeedgpt_2.7b", 64, [({"v100x16": 2}, "nvlink2"), ({"t4": 4}, "pcie3")], 25),
    Case("2×a10g | 4×t4", f"{PREFIX}deepspeedllama_3b", 64, [({"a10g": 2}, "pcie4"), ({"t4": 4}, "pcie3")], 25),
    Case(
        "2×a100x40 | 4×t4 | 2×p100",
        f"{PREFIX}deepspeedllama_3b",
        64,
        [({"a100x40": 2}, "nvlink3"), ({"t4": 4}, "pcie3"), ({"p100": 2}, "pcie3")],
        25,
    ),
    Case(
        "2×a6000 | 2×v100x16 | 2×p40",
        f"{PREFIX}deepspeedgpt_6.7b",
        64,
        [({"a6000": 2}, "pcie4"), ({"v100x16": 2}, "nvlink2"), ({"p40": 2}, "pcie3")],
        25,
    ),
    Case(
        "4×a100x40 | 4×v100x16",
        f"{PREFIX}deepspeedllama_7b",
        128,
        [({"a100x40": 4}, "nvlink3"), ({"v100x16": 4}, "nvlink2")],
        100,
    ),
    Case("4×a100x40 | 4×p40", f"{PREFIX}deepspeedllama_7b", 128, [({"a100x40": 4}, "nvlink3"), ({"p40": 4}, "pcie3")], 25),
    Case(
        "2×h100-nvl | 4×t4 | 2×p40",
        f"{PREFIX}deepspeedllama_7b",
        128,
        [({"h100-nvl": 2}, "nvlink3"), ({"t4": 4}, "pcie3"), ({"p40": 2}, "pcie3")],
        25,
    ),
]


class Row(NamedTuple):
    """Seconds a step under each policy; None where nothing fits."""

    case: Case
    seconds: dict[str, float | None]

    def gain(self, policy: str) -> float | None:
        """How many times as long a policy takes as a precision for each."""
        own, best = self.seconds[policy], self.seconds["one for each"]
        return None if own is None or best is None else own / best


def profile_of(case: Case, folder: Path) -> Profile:
    """The measured precisions of the cluster's devices, and bf16 where a device has it, which was not measured, with the
    times of fp16: the same rate by NVIDIA's data sheets."""
    whole = imported(case.model.removeprefix(PREFIX), folder)
    own = [thinned(m) for m in whole.measurements if m.device_type in case.types]
    new = [m.model_copy(update={"precision": "bf16"}) for m in own if m.precision == "fp16" and CAPABILITY[m.device_type] >= 8]
    return whole.model_copy(update={"measurements": (*own, *new)})


def run_case(case: Case, folder: Path) -> Row:
    """Each policy's plan by `auto`, simulated."""
    profile, machines, seconds = profile_of(case, folder), cluster(case), dict[str, float | None]()
    for policy in POLICIES:
        chosen = {kind: precision for kind in case.types if (precision := precision_of(policy, kind)) is not None}
        try:
            plan = make_plan(profile, machines, case.batch, precision=chosen or "auto")
        except PartitionError:
            seconds[policy] = None
        else:
            assert plan.predicted is not None
            seconds[policy] = plan.predicted.step_seconds
    return Row(case, seconds)


def cells(row: Row) -> list[str]:
    """A row of the table."""
    best = row.seconds["one for each"]
    gains = [(row.gain(policy), policy) for policy in POLICIES if policy != "one for each"]
    return [
        row.case.name,
        row.case.model.removeprefix(PREFIX),
        str(row.case.batch),
        "–" if best is None else f"{best:.2f}",
        *("–" if gain is None else f"{gain:.2f}" for gain, _ in gains),
    ]


HEADS = ("cluster", "model", "batch", "one for each, s", *(policy for policy in POLICIES if policy != "one for each"))


def means(rows: list[Row]) -> list[str]:
    """Geometric means over the clusters where something fits."""
    found = []
    for policy in HEADS[4:]:
        gains = [gain for row in rows if (gain := row.gain(policy)) is not None]
        found.append(f"{geometric_mean(gains):.2f}" if gains else "–")
    return ["geometric mean", "", "", "", *found]


def run(
    only: Annotated[str, typer.Option(help="Only clusters whose name or model has this.")] = "",
    table_file: Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown.")] = None,
) -> None:
    """Plan every cluster under every policy."""
    folder = data_folder("zorse", "download its planner's measurements")
    rows = []
    for case in CASES:
        if only in case.name or only in case.model:
            rows.append(run_case(case, folder))
            console.print(" ".join(cells(rows[-1])), markup=False)
    table = markdown(HEADS, [*map(cells, rows), means(rows)], words=2)
    console.print(table, markup=False)
    if table_file is not None:
        write_text(table_file, table)


if __name__ == "__main__":
    main(lambda: typer.run(run))
