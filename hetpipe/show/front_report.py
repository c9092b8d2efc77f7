"""A front as text and as a picture: a table for the terminal, a CSV with FASOP's columns, a chart (SVG, PNG)."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetpipe.files.units import human_seconds
from hetpipe.planning.front import Front, Row, Status, nodes_text
from hetpipe.show.picture.file import check_picture, write_picture
from hetpipe.show.picture.front import front_canvas

# The first thirteen are FASOP's, with its spelling ("step/s" holds seconds per step); "/" separates the values of replicas
# that differ.
COLUMNS = (
    "mbs",
    "tp",
    "dp",
    "pp",
    "node placement",
    "partition",
    "estimated time (step/s)",
    "pipeline time",
    "DP all-reduce time",
    "embedding layer all-reduce time",
    "price_per_step",
    "is_oom",
    "oom_gpumem",
    "status",
    "on_front",
    "optimizer time",
    "price_per_hour",
    "price_per_million_samples",
    "lower_bound_seconds",
    "gap",
    "missing_bytes",
    "reason",
)
_STYLES = {"planned": "", "dominated": "dim", "infeasible": "red", "excluded": "dim", "unknown": "yellow"}
_MOST_OTHERS = 12


def front_csv(front: Front) -> str:
    """Every sub-cluster as a line. `oom_gpumem` is the peak of the fullest device in GB; of a line that is out of memory, what
    the stage needs that does not fit, where that is known (`missing_bytes` of it are not there, and `reason` says more).
    Price per step is that of all nodes of the line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in front.rows:
        writer.writerow(_line(row))
    return text.getvalue()


def _line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {
        "node placement": str([name for name, count in row.nodes.items() for _ in range(count)]),
        "is_oom": row.status == "infeasible",
        "status": row.status,
        "on_front": row.on_front,
        "price_per_hour": row.price_per_hour,
        "lower_bound_seconds": row.lower_bound_seconds,
        "oom_gpumem": None if row.needed_bytes is None else row.needed_bytes / 1e9,
        "missing_bytes": row.missing_bytes,
        "reason": row.reason,
    }
    plan = row.plan
    if plan is None:
        return line
    return line | {
        "mbs": _several(plan.microbatch_sizes),
        "tp": _several(plan.tensor_parallel),
        "dp": plan.replicas,
        "pp": _several(plan.stages),
        "partition": "; ".join(f"{count} x [{layers.replace('-', ', ')}]" for layers, count in plan.partitions.items()),
        "estimated time (step/s)": plan.step_seconds,
        "pipeline time": plan.pipeline_seconds,
        "DP all-reduce time": plan.gradient_sync_seconds - plan.embedding_sync_seconds,
        "embedding layer all-reduce time": plan.embedding_sync_seconds,
        "price_per_step": row.price_per_hour / 3600 * plan.step_seconds,
        "oom_gpumem": plan.peak_bytes / 1e9,
        "optimizer time": plan.optimizer_seconds,
        "price_per_million_samples": plan.price_per_million_samples,
        "gap": plan.gap,
    }


def _several(values: Sequence[int]) -> str:
    return "/".join(map(str, values))


def front_table(front: Front) -> RenderableType:
    """The front, fastest first, then how the other sub-clusters were ruled out, the nearest ones by name."""
    table = Table(title=f"{front.model}, {front.global_batch} samples a step: price against time")
    for name in ("nodes", "price/h", "step", "price/1M samples", "gap", "micro-batch", "layers of the stages"):
        table.add_column(name, justify="left" if name in ("nodes", "layers of the stages") else "right")
    for row in front.front:
        assert row.plan is not None
        table.add_row(
            nodes_text(row.nodes),
            f"{row.price_per_hour:.2f}",
            human_seconds(row.plan.step_seconds),
            f"{row.plan.price_per_million_samples:.2f}",
            "unknown" if row.plan.gap is None else f"{row.plan.gap:.1%}",
            _several(row.plan.microbatch_sizes),
            _shape(row),
        )
    counts = Counter(row.status for row in front.rows if not row.on_front)
    said = [text.format(count) for status, text in _SUMMARIES.items() if (count := counts[status])]
    lines = [Text(f"{len(front.rows)} sub-clusters: {len(front.front)} on the front, {', '.join(said) or 'no other'}")]
    return Group(table, *lines, *_notes(front))


_SUMMARIES: dict[Status, str] = {
    "planned": "{} planned but beaten",
    "dominated": "{} ruled out by their bounds",
    "infeasible": "{} out of memory",
    "excluded": "{} over a limit",
    "unknown": "{} not planned in time",
}


def _notes(front: Front) -> list[Text]:
    """Why sub-clusters have no plan: each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in front.rows:
        if row.status in ("infeasible", "unknown") and row.reason:
            reasons.setdefault((row.status, row.reason), []).append(nodes_text(row.nodes))
    lines = []
    for (status, reason), names in list(reasons.items())[:_MOST_OTHERS]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(Text(f"{', '.join(names[:3])}{more}: {reason}", style=_STYLES[status]))
    left = len(reasons) - len(lines)
    return [*lines, Text(f"and {left} more reasons, in the JSON")] if left > 0 else lines


def _shape(row: Row) -> str:
    """Replicas by their stages: `12 × 13-12 + 2 × 25`."""
    assert row.plan is not None
    shown = [f"{count} × {layers}" for layers, count in list(row.plan.partitions.items())[:3]]
    more = " + …" if len(row.plan.partitions) > 3 else ""
    return " + ".join(shown) + more


def draw_front(front: Front, path: str | Path) -> None:
    """Seconds per step against price per million samples: the front, what lost, and lower bounds of what was not planned.
    Written as SVG or PNG by the file's ending."""
    check_picture(path, ".svg", ".png")
    write_picture(path, front_canvas(front, alone=True))
