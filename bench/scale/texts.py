"""The tables of `run.py`, with the exponents by which figures grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression

import numpy as np
from scipy.optimize import nnls

from bench.scale.jobs import Row
from bench.scale.starting import PHASES
from bench.tables import markdown
from hetpipe.files.messages import counted

SPELT = {"microbatches": "micro-batches", "layers": "layers"}


LAST = 3  # sizes, of which exponents are taken


def exponent(points: Sequence[tuple[float, float]], last: int = LAST) -> float:
    """Of the power that fits the last (size, value) best; NaN of fewer than two that are above 0."""
    logs = [(math.log(size), math.log(value)) for size, value in points[-last:] if value > 0]
    return linear_regression(*zip(*logs, strict=True)).slope if len(logs) > 1 else math.nan


def growth(rows: Sequence[Row], by: str, of: str, last: int = LAST, **fixed: int) -> float:
    """The exponent with which one column grows by another, of the rows that have these values."""
    return exponent([(row[by], row[of]) for row in rows if all(row[key] == value for key, value in fixed.items())], last)


def planning_text(rows: Sequence[Row]) -> str:
    """Its table, and how it grows."""
    names = ["devices", "types", "layers", "seconds", "peak MB", "gap", "replicas", "most stages"]
    text = markdown(
        names,
        [
            [
                f"{r['devices']:,}",
                str(r["types"]),
                str(r["layers"]),
                f"{r['seconds']:.2f}",
                f"{r['peak_bytes'] / 1e6:.0f}",
                f"{r['gap']:.1%}",
                str(r["replicas"]),
                str(r["stages"]),
            ]
            for r in rows
        ],
        words=0,
    )
    kinds = list(dict.fromkeys((row["types"], row["layers"]) for row in rows))
    grown = []
    for t, L in kinds:
        powers = [growth(rows, "devices", of, last, types=t, layers=L) for of in ("seconds", "peak_bytes") for last in (LAST, 2)]
        grown.append([f"{t} types, {L} layers", *(f"{power:.2f}" for power in powers)])
    names = ["exponent", "seconds, last three sizes", "last two", "peak memory, last three", "last two"]
    return f"{text}\n{markdown(names, grown)}"


def starting_text(rows: Sequence[Row]) -> str:
    """A column a number of ranks."""
    told = {**PHASES, "in all": "**until the first step is done**"}
    body = [[what, *(f"{row[key]:.3f}" for row in rows), f"{growth(rows, 'ranks', key):.2f}"] for key, what in told.items()]
    return markdown(["seconds", *(counted(row["ranks"], "rank") for row in rows), "exponent"], body)


def ranks_text(rows: Sequence[Row]) -> str:
    """A column a number of devices."""
    keys = [key for key in rows[0] if key != "devices"]
    body = [[key, *(f"{1e3 * row[key]:.3g}" for row in rows), f"{growth(rows, 'devices', key):.2f}"] for key in keys]
    return markdown(["ms", *(f"{row['devices']:,}" for row in rows), "exponent"], body)


def steps_text(rows: Sequence[Row]) -> str:
    """Per forward or backward of a micro-batch; of the simulation, of a stage."""
    body = []
    for r in rows:
        actions = 2 * r["microbatches"]
        body.append(
            [
                str(r["layers"]),
                str(r["microbatches"]),
                f"{1e3 * r['loop']:.2f}",
                f"{1e3 * r['engine']:.2f}",
                f"{1e6 * r['extra'] / actions:.1f}",
                f"{1e6 * r['simulate'] / actions / r['layers']:.2f}",
            ]
        )
    names = ["layers", "micro-batches", "ms of the loop", "of the engine", "µs more an action", "µs an action simulated"]
    step, layer, action, both = fitted(rows)
    each = f"{step:.0f} µs a step, {layer:.1f} µs a layer, {action:.1f} µs an action, {both:.2f} µs a layer of an action"
    fit = f"Engine less loop, fitted: {each}."
    return f"{markdown(names, body, words=0)}\n{fit}\n\n{steps_growth(rows)}"


def fitted(rows: Sequence[Row]) -> list[float]:
    """Microseconds that the engine takes more, for a step, for each layer of it, for each action, and for each layer of an
    action, none below 0: by least squares, where what is long is as noisy as it is long."""
    weights = np.array([1 / row["engine"] for row in rows])
    actions = [2 * row["microbatches"] for row in rows]
    parts = np.array([[1, row["layers"], n, row["layers"] * n] for row, n in zip(rows, actions, strict=True)])
    return list(1e6 * nnls(weights[:, None] * parts, weights * np.array([row["extra"] for row in rows]))[0])


def steps_growth(rows: Sequence[Row]) -> str:
    """The exponents at the ends of the table."""
    body = []
    for by, other in (("microbatches", "layers"), ("layers", "microbatches")):
        for fixed in dict.fromkeys((rows[0][other], rows[-1][other])):
            powers = [growth(rows, by, of, **{other: fixed}) for of in ("loop", "engine", "extra", "simulate")]
            body.append([SPELT[by], f"{SPELT[other]}: {fixed}", *(f"{power:.2f}" for power in powers)])
    names = ["exponent with more", "at", "loop", "engine", "engine less loop", "simulate"]
    return markdown(names, body, words=2)
