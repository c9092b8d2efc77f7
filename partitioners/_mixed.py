"""Unlike pipelines together: for some numbers of replicas a pool of pipelines, one for each set of devices near an equal deal;
how many of each there are is an integer program; then shares of the batch with which all end together.

1. Equal pipelines, as in `even-pipelines`. Those that come near the best tell which numbers R of replicas are worth a look.
2. The pool of an R: of each type about the R-th part of the devices, one fewer or more; the best order, micro-batch and cuts.
3. For a time T: the most samples that R pipelines of the pool do within T on the devices that there are, first of two sorts, then
   of any. T is bisected; each answer that does the whole batch is a plan.
4. A plan's shares: the least time within which its pipelines, as the simulator has them, do the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hetpipe.partitioners._balance import Array
from hetpipe.partitioners._baseline import recompute_choices
from hetpipe.partitioners._desk import Candidate, Desk
from hetpipe.partitioners._drafts import Draft, Index, Work, in_runs
from hetpipe.partitioners._ends import replica_ends
from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._lines import Cut, Line, Used
from hetpipe.partitioners.even_pipelines import Shapes

NUMBERS, NEAR = 6, (0, 1, -1, 2)  # so many R are looked at, and those beside each
SLACK = 1.1  # of shapes whose bound is not above so many times the best step
POOL = 400  # pipelines at most
HALVINGS, NODES = 7, 20  # of T for each R; of the tree of an integer program
FINE = 14  # halvings of the time within which shares are done
LARGER = 1.3  # a pipeline's share is at most so many times the mean


class Pipeline(NamedTuple):
    """One of the pool: its devices, its micro-batch, its cuts."""

    used: Used
    line: Line
    b: int
    recompute: bool
    cut: Cut

    @property
    def filling(self) -> float:
        """Seconds of a step, about, in which the longest stage waits."""
        return sum(self.cut.seconds) - max(self.cut.seconds)

    def samples(self, seconds: float) -> int:
        """How many it does in this time, about."""
        return max(0, int((seconds - self.filling) / max(self.cut.seconds))) * self.b


class _Pairs:
    """R replicas of two sorts at most, of a pool of which each uses so many devices of each type [P, types]: their cuts make few
    pieces whose gradients are summed apart."""

    def __init__(self, used: Index, counts: Sequence[int], R: int, batch: int) -> None:
        self.R, self.batch = R, batch
        more = used[:, None] - used[None]  # [P, P, types]: devices that a replica of the first sort instead of the second takes
        spare = np.array(counts) - R * used[None]
        with np.errstate(divide="ignore", invalid="ignore"):
            at = spare / more
        most = np.where(more > 0, np.floor(at + 1e-9), np.where((more == 0) & (spare < 0), -1, R)).min(axis=2)
        least = np.where(more < 0, np.ceil(at - 1e-9), 0).max(axis=2)
        self.most = np.minimum(most, R)
        self.possible = (np.maximum(least, 0) <= self.most)

    def chosen(self, samples: Array) -> Index | None:
        """How many of each do most, where each does so many samples; None where that is not the batch. (As many as can be of the
        first sort, which is the one that does more.)"""
        done = np.where(self.possible, self.most * (samples[:, None] - samples[None]) + self.R * samples[None], -1.0)
        first, second = np.unravel_index(int(done.argmax()), done.shape)
        if done[first, second] < self.batch:
            return None
        found = np.zeros(len(samples), dtype=np.int64)
        found[second] += self.R - int(self.most[first, second])
        found[first] += int(self.most[first, second])
        return found


@dataclass(frozen=True)
class Mixed:
    """A rule like the others, though nobody's but `auto`'s."""

    name: str = "mixed"

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """Plans that are better than those before them."""
        if desk.problem.backend == "torch":
            yield from Search(desk).run()


class Search:
    """Of one problem."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.shapes = desk, Shapes(desk, "even-pipelines")
        self.lines, self.best = self.shapes.lines, self.shapes.best
        self.counts = [len(devices) for devices in self.lines.devices]
        self.batch, self.L = self.lines.batch, self.lines.L

    def run(self) -> Iterator[Candidate]:
        """Equal pipelines, then unlike ones."""
        yield from self.shapes.run()
        for R in self.numbers():
            if self.best.count and self.desk.late():
                return
            self.desk.say(f"{R} unlike replicas, best step {self.best.step:.4g} s")
            yield from self._with(R)

    def numbers(self) -> list[int]:
        """The R that are worth a look."""
        about: dict[int, float] = {}
        for shape in self.shapes.all:
            if shape.bound < min(SLACK * self.best.step, about.get(shape.R, np.inf)):
                share = max(1, self.batch // shape.R // shape.b)
                for line in self.lines.of(shape.used):
                    cut = self.lines.cut(line, ((shape.b, share),), shape.recompute)
                    seconds = np.inf if cut is None else cut.least(share) + self.lines.sums(shape.R) / sum(shape.used)
                    about[shape.R] = min(seconds, about.get(shape.R, np.inf))
        found = sorted(about, key=lambda R: about[R])[:NUMBERS]
        beside = dict.fromkeys(R + more for R in found for more in NEAR)
        return [R for R in beside if 1 <= R <= min(self.batch, sum(self.counts))]

    def _with(self, R: int) -> Iterator[Candidate]:
        pool = self.pool(R)
        if pool:
            used = np.array([pipeline.used for pipeline in pool])
            yield from self._of(pool, R, _Pairs(used, self.counts, R, self.batch).chosen)
            yield from self._of(pool, R, partial(self._chosen, pool, R))

    def _of(self, pool: Sequence[Pipeline], R: int, choose: Callable[[Array], Index | None]) -> Iterator[Candidate]:
        low, high, seen = 0.0, self.best.step - self.lines.sums(R) / self.L, set[bytes]()
        if not np.isfinite(high):
            high = 2 * max(pipeline.filling + self.batch / R / pipeline.b * max(pipeline.cut.seconds) for pipeline in pool)
        for number in range(HALVINGS):
            T = (low + high) / 2 if number else high
            samples = np.minimum([pipeline.samples(T) for pipeline in pool], LARGER * self.batch / R)
            chosen = choose(samples)
            if chosen is None:
                if not number:
                    return
                low = T
                continue
            high = T
            if chosen.tobytes() not in seen:
                seen.add(chosen.tobytes())
                yield from self._offer(pool, chosen)

    def pool(self, R: int) -> list[Pipeline]:
        """For each set of devices near an equal deal its best pipeline."""
        near = [range(max(0, count // R - 1), min(count, -(-count // R) + 1) + 1) for count in self.counts]
        share = max(1, int(LARGER * self.batch / R))
        sets = [used for used in product(*near) if 0 < sum(used) <= self.L]
        even = [count / R for count in self.counts]
        sets.sort(key=lambda used: sum(abs(x - y) for x, y in zip(used, even, strict=True)))
        found = (self._pipeline(used, share) for used in sets[:POOL])
        return [pipeline for pipeline in found if pipeline is not None]

    @kept
    def _pipeline(self, used: Used, share: int) -> Pipeline | None:
        """The one that does its share soonest, about; with recompute where it fits only so."""
        for recompute in recompute_choices(self.lines.problem):
            found = []
            for line, b in product(self.lines.of(used), (b for b in self.lines.sizes if b <= share)):
                cut = self.lines.cut(line, in_runs(share // b * b, b), recompute)
                if cut is not None:
                    found.append(Pipeline(used, line, b, recompute, cut))
            if found:
                return min(found, key=lambda p: p.filling + share / p.b * max(p.cut.seconds))
        return None

    def _chosen(self, pool: Sequence[Pipeline], R: int, samples: Array) -> Index | None:
        """How many of each pipeline do most, R in all, where each does so many samples; None where that is not the batch."""
        devices = LinearConstraint(np.array([pipeline.used for pipeline in pool]).T, ub=self.counts)
        number = LinearConstraint(np.ones((1, len(pool))), lb=R, ub=R)
        found = milp(-samples, constraints=[devices, number], integrality=np.ones(len(pool)), bounds=Bounds(0, R),
                     options={"node_limit": NODES, "mip_rel_gap": 1e-3})  # fmt: skip
        if found.x is None:
            return None
        chosen: Index = np.round(found.x).astype(np.int64)
        return chosen if samples @ chosen >= self.batch else None

    def _offer(self, pool: Sequence[Pipeline], chosen: Index) -> Iterator[Candidate]:
        draft = self._draft([pool[i] for i in np.nonzero(chosen)[0].tolist()], chosen[chosen > 0].tolist())
        if draft is not None:
            yield from self.best.offer(draft)

    def _draft(self, pipelines: list[Pipeline], counts: list[int]) -> Draft | None:
        """The plan of so many of each, on the cluster's devices in their order; None if they cannot do the batch in any time."""
        next_of = [0] * len(self.counts)
        rows: list[list[int]] = []
        for pipeline, count in zip(pipelines, counts, strict=True):
            for _ in range(count):
                row: list[int] = []
                for kind, part in pipeline.line.parts:
                    row += self.lines.devices[kind][next_of[kind] : next_of[kind] + part].tolist()
                    next_of[kind] += part
                rows.append(row)
        firsts = [rows[sum(counts[:i])] for i in range(len(counts))]
        shares = self._shares(pipelines, counts, firsts)
        if shares is None or min(samples for _, samples in shares) < 1:  # a pipeline without samples is none
            return None
        n, works, which = max(map(len, rows)), dict[Work, int](), []
        for (i, samples), row in zip(shares, rows, strict=True):
            pipeline, unused = pipelines[i], n - len(row)
            work = Work(in_runs(samples, pipeline.b), pipeline.cut.ends + (self.L,) * unused, pipeline.recompute)
            which.append(works.setdefault(work, len(works)))
            row += row[:1] * unused
        return Draft("mixed", self.lines.schedule, np.array(rows), tuple(works), np.array(which))

    def _shares(
        self, pipelines: list[Pipeline], counts: list[int], firsts: list[list[int]]
    ) -> list[tuple[int, int]] | None:
        """(pipeline, samples) of each replica: the least time in which all do the batch, a sample less where that is too many."""
        most = int(LARGER * self.batch / sum(counts))

        def room(i: int, T: float) -> int:
            low, high = 0, most
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self._seconds(pipelines[i], tuple(firsts[i]), middle) <= T else (low, middle - 1)
            return low

        def enough(T: float) -> bool:
            return sum(count * room(i, T) for i, count in enumerate(counts)) >= self.batch

        low, high = 0.0, max(self._seconds(p, tuple(row), most) for p, row in zip(pipelines, firsts, strict=True))
        if not enough(high):
            return None
        for _ in range(FINE):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        shares = [(i, room(i, high)) for i, count in enumerate(counts) for _ in range(count)]
        over, R = sum(samples for _, samples in shares) - self.batch, len(shares)
        return [(i, samples - over // R - (r < over % R)) for r, (i, samples) in enumerate(shares)]

    @kept
    def _seconds(self, pipeline: Pipeline, row: tuple[int, ...], samples: int) -> float:
        """When the last backward ends, as the simulator has it."""
        if not samples:
            return 0.0
        work = Work(in_runs(samples, pipeline.b), pipeline.cut.ends, pipeline.recompute)
        replica = work.replica([self.lines.appraiser.ids[device] for device in row])
        return max(replica_ends(self.lines.appraiser.costs, replica, self.lines.schedule))
