"""`equal-parameters`: one pipeline over all devices in cluster order, equal bytes of parameters that train on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from hetpipe.partitioners.rules.baseline import SimpleRule
from hetpipe.partitioners.rules.grids import grid_drafts, one_line
from hetpipe.partitioners.step_times.desk import Candidate, Desk


def balanced(weights: Sequence[float], n: int) -> list[int]:
    """Ends of n blocks of at least one element: the largest sum is least, and then the sum of squares (so that
    equal weights give equal counts). Exact: two dynamic programs over (end, blocks). O(n·L²).

    >>> balanced([3, 1, 1, 1], 2)
    [0, 1, 4]
    """
    L = len(weights)
    if not 1 <= n <= L:
        raise ValueError(f"cannot make {n} blocks of {L} elements: give 1 to {L}")
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)

    @cache
    def least(hi: int, k: int) -> float:
        if k == 1:
            return prefix[hi]
        return min(max(least(lo, k - 1), prefix[hi] - prefix[lo]) for lo in range(k - 1, hi))

    most = least(L, n) * (1 + 1e-12)

    @cache
    def even(hi: int, k: int) -> tuple[float, int, int]:
        """Least sum of squares, of squared counts, and where the last block begins, within `most`."""
        found = []
        for lo in range(k - 1, hi) if k > 1 else (0,):
            size = prefix[hi] - prefix[lo]
            before = even(lo, k - 1) if k > 1 else (0.0, 0, 0)
            if size <= most:
                found.append((before[0] + size**2, before[1] + (hi - lo) ** 2, lo))
        return min(found, default=(float("inf"), 0, hi - 1))

    ends = [L]
    for k in range(n, 0, -1):
        ends.append(even(ends[-1], k)[2])
    return ends[::-1]


class EqualParameters(SimpleRule):
    """What DeepSpeed's PipelineModule does by default, `partition_method="parameters"` (DeepSpeed, tutorial "Pipeline
    Parallelism", section "Load Balancing Pipeline Modules"): it balances trained parameters per stage and knows neither the speed
    nor the memory of a device. 1F1B; the micro-batch size, and recompute everywhere or nowhere, that simulate fastest."""

    name = "equal-parameters"

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        weights = [float(x) for x in desk.problem.profile.trained_bytes()]
        rows = one_line(desk.problem)
        ends = balanced(weights, rows.size)
        for place, draft in enumerate(grid_drafts(desk, self.name, rows, lambda types, b: ends)):
            yield desk.candidate(place, draft)


partitioner = EqualParameters()
