"""What layers [lo, hi) take, as matrices."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.cost import Costs

Array = NDArray[np.float64]


def span(values: Array) -> Array:
    """[lo, hi] sums of per-layer `values`; zero below the diagonal."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.triu(prefix[None, :] - prefix[:, None])


def memory_tables(costs: Costs, L: int, kind: str, degree: int, offload: bool = False) -> Array:
    """Static bytes of a stage, boundary, held and transient bytes per sample, and the latter two under recompute [6, lo, hi];
    infinite where there is no layer. A stage that offloads keeps its activations on the host, and does not recompute."""
    tables = np.full((6, L + 1, L + 1), np.inf)
    for lo, hi in combinations(range(L + 1), 2):
        plain = costs.stage_memory(kind, lo, hi, samples=1, offload=offload, degree=degree)
        less = costs.stage_memory(kind, lo, hi, samples=1, recompute=True, degree=degree)
        tables[:, lo, hi] = (
            plain.static,
            plain.boundary,
            plain.held_per_sample,
            plain.transient_per_sample,
            np.inf if offload else less.held_per_sample,
            less.transient_per_sample,
        )
    return tables
