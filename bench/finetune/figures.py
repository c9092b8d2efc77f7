"""What was measured, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from bench.beside import in_words
from bench.finetune.ways import ALIKE, ONE, ORDER, OURS
from bench.tables import geometric_mean, markdown

MIB = 2**20
GAINED = ("hetpipe's plan: layers, samples", "times as fast as the best of the others", "possible")
Row = dict[str, Any]


def others(row: Row, without: Sequence[str] = ()) -> dict[str, float]:
    """Tokens per second of the other ways that ran."""
    return {way: found["tokens_per_second"] for way, found in row["ways"].items() if way not in (OURS, *without)}


def gains(row: Row, without: Sequence[str] = ()) -> list[float]:
    """Round by round, how many times as fast hetpipe is as the best of the others."""
    found = others(row, without)
    best = max(found, key=found.__getitem__)
    return [a / b for a, b in zip(row["ways"][OURS]["rounds"], row["ways"][best]["rounds"], strict=True)]


def possible(row: Row) -> float:
    """How many times as fast as the best of the others all cards together would be, were work as divisible as water."""
    return float(row["fluid_tokens_per_second"] / max(others(row).values()))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the geometric means over all rows of how many times as fast hetpipe is."""
    beside = {"the best of all others": (), f"the best without {ALIKE!r}": (ALIKE,), "the best that uses all cards": (ALIKE, ONE)}
    found = {name: geometric_mean([median(gains(row, without)) for row in rows]) for name, without in beside.items()}
    return found | {"the best of all others, if work were water": geometric_mean([*map(possible, rows)])}


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """How many times as fast hetpipe is as each other way, by name."""
    named = [(f"{row['case']} on {row['cluster']}", row["ways"][OURS]["tokens_per_second"], row) for row in rows]
    return {f"{name}: hetpipe over {way}": ours / speed for name, ours, row in named for way, speed in others(row).items()}


def missing(row: Row, way: str) -> str:
    """Why a way did not run."""
    kinds = [kind for kind, _ in row["cards"].values()]
    return "–" if way == ALIKE and kinds.count(kinds[0]) == 1 else "no room"


def memory(row: Row, way: str) -> str:
    """List the most bytes that a way took on each card, beside those that the card has."""
    peaks = row["ways"][way]["peak_bytes"]
    return ", ".join(f"{kind} {peaks.get(card, 0) / MIB:.0f} of {size / MIB:.0f}" for card, (kind, size) in row["cards"].items())


def plan(row: Row) -> str:
    """hetpipe's plan in words: the layers of each stage, and the samples of each replica."""

    def words(stage: Row) -> str:
        lo, hi = stage["layers"]
        return f"{hi - lo} on {row['cards'][stage['devices'][0]][0]}{' recomputed' * stage['recompute']}"

    return "; ".join(f"{' → '.join(map(words, r['stages']))}: {sum(r['microbatch_sizes'])}" for r in row["plan"])


def tables(rows: Sequence[Row]) -> str:
    """Speeds; gains and what holds for all; memory."""
    names = [[row["cluster"], row["case"]] for row in rows]
    cells = [[in_words(row["ways"][w]["rounds"], ".0f") if w in row["ways"] else missing(row, w) for w in ORDER] for row in rows]
    gained = [[plan(row), in_words(gains(row)), f"{possible(row):.2f}"] for row in rows]
    held = [[*name, way, memory(row, way)] for name, row in zip(names, rows, strict=True) for way in ORDER if way in row["ways"]]
    off = [w["predicted_tokens_per_second"] / w["tokens_per_second"] - 1 for row in rows for w in row["ways"].values()]
    late = max(way["overrun_fraction"] for row in rows for way in row["ways"].values())
    apart = max(row["losses_apart"] for row in rows)
    over = [[f"over {name}", f"{mean:.2f}"] for name, mean in means(rows).items()]
    parts = [
        markdown(["cluster", "model", *ORDER], [a + b for a, b in zip(names, cells, strict=True)], words=2),
        markdown(["cluster", "model", *GAINED], [a + b for a, b in zip(names, gained, strict=True)], words=3),
        markdown(["geometric means", "times as fast"], over),
        f"The losses of all ways are equal to {apart:.0e} of them. Emulated cards were late by at most {late:.1%} of a step.",
        f"Predicted speeds are {min(off):+.1%} to {max(off):+.1%} off.\n",
        markdown(["cluster", "model", "way", "MiB of each card, at most, of what it has"], held, words=4),
    ]
    return "\n".join(parts)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A column a cluster, a row a case, a bar a way."""
    clusters, cases = (list(dict.fromkeys(row[key] for row in rows)) for key in ("cluster", "case"))
    size = (3 * len(clusters) + 1.2, 1.7 * len(cases) + 0.3)
    figure, panels = plt.subplots(len(cases), len(clusters), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for row in rows:
        bars(panels[cases.index(row["case"])][clusters.index(row["cluster"])], row)
    panels[0][0].invert_yaxis()  # of all, which share it
    for panel in panels[-1]:
        panel.set_xlabel("tokens/s", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(panel: Any, row: Row) -> None:
    """One cluster: hetpipe's bar in colour, with how many times as fast it is as the best of the others."""
    best = max(found["tokens_per_second"] for found in row["ways"].values())
    for place, way in enumerate(ORDER):
        value = row["ways"][way]["tokens_per_second"] if way in row["ways"] else 0.0
        colour, weight = ("#1a7f5a", "bold") if way == OURS else ("#b8bec6", "normal")
        text = f"{value:.0f}" if value else missing(row, way)
        text += f"   {median(gains(row)):.2f} ×" if way == OURS else ""
        panel.barh(place, value, color=colour, height=0.72)
        panel.text(value + 0.02 * best, place, text, va="center", fontsize=7, weight=weight)
    panel.set(xlim=(0, 1.36 * best))
    panel.set_title(f"{row['cluster']}, model {row['case']}", fontsize=8)
    panel.set_yticks(range(len(ORDER)), ORDER, fontsize=7)
    panel.tick_params(axis="x", labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
