"""Pipelines that can be built of so many devices of each kind: their order, micro-batch, cuts and warm-up. Links are
taken as they are if a pipeline's devices lie side by side; what a plan really takes `Steps` says."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.schedule import ScheduleName
from hetpipe.files.limits import MOST_BATCH
from hetpipe.partitioners.pipelines.line_cuts import Fixed, Loaded, Waits, best_line, ended
from hetpipe.partitioners.pipelines.stage_orders import best_order
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.plan_class import FORWARDS, allowed_families, depth
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.step_times.drafts import Work, in_runs

Array = NDArray[np.float64]
Index = NDArray[np.int64]
STATES, WORST = 2_000, 8  # numbers of each kind up to which the best order is looked for; times an even stage
FEW_KINDS, SHORT = 3, 8  # kinds up to which all orders are tried; one more if there are at most so many stages


class Pipeline(NamedTuple):
    """A pipeline that can be built, cut for so many samples: the kind of each stage, where they end, which recompute; how many
    more forwards than the next a stage does before its first backward (0: all). With n samples it ends after about offset + ⌈n /
    b⌉ · period."""

    stages: tuple[int, ...]
    b: int
    ends: tuple[int, ...]
    recompute: tuple[bool, ...]
    forwards: int
    common: tuple[int, ...]
    samples: int
    period: float
    offset: float

    def take(self, V: int) -> tuple[int, ...]:
        """Stages of each of the V kinds."""
        return tuple(np.bincount(self.stages, minlength=V).tolist())

    def done(self, seconds: float) -> int:
        """How many samples it does in this time, about."""
        left = max(0.0, seconds - self.offset)
        return int(left / self.period) * self.b if left < MOST_BATCH * self.period else MOST_BATCH

    def work(self, samples: int, types: Types, unused: int) -> Work:
        """The work of this pipeline with so many samples, on a row with so many devices more than it uses."""
        _, _, degrees, offload = zip(*(types.kinds[v] for v in self.stages), strict=True)
        sizes, n = in_runs(samples, self.b), len(self.stages)
        m = sum(count for _, count in sizes)
        depths = tuple(depth(self.forwards, n - s, m) for s in range(n)) if self.forwards != 1 else ()
        groups = degrees if max(degrees) > 1 else ()
        return Work(sizes, self.ends + (types.L,) * unused, self.recompute, groups, depths, offload if any(offload) else ())


class Reals:
    """The pipelines that can be built for one problem."""

    def __init__(self, types: Types) -> None:
        self.types, self.L, self.problem = types, types.L, types.problem
        self.forwards = np.array([FORWARDS.get(family, 0) for family in allowed_families(self.problem)])
        self.schedule: ScheduleName = "1f1b" if self.forwards.any() else "gpipe"
        runtime = self.problem.cluster.runtime_overhead
        self.more, self.blocking = runtime.action_seconds, not runtime.overlap_transfers
        speed = [types.times(v, types.sizes_of(kind)[0])[:, -1].sum() * kind.degree for v, kind in enumerate(types.kinds)]
        room = [types.limit[kind.at] * kind.degree for kind in types.kinds]
        orders = [sorted(range(types.V), key=by.__getitem__) for by in (room, speed)]
        self.orders = list(dict.fromkeys(tuple(way) for order in orders for way in (order, order[::-1])))
        self.limits = np.array([types.limit[kind.at] for kind in types.kinds])
        self.tables = np.stack([types.memory(v) for v in range(types.V)])
        self.fixed = Fixed(
            self.tables,
            self.limits,
            types.optimizer,
            self.more,
            self.blocking,
            self.problem.allow_recompute,
            self.problem.sums_early,
            types.costs.first_trained,
        )

    @memoized
    def best(self, take: tuple[int, ...], samples: int, b: int, R: int, common: tuple[int, ...] = ()) -> Pipeline | None:
        """The pipeline that ends first with so many samples in micro-batches of b, beside R − 1 other replicas that are all cut
        at `common`; None where there is none, or a kind was not measured at b."""
        measured = all(b in self.types.sizes_of(kind) for kind, count in zip(self.types.kinds, take, strict=True) if count)
        possible = measured and len(common) < sum(take) <= self.L
        return self._of(*self._orders(take, b, samples), samples, b, R, common) if possible else None

    @memoized
    def quickest(self, take: tuple[int, ...], samples: int, R: int, common: tuple[int, ...]) -> Pipeline | None:
        """The pipeline of `best` with the best of all micro-batch sizes. Sizes whose work takes least come first, and others only
        as far as they could be better."""
        best, below = None, math.inf
        if not len(common) < sum(take) <= self.L:
            return None
        for b in sorted(self.sizes(take, samples), key=lambda b: self._work(take, samples, b)):
            found = self._of(*self._orders(take, b, samples), samples, b, R, common, below)
            if found is not None and found.offset + -(-samples // b) * found.period < below:
                best, below = found, found.offset + -(-samples // b) * found.period
        return best

    @memoized
    def sizes(self, take: tuple[int, ...], samples: int) -> list[int]:
        """Micro-batch sizes that were measured on all of these: up to so many samples, and the next above."""
        kinds = [self.types.kinds[v] for v, count in enumerate(take) if count]
        every = sorted(set.intersection(*(set(self.types.sizes_of(kind)) for kind in kinds)))
        return every[: bisect_left(every, samples) + 1]

    def least(self, take: tuple[int, ...], samples: int) -> float:
        """About what so many samples take at least; infinite where no micro-batch size was measured on all."""
        return min((self._work(take, samples, b) for b in self.sizes(take, samples)), default=math.inf)

    def _work(self, take: tuple[int, ...], samples: int, b: int) -> float:
        """About what so many samples take if all stages work as long."""
        rate = sum(count / self.types.times(v, b)[:, -1].sum() for v, count in enumerate(take) if count)
        return float((-(-samples // b) + sum(take) - 1) / rate)

    @memoized
    def of(self, line: tuple[int, ...], samples: int, b: int, R: int, common: tuple[int, ...]) -> Pipeline | None:
        """The best pipeline, as of `best`, with its stages on these kinds in this order."""
        return self._of(np.array([line]), self._inside(line)[None], samples, b, R, common) if len(common) < len(line) else None

    def _of(
        self,
        lines: Index,
        insides: NDArray[np.bool_],
        samples: int,
        b: int,
        R: int,
        common: tuple[int, ...],
        below: float = math.inf,
    ) -> Pipeline | None:
        loaded, waits = self.loaded(b, samples), Waits(self.types.sums(R), *self.blocks(common))
        which, forwards, seconds, period, ends, flags = best_line(
            lines, insides, loaded, samples, self.forwards, waits, self.fixed, below
        )
        if which < 0:
            return None
        line, again = tuple(lines[which].tolist()), tuple(bool(x) for x in flags)
        return Pipeline(line, b, tuple(ends.tolist()), again, int(forwards), common, samples, period, seconds - loaded.m * period)

    def cut(self, stages: tuple[tuple[int, int, bool], ...], samples: int, b: int, R: int) -> Pipeline:
        """The pipeline with these stages (the kind of each, where it ends, whether it recomputes) and the shallowest warm-up."""
        line, ends, again = zip(*stages, strict=True)
        found = Pipeline(line, b, (0, *ends), again, int(self.forwards[0]), (), samples, 0.0, 0.0)
        return found._replace(period=self.seconds(found, samples, R) / self.loaded(b, samples).m)

    def seconds(self, p: Pipeline, samples: int, R: int) -> float:
        """When its gradient sums and optimizers have ended, about as simulated: what its own last backward does not hide of a
        stage's sums, and those of all layers below it, down to a cut that all replicas have."""
        line, ends, flags = np.array(p.stages), np.array(p.ends), np.array(p.recompute, dtype=np.int64)
        waits = Waits(self.types.sums(R), *self.blocks(p.common))
        found: float = ended(line, self._inside(p.stages), ends, flags, p.forwards, self.loaded(p.b, samples), waits, self.fixed)
        return found

    def _orders(self, take: tuple[int, ...], b: int, samples: int) -> tuple[Index, NDArray[np.bool_]]:
        """The orders of `_lines`, and the order whose longest stage is shortest."""
        lines, insides = self._lines(take)
        if len(lines) == 1 or math.prod(count + 1 for count in take) > STATES:
            return lines, insides
        loaded = self.loaded(b, samples)
        forward, backward, b = loaded.forward[0], loaded.backward[0], loaded.b
        windows = np.array([min(depth(int(self.forwards[0]), place + 1, loaded.m) * b, samples) for place in range(sum(take))])
        least = 1 / sum(count / (forward[v, -1] + backward[v, -1]) for v, count in enumerate(take) if count)
        line = best_order(
            np.array(take),
            forward,
            backward,
            windows,
            samples,
            b,
            self.problem.allow_recompute,
            self.tables,
            self.limits,
            least,
            WORST * least,
        )
        if line[0] < 0 or (lines == line).all(axis=1).any():
            return lines, insides
        return np.vstack([lines, line]), np.vstack([insides, self._inside(tuple(line.tolist()))])

    @memoized
    def _lines(self, take: tuple[int, ...]) -> tuple[Index, NDArray[np.bool_]]:
        """The kind of each stage [orders, n], in orders worth a look; and whether it and the next are on one node."""
        kinds = [v for v, count in enumerate(take) if count]
        few = len(kinds) <= FEW_KINDS or (len(kinds) == FEW_KINDS + 1 and sum(take) <= SHORT)
        orders = permutations(kinds) if few else self.orders
        lines = list(dict.fromkeys(tuple(v for v in order for _ in range(take[v])) for order in orders))
        return np.array(lines), np.array([self._inside(line) for line in lines])

    @memoized
    def _inside(self, line: tuple[int, ...]) -> NDArray[np.bool_]:
        return np.array(self.types.insides(line), dtype=np.bool_)

    def loaded(self, b: int, samples: int) -> Loaded:
        """The times of micro-batches of b samples, so many samples in all."""
        b = min(b, samples)
        return Loaded(*self._stacked(b, samples % b), b, -(-samples // b), samples % b)

    @memoized
    def _stacked(self, b: int, q: int) -> tuple[Array, Array, Array, Array]:
        """The arrays of `Loaded` for micro-batches of b samples, and a last one of q."""
        *full, latency = self._sized(b)
        rest = self._sized(q)[:3] if q else full
        forward, backward, occupied = (np.stack([x, y]) for x, y in zip(full, rest, strict=True))
        return forward, backward, occupied, latency

    @memoized
    def _sized(self, size: int) -> tuple[Array, Array, Array, Array]:
        """The arrays of `Loaded` for one size of micro-batch."""
        V = self.types.V
        times = np.array([self.types.times(v, size) for v in range(V)])
        sent = np.array([[[self.types.sent(i, j, size, inside) for inside in (False, True)] for j in range(V)] for i in range(V)])
        return times[:, 0].copy(), times[:, 1].copy(), np.ascontiguousarray(sent[..., :-1]), np.ascontiguousarray(sent[..., -1])

    @memoized
    def blocks(self, common: tuple[int, ...]) -> tuple[Index, Index]:
        """For a stage that begins at each layer, the first layer whose sums its own sums wait for, and the layer where it must
        end [L + 1]."""
        places = np.arange(self.L + 1)
        if not common:
            return places, np.full(self.L + 1, self.L)
        at = np.array([0, *common, self.L])
        after = np.searchsorted(at, places, side="right")
        return at[after - 1], at[np.minimum(after, len(at) - 1)]
