"""The worked example of docs/planner.md: its problem, which is that of the files on the page, what the bound computes for it, and
the picture of that. `python -m docs.bound_picture` draws it into docs/pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.profile import Profile
from hetpipe.partitioners.bound.lower import Lower, Part, least_sum
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Problem
from hetpipe.show.picture.canvas import Canvas, Group, Stroke, Words

DOCS = Path(__file__).parent
PICTURE = DOCS / "pictures" / "bound.svg"
BATCH, R = 8, 2
RULED_OUT, POSSIBLE = 14.0, 15.0  # seconds of a step
RANGES = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 7))  # of samples, as the bound divides 1 to 7 at first
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640.0, 330.0, 62.0, 34.0, 20.0, 48.0
MOST_SAMPLES, MOST_PRICE = 7.4, 0.9


class Curve(NamedTuple):
    """At some prices: c of each range of samples, the types of the cheapest pipeline's stages, and the hull at B / R."""

    prices: NDArray[np.float64]
    costs: list[float]
    lines: list[str]
    hull: float


def problem() -> Problem:
    """The problem of the two files on the page."""
    page = (DOCS / "planner.md").read_text("utf-8")
    cluster, profile = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2])
    parsed = Profile.parse(profile, "the page's profile"), Cluster.parse(cluster, "the page's cluster")
    return Problem.of(*parsed, BATCH, PlanOptions())


def lower(asked: Problem) -> Lower:
    """The bound's search of this problem, with more effort than it needs."""
    found = Lower(Types(asked), fluid_bound(asked))
    found.left = 1e9
    return found


def curve(bound: Lower, T: float, prices: NDArray[np.float64]) -> Curve:
    """What `Lower.value` compares at these prices, for `R` replicas and a step of T seconds."""
    part, names = Part(R, R, 0.0), [kind.type for kind in bound.types.kinds]
    found = [bound.cheapest(part, T, prices, low, high, np.inf) for low, high in RANGES]
    costs = [cost for cost, _ in found]
    ends = np.array([high for _, high in RANGES])
    least, _, _ = least_sum(ends, np.maximum.accumulate(costs), BATCH, R, R, exact=False)
    return Curve(prices, costs, [" ".join(names[v] for v in column.line) for _, column in found], least / R)


def second_prices(bound: Lower, T: float) -> NDArray[np.float64]:
    """The prices with which T is ruled out: halfway from the first to those of the linear program."""
    part = Part(R, R, 0.0)
    ruled_out = bound.ruled_out(part, T)
    assert ruled_out
    assert part.prices is not None
    return part.prices


def canvas(shown: Curve) -> Canvas:
    """c over the samples of a replica, its hull, the point above B / R, and the share of the price of all devices."""
    found = Canvas(width=WIDTH, height=HEIGHT, title=f"The bound's worked example: T = {RULED_OUT:g} s is ruled out")
    found.description = "The price c(n) of a replica of n samples, its convex hull, and the hull at B / R above the dashed line"
    group, steps, ends = found.group(), list[tuple[float, float]](), [high for _, high in RANGES]
    _axes(group)
    for (low, high), cost in zip(RANGES, shown.costs, strict=True):
        steps += [_at(low - 1, cost), _at(high, cost)]
    group.lines.append(Stroke(points=tuple(steps), colour="type0", thickness=2.4))
    corners = [(n, c) for n, c in zip(ends, shown.costs, strict=True) if _hull(shown, n) > c - 1e-9]
    group.lines.append(Stroke(points=tuple(_at(n, c) for n, c in corners), colour="type2", thickness=2.0))
    mean, share = BATCH / R, 1 / R
    group.lines.append(Stroke(points=(_at(0, share), _at(MOST_SAMPLES, share)), colour="limit", dashed=True, thickness=1.6))
    group.lines.append(Stroke(points=(_at(mean, 0), _at(mean, shown.hull)), colour="faint", dashed=True))
    (x, y), dot = _at(mean, shown.hull), 4.0
    group.lines.append(Stroke(points=((x - dot, y), (x, y - dot), (x + dot, y), (x, y + dot), (x - dot, y)), thickness=2.0))
    texts = (
        (_at(5.1, shown.costs[4] + 0.06), "c(n)", "type0", "start"),
        (_at(1.1, shown.costs[0] - 0.035), "convex hull ĉ", "type2", "start"),
        (_at(7.35, share - 0.035), f"π·A / R = {share:g}", "limit", "end"),
        (_at(3.9, shown.hull + 0.1), f"ĉ(B / R) = {shown.hull:.5f}", "ink", "end"),
    )
    for (x, y), text, colour, anchor in texts:
        group.words.append(Words(x=x, y=y, text=text, colour=colour, anchor=anchor, bold=True))  # type: ignore[arg-type]
    return found


def _at(samples: float, price: float) -> tuple[float, float]:
    """Pixels."""
    across, up = samples / MOST_SAMPLES, price / MOST_PRICE
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _axes(group: Group) -> None:
    """Both axes with their marks and names."""
    group.lines.append(Stroke(points=(_at(0, MOST_PRICE), _at(0, 0), _at(MOST_SAMPLES, 0)), colour="rule", thickness=1.2))
    for n in range(1, RANGES[-1][1] + 1):
        x, y = _at(n, 0)
        text = f"B / R = {n}" if n * R == BATCH else str(n)
        group.words.append(Words(x=x, y=y + 12, text=text, anchor="middle", colour="faint"))
    for price in (0.2, 0.4, 0.6, 0.8):
        x, y = _at(0, price)
        group.words.append(Words(x=x - 6, y=y, text=f"{price:g}", anchor="end", colour="faint"))
    x, y = _at(MOST_SAMPLES / 2, 0)
    group.words.append(Words(x=x, y=y + 32, text="n: samples of a replica", anchor="middle", colour="faint"))
    _, y = _at(0, MOST_PRICE / 2)
    group.words.append(Words(x=18, y=y, text="price, of 1 for all devices", anchor="middle", colour="faint", upright=True))


def _hull(shown: Curve, n: float) -> float:
    """The largest convex function below c, at n samples."""
    ends = np.array([high for _, high in RANGES])
    return least_sum(ends, np.array(shown.costs), round(n), 1, 1, exact=False)[0]


def picture() -> str:
    """The SVG."""
    bound = lower(problem())
    return canvas(curve(bound, RULED_OUT, second_prices(bound, RULED_OUT))).to_svg()


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
