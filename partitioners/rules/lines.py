"""Pipelines whose stages are in runs of one type: how their layers are cut, and what they take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.memory_fit.capacity import Bytes, StageKind
from hetpipe.partitioners.rules.balance import Array, Index, shortest_cuts
from hetpipe.partitioners.rules.baseline import common_sizes
from hetpipe.partitioners.rules.grids import schedule_of
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.wires import link_floor
from hetpipe.partitioners.step_times.appraisal import samples_in_flight
from hetpipe.partitioners.step_times.desk import Desk
from hetpipe.partitioners.step_times.drafts import Runs
from hetpipe.predict.cost import peak_of
from hetpipe.spec.schedule import default_depths

Used = tuple[int, ...]  # devices of each type


class TypeRuns(NamedTuple):
    """A pipeline's devices: (type, how many stages in a row), first stage first."""

    parts: tuple[tuple[int, int], ...]

    @property
    def kinds(self) -> list[int]:
        """The type of each stage."""
        return [kind for kind, count in self.parts for _ in range(count)]


class Cut(NamedTuple):
    """Where the layers are cut, and the seconds of a full micro-batch, forward and backward, on each stage."""

    ends: tuple[int, ...]
    seconds: tuple[float, ...]

    def least(self, microbatches: int) -> float:
        """The least seconds of so many micro-batches: a stage does them all after the first came to it, and before the last goes
        back."""
        before = accumulate(self.seconds, initial=0.0)
        return max(past + microbatches * own for past, own in zip(before, self.seconds, strict=False))


class Lines:
    """The pipelines of one problem, by how many devices of each type they have; types are numbers."""

    def __init__(self, desk: Desk) -> None:
        self.appraiser, self.schedule, self.problem = desk.appraiser, schedule_of(desk.problem), desk.problem
        self.L, self.batch = self.appraiser.L, desk.problem.global_batch
        self.bytes = Bytes(desk.problem)
        profile = desk.problem.profile
        self._summed = float((profile.trained_bytes() - profile.tied_trained_bytes).sum())
        self.devices = [np.nonzero(self.appraiser.type_of == kind)[0] for kind in range(len(self.appraiser.types))]
        self.sizes = common_sizes(self.problem, self.batch)
        slow = [self.seconds(kind, self.sizes[0], False)[-1] for kind in range(len(self.devices))]
        orders = [np.argsort(by, kind="stable").tolist() for by in (self.appraiser.limits, slow)]
        self.orders = [way for order in orders for way in (order, order[::-1])]

    def of(self, used: Used) -> list[TypeRuns]:
        """All pipelines of so many devices of each type: the types in the order of their memory or speed, either way."""
        return list(dict.fromkeys(TypeRuns(tuple((kind, used[kind]) for kind in order if used[kind])) for order in self.orders))

    @memoized
    def cut(self, line: TypeRuns, sizes: Runs, recompute: bool) -> Cut | None:
        """The cuts with the least longest stage, forward and backward of a full micro-batch, that fit; None if none do."""
        kinds, (largest, _) = line.kinds, sizes[0]
        m, samples = sum(count for _, count in sizes), sum(size * count for size, count in sizes)
        rows = np.array([self.seconds(kind, largest, recompute) for kind in kinds])
        windows = [samples_in_flight(sizes, depth) for depth in default_depths(self.schedule, len(kinds), m)]
        reach = [self.reach(kind, recompute, samples, w, largest) for kind, w in zip(kinds, windows, strict=True)]
        ends = shortest_cuts(rows, np.array(reach))
        if ends is None:
            return None
        return Cut(ends, tuple(float(row[hi] - row[lo]) for row, (lo, hi) in zip(rows, pairwise(ends), strict=True)))

    @memoized
    def reach(self, kind: int, recompute: bool, samples: int, window: int, largest: int) -> Index:
        """For each first layer where the longest stage ends that fits (where it begins if none does), with so many samples of a
        step, at most `window` in flight, `largest` in one micro-batch [L + 1]."""
        static, boundary, *plain_and_less = self.bytes.tables(StageKind(self.appraiser.types[kind], 1))
        held, transient = plain_and_less[2:] if recompute else plain_and_less[:2]
        short = peak_of(static, boundary, held, transient, samples, window, largest) > self.appraiser.limits[kind]
        places = np.arange(self.L + 1)
        first = np.where(short & (places > places[:, None]), places, self.L + 1).min(axis=1)
        found: Index = np.maximum(first - 1, places)
        return found

    def longest(self, used: Used, b: int, recompute: bool) -> float | None:
        """The longest stage cannot be shorter, whatever the order of the types: none has more layers than as many take there at
        least. None where memory does not hold all layers so."""
        each = [(count, self._least(kind, b, recompute)) for kind, count in enumerate(used) if count]
        times = sorted({seconds for _, least in each for seconds in least})
        enough = partial(self._enough, each)
        return times[bisect_left(times, True, key=enough)] if times and enough(times[-1]) else None

    def _enough(self, each: list[tuple[int, list[float]]], longest: float) -> bool:
        return sum(count * bisect_right(least, longest) for count, least in each) >= self.L

    @memoized
    def _least(self, kind: int, b: int, recompute: bool) -> list[float]:
        """Least seconds of 1, 2, … layers in a row on this type, as many as its memory holds with one micro-batch."""
        row, reach = self.seconds(kind, b, recompute), self.reach(kind, recompute, b, b, b)
        most = int((reach - np.arange(len(reach))).max())
        return [float((row[j:] - row[: len(row) - j]).min()) for j in range(1, most + 1)]

    @memoized
    def seconds(self, kind: int, b: int, recompute: bool) -> Array:
        """Forward and backward of all layers before each [L + 1]."""
        forward, backward = self.appraiser.costs.time_prefix(self.appraiser.types[kind], b)
        return forward + recompute * self.appraiser.costs.again(forward) + backward

    @memoized
    def sums(self, R: int) -> float:
        """Least seconds of all gradient sums of R replicas, if one device made them all; on n devices the n-th part."""
        links, part = self.appraiser.links, np.array([self._summed]) / R
        inside = set(links.inside.tolist()) if self.appraiser.largest_node >= R else set()
        rings = [2 * (R - 1) * float(link_floor(links.all[link], part)[0]) for link in (links.between | inside) - {-1}]
        return min(rings, default=0.0) if R > 1 else 0.0

    def most(self, used: Used) -> int:
        """As many replicas as there can be of these."""
        return min(self.batch, *(len(devices) // count for devices, count in zip(self.devices, used, strict=True) if count))
