"""`torchgpipe-balance`: one pipeline, cut as torchgpipe's `balance_by_time` cuts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetpipe.partitioners.rules.baseline import SimpleRule
from hetpipe.partitioners.rules.grids import Ends, grid_drafts, one_line
from hetpipe.partitioners.step_times.desk import Candidate, Desk


class _Blocks:
    """A sequence in k blocks, and the move of the heuristic."""

    def __init__(self, values: Sequence[float], k: int) -> None:
        n = len(values)
        self.values = values
        self.ends = [0, *(n // k * (i + 1) for i in range(k - 1)), n]

    def sums(self) -> list[float]:
        """The blocks' sums."""
        return [sum(self.values[a:b]) for a, b in zip(self.ends, self.ends[1:], strict=False)]

    def feed(self, q: int, p: int) -> int:
        """Give block q the nearest element on the side of block p; returns the block that gave it."""
        step = 1 if p > q else -1
        giver = q + step
        while self.ends[giver + 1] == self.ends[giver]:  # torchgpipe would take from an empty block here
            giver += step
        for i in range(q + 1, giver + 1) if p > q else range(giver + 1, q + 1):
            self.ends[i] += step
        return giver


def block_partition(costs: Sequence[float], k: int) -> list[int]:
    """Ends of k blocks by the local search of Bárány and Grinberg, "Block partitions of sequences" (Israel J. Math.
    206, 2015; arXiv 1308.2452), as torchgpipe 0.0.7 applies it.

    The theorem is for elements in [0, 1], where it ends with largest ≤ smallest block + 1. torchgpipe gets there by
    (x − min) / (max − min), which also takes away what all layers have in common: nearly equal layers differ by anything
    between 0 and 1, so that the promise is worth less the more equal the layers are (24 layers of 100 and 104 in 4 blocks:
    1512 where 624 is possible). That is kept here. Where it starts (⌊n/k⌋ elements each, the rest to the last) and how
    ties fall (last of the largest, first of the smallest) are torchgpipe's too. O(k·n³).

    >>> block_partition([50] * 10 + [51] * 10, 2)
    [0, 15, 20]
    """
    if not 1 <= k <= len(costs):
        raise ValueError(f"cannot make {k} blocks of {len(costs)} elements: give 1 to {len(costs)}")
    low, span = min(costs), max(costs) - min(costs)
    blocks = _Blocks([(x - low) / span if span > 0 else 0.0 for x in costs], k)
    while True:
        sums = blocks.sums()
        p = max(range(k), key=lambda i: (sums[i], i))  # (1) a largest block
        giver = -1
        while giver != p:
            sums = blocks.sums()
            q = min(range(k), key=lambda i: (sums[i], i))
            if sums[p] <= sums[q] + 1:  # (2) the promise
                return blocks.ends
            giver = blocks.feed(q, p)  # (3) the smallest grows towards p


class TorchgpipeBalance(SimpleRule):
    """torchgpipe's `balance_by_time` (Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
    Models", arXiv 2004.09910; user guide, "Automatic Balancing"). It times forward + backward of every layer on one
    device, here the first of the cluster, and cuts as if all devices were that one; devices in cluster order; no memory
    limit; GPipe's order, which is the only one that it runs. The micro-batch size (also of the timing), and recompute
    everywhere or nowhere, that simulate fastest."""

    name = "torchgpipe-balance"

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        measured = desk.problem.profile.measurement(desk.problem.cluster.devices[0].type)

        def cut(line: Sequence[str], b: int) -> Ends:
            forward, backward = measured.times(b)
            return block_partition([float(t) for t in forward + backward], len(line))

        for place, draft in enumerate(grid_drafts(desk, self.name, one_line(desk.problem), cut, usual="gpipe")):
            yield desk.candidate(place, draft)


partitioner = TorchgpipeBalance()
