"""The earliest that pipelines can end: lower bounds for many at once, a row each.

A stage of depth w begins after the first forwards of those before it; then does all its work, which does not end before all
its inputs came over their link, nor before every w-th micro-batch went to the end and came back, one after the other, and
what is left of them after that; nor before the last backward of the next stage. Its gradient sums follow (`exposed`), and
last come the optimizers. A first stage that only runs forward waits for nothing that comes back; its last micro-batch goes to the
end and back to where backward ends.

Where a stage may be on several types, or joined by several links, its work takes as long as on the slowest; what others wait
for as on the fastest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.wires import exposed, link_floor, link_seconds
from hetpipe.partitioners.step_times.drafts import Index, Runs
from hetpipe.partitioners.step_times.links import Links
from hetpipe.partitioners.step_times.sets import NumberedSets
from hetpipe.predict.cost import Costs
from hetpipe.spec.schedule import ScheduleName, default_depths

Array = NDArray[np.float64]
ROUNDING = 1 - 1e-9  # bounds are sums in another order than the simulator's


class PipelineRows(NamedTuple):
    """U pipelines of n stages: which types each stage may be on [U, n] and which links may join it to the next [U, n − 1], by the
    numbers of these sets; its layers, from `lo` up to `hi`, and whether its gradients are summed over several nodes [U, n]."""

    types: Index
    links: Index
    lo: Index
    hi: Index
    spread: NDArray[np.bool_]


class CommonWork(NamedTuple):
    """What pipelines that are bounded together have in common: their micro-batches, whether they recompute, how many replicas
    there are, and the schedule."""

    runs: Runs
    recompute: bool
    replicas: int
    schedule: ScheduleName


class Stages(NamedTuple):
    """Seconds of each stage [U, n]: all its work and its optimizer; and forward and backward of the first and the last
    micro-batch [2, U, n]."""

    work: Array
    optimizer: Array
    forward: Array
    backward: Array


class Earliest:
    """Bounds for the pipelines of one problem; sets of types are of places in `kinds`."""

    def __init__(
        self, costs: Costs, links: Links, kinds: list[str], types: NumberedSets, joins: NumberedSets, *, early: bool
    ) -> None:
        self.costs, self.links, self.kinds, self.types, self.joins = costs, links, kinds, types, joins
        self.early = early  # whether sums begin in the last backward
        profile = costs.profile
        self.summed = np.concatenate([[0.0], np.cumsum(profile.trained_bytes() - profile.tied_trained_bytes)])
        self.output = np.concatenate([[0.0], profile.output_bytes])

    def steps(self, rows: PipelineRows, given: CommonWork) -> Array:
        """Lower bounds [U] on the step of any plan with such pipelines."""
        stages, hops = self._stages(rows, given), self._hops(rows, given.runs)
        m, n = sum(count for _, count in given.runs), rows.types.shape[1]
        only_forward = rows.hi <= self.costs.first_trained
        depths = np.where(only_forward, m, np.array(default_depths(given.schedule, n, m)))
        returned = np.where(only_forward[:, :-1], 0.0, hops[:2])
        times, turns = np.divmod(m - 1, depths)
        longer = np.minimum(times, -(-given.runs[0][1] // depths))  # trips of one of the first, longer micro-batches
        there, back = _before(stages.forward, hops[:2]), _before(stages.backward, returned)
        own = stages.forward[:, :, -1:] + stages.backward[:, :, -1:]
        trips = there[:, :, -1:] - there + back[:, :, -1:] - back + own  # to the end and back: the first, the last
        last = stages.forward[1] + stages.backward[1]
        busy = longer * trips[0] + (times - longer + 1) * trips[1] + np.where(times > 0, turns * last, 0.0)
        busy = np.maximum(busy, np.where(only_forward, stages.work + trips[1] - last, stages.work))
        busy[:, 1:] = np.maximum(busy[:, 1:], hops[2] - hops[0] + trips[1][:, 1:])
        ready = np.maximum.accumulate((there[0] + busy + back[1])[:, ::-1], axis=1)[:, ::-1] - back[1]
        ends = ready + self._sums(rows, given)
        found: Array = (ends.max(axis=1) + stages.optimizer.max(axis=1)) * ROUNDING
        return found

    def _stages(self, rows: PipelineRows, given: CommonWork) -> Stages:
        U, n = rows.types.shape
        work, optimizer = np.zeros((2, U, n))
        forward, backward = np.full((2, 2, U, n), np.inf)
        extra = self.costs.cluster.runtime_overhead.action_seconds
        for kind, here in self.types.members(rows.types):
            total = np.zeros((U, n))
            for i, (size, count) in enumerate(given.runs):
                times = self.costs.time_prefix(self.kinds[kind], size)
                f, b, again = (prefix[rows.hi] - prefix[rows.lo] for prefix in (*times, self.costs.again(times[0])))
                f, b = f + extra, b + (again if given.recompute else 0.0) + extra * (rows.hi > self.costs.first_trained)
                total += count * (f + b)
                for j in {0, 1} if len(given.runs) == 1 else {i}:
                    forward[j] = np.where(here, np.minimum(forward[j], f), forward[j])
                    backward[j] = np.where(here, np.minimum(backward[j], b), backward[j])
            work = np.where(here, np.maximum(work, total), work)
            steps = self._optimizer(kind)
            optimizer = np.where(here, np.maximum(optimizer, steps[rows.hi] - steps[rows.lo]), optimizer)
        return Stages(work, optimizer, forward, backward)

    def _hops(self, rows: PipelineRows, runs: Runs) -> Array:
        """Least seconds of each boundary's first and last transfer, and until all of one way have come [3, U, n − 1]. None where
        they are a part of the actions, or nobody said how long they take."""
        found = np.full((3, *rows.links.shape), np.inf)
        for link, here in self.joins.members(rows.links):
            if link < 0 or not self.costs.cluster.runtime_overhead.overlap_transfers:
                return np.zeros_like(found)
            each = [self._transfer(link, size)[rows.hi[:, :-1]] for size, _ in runs]
            latency = self.links.all[link].seconds(0)
            held = sum(count * np.maximum(seconds - latency, 0.0) for seconds, (_, count) in zip(each, runs, strict=True))
            seconds = np.stack([each[0], each[-1], held + latency])
            found = np.where(here, np.minimum(found, seconds), found)
        return found

    def _sums(self, rows: PipelineRows, given: CommonWork) -> Array:
        """Least seconds of each stage's gradient sums after its last backward, over the fastest link that its ring can have."""
        found = np.zeros(rows.types.shape)
        for number in np.unique(rows.types).tolist() if given.replicas > 1 else ():
            for spread in (False, True):
                here = (rows.types == number) & (rows.spread == spread)
                if here.any():
                    found[here] = self._after(number, spread, given.runs[-1][0], given.recompute, given.replicas)[
                        rows.lo[here], rows.hi[here]
                    ]
        return found

    @memoized
    def _after(self, types: int, spread: bool, size: int, recompute: bool, R: int) -> Array:
        """Least seconds [lo, hi] from the last backward of stages of these layers to the end of their gradient sums, on any of
        these types; their last micro-batch has so many samples."""
        summed = np.maximum(self.summed - self.summed[:, None], 0.0)
        links = self.links.between if spread else {*self.links.between, *self.links.inside.tolist()}
        sums, below = np.where(summed > 0, self._rings(summed, R, links), 0.0), np.zeros_like(summed)
        for kind in self.types.all[types] if self.early else ():
            forward, backward = self.costs.time_prefix(self.kinds[kind], size)
            left = backward + self.costs.again(forward) if recompute else backward
            below = np.maximum(below, left - left[:, None])
        return exposed(sums, below)

    def _rings(self, size: Array, R: int, links: set[int]) -> Array:
        if R < 2 or -1 in links or not links:
            return np.zeros_like(size)
        floors = [link_floor(self.links.all[link], size / R) for link in links]
        rings: Array = 2 * (R - 1) * np.minimum.reduce(floors)
        return rings

    @memoized
    def _transfer(self, link: int, size: int) -> Array:
        """Seconds of the transfer of each boundary's output [L + 1]."""
        return link_seconds(self.links.all[link], self.output * size)

    @memoized
    def _optimizer(self, kind: int) -> Array:
        """Seconds of the optimizer of all layers before each [L + 1]."""
        L = self.costs.layer_count
        return np.array([self.costs.optimizer_seconds(self.kinds[kind], 0, hi) for hi in range(L + 1)])


def _before(seconds: Array, hops: Array) -> Array:
    """Seconds on the way to each stage, or back from it, that others and the links take [2, U, n]."""
    found = np.zeros_like(seconds)
    found[:, :, 1:] = np.cumsum(seconds[:, :, :-1] + hops, axis=2)
    return found
