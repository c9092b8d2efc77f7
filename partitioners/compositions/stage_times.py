"""What one stage, and the boundary behind it, add to a pipeline: parts of compiled loops."""

from __future__ import annotations

from typing import NamedTuple

from hetpipe.partitioners.pipelines.stage_orders import fit
from hetpipe.partitioners.stage_kinds.plan_class import FORWARDS, Family, depth
from hetpipe.partitioners.stage_kinds.space import Loaded
from hetpipe.predict.compiled import inlined


class Warmup(NamedTuple):
    """A family of warm-up depths, or a relaxation of several: how many forwards more than the next a stage does before its first
    backward (0: all), for what it `held` in memory and for how long it `waits`; and whether it may wait as if it did `all`."""

    held: int
    waits: int
    all: bool

    @classmethod
    def of(cls, *families: Family) -> Warmup:
        """The least memory and the least wait of any of these, the shallowest first."""
        forwards = [FORWARDS.get(family, 0) for family in families]
        return cls(forwards[0], max(forwards), 0 in forwards)


_depth = inlined(depth)


@inlined
def fits(x: Loaded, v: int, lo: int, hi: int, place: int, forwards: int) -> int:
    """How layers [lo, hi) fit on kind v, so many stages from the end (the last: 1): see `stage_orders.fit`."""
    deep = _depth(forwards, place, x.m)
    window = x.samples if deep >= x.m else deep * x.b
    return fit(v, lo, hi, window, x.samples, x.b, x.recompute, x.tables, x.limits)


@inlined
def beside_copies(x: Loaded, v: int, lo: int, hi: int, last: int, computing: float) -> float:
    """Seconds of computing beside the copies of layers [lo, hi), as `Costs.stage_seconds` has them."""
    copying = x.copied[v, last, hi] - x.copied[v, last, lo]
    return float(computing + copying - x.hidden[v] * min(computing, copying))


@inlined
def action_seconds(x: Loaded, v: int, lo: int, hi: int, last: int, again: int) -> tuple[float, float]:
    """Forward and backward of a micro-batch of b samples or of the `last`, summed in the order of `Costs.stage_seconds`."""
    f, b = x.times[v, last, 0, hi] - x.times[v, last, 0, lo], x.times[v, last, 1, hi] - x.times[v, last, 1, lo]
    f, b = beside_copies(x, v, lo, hi, last, f), beside_copies(x, v, lo, hi, last, b)
    if again:
        b = b + (x.times[v, last, 2, hi] - x.times[v, last, 2, lo])
    return f + x.more, b + x.more if x.returns[hi] else 0.0


@inlined
def stage_seconds(x: Loaded, v: int, lo: int, hi: int, again: int) -> tuple[float, float, float, float]:
    """Of all actions of a stage; of its first forward and its last backward, at least; and its longest forward and backward."""
    f, b = action_seconds(x, v, lo, hi, 0, again)
    f_last, b_last = action_seconds(x, v, lo, hi, 1, again)
    through = min(f, f_last) + min(b, b_last)
    return (x.m - 1) * (f + b) + f_last + b_last, through, max(f, f_last), max(b, b_last)


@inlined
def idle(x: Loaded, away: float, forward: float, backward: float, hi: int, place: int, warmup: Warmup) -> float:
    """Seconds that a stage waits while its first and its last micro-batch are downstream for so long, if none of its actions is
    longer than these."""
    if not x.returns[hi] or warmup.waits == 0:
        return away
    deep = _depth(warmup.waits, place, x.m)
    first, last = max(away - (deep - 1) * forward, 0.0), max(away - (deep - 1) * backward, 0.0)
    found = first + last if deep < x.m else max(first, last)
    return min(found, away) if warmup.all else found


@inlined
def joined(x: Loaded, k: int, j: int, hi: int) -> tuple[float, float]:
    """What the boundary before layer hi takes between kinds k and j: one micro-batch both ways, 2(occupied + latency); and all
    one way, then one back, Σ occupied + latency + occupied + latency. Where no gradient comes back there is the one way only."""
    full, rest, latency = x.occupied[0, k, j, hi], x.occupied[1, k, j, hi], x.latency[k, j, hi]
    one = min(full, rest) + latency
    back = one if x.returns[hi] else 0.0
    return one + back, (x.m - 1) * full + rest + latency + back
