"""Seconds of a link, for arrays of sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Link

Array = NDArray[np.float64]


def link_floor(link: Link, size: Array) -> Array:
    """A lower bound on the sum of a link's seconds over any pieces of `size` bytes in all: a measured link costs at
    least (its least seconds per byte) × bytes."""
    if link.points is None:
        assert link.bandwidth is not None
        return link.latency + size / link.bandwidth
    (x0, y0), (x1, y1) = link.points[-2:]
    rates = [y / x for x, y in link.points if x > 0] + [max(0.0, (y1 - y0) / (x1 - x0))]
    return size * min(rates)


def link_seconds(link: Link, size: Array) -> Array:
    """`Link.seconds` of many sizes at once."""
    if link.points is None:
        assert link.bandwidth is not None
        return link.latency + size / link.bandwidth
    sizes, seconds = (np.array(axis, dtype=np.float64) for axis in zip(*link.points, strict=True))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    beyond = seconds[-1] + max(slope, 0.0) * (size - sizes[-1])
    return np.where(size > sizes[-1], beyond, np.interp(size, sizes, seconds))
