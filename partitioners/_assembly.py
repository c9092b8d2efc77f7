"""Whole plans of pipelines that can be built: how many of each is an integer program, then shares of the batch with which all end
together, then places on the cluster's nodes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hetpipe.partitioners._desk import Desk
from hetpipe.partitioners._drafts import Draft, Index, Work
from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._real import Pipeline, Reals
from hetpipe.partitioners._types import Kind, Types
from hetpipe.spec.schedule import ScheduleName

Array = NDArray[np.float64]
Take = tuple[int, ...]  # stages of each kind
Sorts = tuple[tuple[Pipeline, int], ...]  # pipelines, and how many of each
ABOVE = 1.2  # times the best step: what local search may start from
HALVINGS, NODES = 6, 5  # of T; of the tree of an integer program
FEW = 40  # pipelines of an integer program
LADDER = (1.01, 1.04, 1.1, 1.2)  # times the T of the linear program, until whole numbers are possible
SETS = 4  # of cuts that all replicas have
TILES = (1, 2, 4)  # stages in a row on one node, beside as many as it has room for
FINE = 14  # halvings of the time within which shares are done
MORE = 1.15  # times the samples that a pipeline was cut for: more it is not given


class Wish(NamedTuple):
    """A pipeline of so many stages of each kind, about so many samples, in micro-batches of b; in any order, or in this one."""

    take: Take
    samples: int
    b: int
    line: tuple[int, ...] = ()


class Assembly:
    """Of one problem."""

    def __init__(self, desk: Desk, types: Types, step: float) -> None:
        self.desk, self.types, self.reals = desk, types, Reals(types)
        self.step = step  # of the best plan so far
        self.draft: Draft | None = None  # that, if it was found here
        self.made: list[tuple[float, Sorts]] = []  # plans made here, the best first
        self.batch, self.L = desk.problem.global_batch, types.L
        self.takes, self.there = types.limits
        self.degrees = [kind.degree for kind in types.kinds]
        self.schedule: ScheduleName = "gpipe" if not self.reals.forwards.any() else "1f1b"

    def look(self, R: int, wishes: Sequence[Wish], least: float) -> None:
        """Make plans of R replicas of pipelines such as these; none is quicker than `least`. First cut
        anywhere; then so that all are cut where one of those is that were chosen: their sums wait for fewer others."""
        free = self._choice(R, wishes, least, ())
        if free is None:
            return
        self.make(free)
        used = {p.ends[1:-1]: count for p, count in free if 1 < len(p.stages) < self.L}
        for cuts in sorted(used, key=lambda x: (len(x), -used[x]))[:SETS]:
            sorts = self._choice(R, wishes, least, cuts)
            if sorts is not None:
                self.make(sorts)

    def _choice(self, R: int, wishes: Sequence[Wish], least: float, common: tuple[int, ...]) -> Sorts | None:
        """What is chosen from the least T on at which the linear program is possible."""
        pool = self.pool(R, wishes, common)
        if not pool:
            return None
        takes = np.array([self.uses(p) for p in pool]).T
        low, high = least, ABOVE * self.step
        if not math.isfinite(high):
            high = 2 * max(p.offset + (self.batch / R / p.b + 1) * p.period for p in pool)
        if self.chosen(pool, takes, R, high, whole=False) is None:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            possible = self.chosen(pool, takes, R, middle, whole=False) is not None
            low, high = (low, middle) if possible else (middle, high)
        for times in LADDER:
            if high * times >= ABOVE * self.step:
                return None
            chosen = self.chosen(pool, takes, R, high * times, whole=True)
            if chosen is not None:
                return tuple((pool[i], int(chosen[i])) for i in np.nonzero(chosen)[0].tolist())
        return None

    def pool(self, R: int, wishes: Sequence[Wish], common: tuple[int, ...]) -> list[Pipeline]:
        """Those that can be built."""
        found = dict[Pipeline | None, None]()
        for x in dict.fromkeys(wishes):
            n = max(1, min(x.samples, self.batch - R + 1))
            found[self.reals.of(x.line, n, x.b, R, common) if x.line else self.reals.best(x.take, n, x.b, R, common)] = None
        return [pipeline for pipeline in found if pipeline is not None]

    def chosen(
        self, pool: Sequence[Pipeline], takes: Array, R: int, T: float, *, whole: bool
    ) -> Index | None:
        """How many of each pipeline do most within T, R in all; None where that is not the batch. Not `whole`: parts of them.
        Whole ones are chosen among the few that cost least at the prices of the linear program."""
        samples = np.array([min(p.done(T), self.most(p)) for p in pool], dtype=np.float64)
        some = np.nonzero(samples > 0)[0]
        if not len(some):
            return None
        one = np.ones((1, len(some)))
        found = linprog(-samples[some], A_ub=takes[:, some], b_ub=self.there, A_eq=one, b_eq=[R], method="highs")
        if found.x is None or -found.fun < self.batch * (1 - 1e-9):
            return None
        if whole:
            dear = found.ineqlin.marginals @ takes[:, some] + samples[some]
            some = some[np.argsort(-dear, kind="stable")[:FEW]]
            found = milp(-samples[some], constraints=[LinearConstraint(takes[:, some], ub=self.there),
                                                      LinearConstraint(one[:, : len(some)], lb=R, ub=R)],
                         integrality=np.ones(len(some)), bounds=Bounds(0, R),
                         options={"node_limit": NODES, "mip_rel_gap": 5e-3})  # fmt: skip
            if found.x is None or samples[some] @ found.x < self.batch * (1 - 1e-9):
                return None
        chosen = np.zeros(len(pool), dtype=np.int64)
        chosen[some] = np.round(found.x)
        return chosen

    def most(self, p: Pipeline) -> int:
        """Samples that a pipeline is given at most."""
        return min(int(MORE * p.samples) + p.b, self.batch)

    def make(self, sorts: Sorts, below: float = math.inf) -> float | None:
        """The plan of so many pipelines of each sort, in several placings: its least step, None if it cannot be, or would
        not be `below` this even if none waited for others."""
        shares = self.shares(sorts, below)
        if shares is None:
            return None
        least = math.inf
        for draft in self.drafts(sorts, shares):
            candidate = self.desk.candidate(0, draft)
            if self.desk.fits(candidate):
                step = self.desk.steps.step(draft, candidate.sketch, self.step)
                if step < self.step:
                    self.step, self.draft = step, draft
                least = min(least, step)
        if not math.isfinite(least):
            return None
        insort(self.made, (least, sorts), key=lambda x: x[0])
        return least

    def uses(self, p: Pipeline) -> Array:
        """What it takes of all that there is."""
        found: Array = self.takes @ np.array(p.take(self.types.V))
        return found

    @kept
    def sizes(self, take: Take, samples: int) -> list[int]:
        """Micro-batch sizes that were measured on all of these: up to so many samples, and the next above."""
        kinds = [self.types.kinds[v] for v, count in enumerate(take) if count]
        every = sorted(set.intersection(*(set(self.types.sizes_of(kind)) for kind in kinds)))
        return every[: bisect_left(every, samples) + 1]

    def shares(self, sorts: Sorts, below: float = math.inf) -> list[int] | None:
        """Samples of each replica: the least time in which all do the batch, a sample less where that is too many; None
        where it is not `below` this."""
        pipelines, counts = zip(*sorts, strict=True)
        R = sum(counts)

        def room(p: Pipeline, T: float) -> int:
            low, high = 0, self.most(p)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.seconds(p, middle, R) <= T else (low, middle - 1)
            return low

        def done(T: float) -> list[int]:
            return [room(p, T) for p in pipelines]

        low, high = 0.0, min(below, max(self.seconds(p, self.most(p), R) for p in pipelines))
        most = done(high)
        if np.dot(counts, most) < self.batch:
            return None
        for _ in range(FINE):
            middle = (low + high) / 2
            found = done(middle)
            if np.dot(counts, found) >= self.batch:
                high, most = middle, found
            else:
                low = middle
        shares = [samples for samples, count in zip(most, counts, strict=True) for _ in range(count)]
        over = sum(shares) - self.batch
        while over > 0:  # a sample from each of the largest
            for r in sorted(range(len(shares)), key=lambda r: -shares[r])[:over]:
                shares[r], over = shares[r] - 1, over - 1
        return shares if min(shares) > 0 else None

    @kept
    def seconds(self, p: Pipeline, samples: int, R: int) -> float:
        """When it has done so many."""
        return self.reals.seconds(p, samples, R) if samples else 0.0

    def drafts(self, sorts: Sorts, shares: list[int]) -> Iterator[Draft]:
        """The plan, placed in some ways."""
        n, works, which = max(len(p.stages) for p, _ in sorts), dict[Work, int](), []
        each = [p for p, count in sorts for _ in range(count)]
        for p, samples in zip(each, shares, strict=True):
            degrees = tuple(self.degrees[v] for v in p.stages)
            which.append(works.setdefault(p.work(samples, self.L, degrees, n - len(p.stages)), len(works)))
        seen = set[bytes]()
        lengths = [length for length in TILES if length < max(self.types.node_size)]
        for way in (self.in_line, self.packed, *(partial(self.tiled, length=length) for length in lengths)):
            rows = way(each)
            if rows is None:
                continue
            table = np.array([row + row[:1] * (n - len(row)) for row in rows])
            if table.tobytes() not in seen:
                seen.add(table.tobytes())
                yield Draft("auto", self.schedule, table, tuple(works), np.array(which))

    # -- places ---------------------------------------------------------------------------------------------

    def free(self) -> list[dict[int, list[int]]]:
        """The devices of each type, by node."""
        found: list[dict[int, list[int]]] = [{} for _ in self.types.types]
        appraiser = self.desk.appraiser
        for device, (kind, node) in enumerate(
            zip(appraiser.type_of.tolist(), appraiser.links.node.tolist(), strict=True)
        ):
            found[kind].setdefault(node, []).append(device)
        return found

    def in_line(self, each: list[Pipeline]) -> list[list[int]] | None:
        """One pipeline after the other, on the nodes in their order; larger groups first."""
        free, rows = self.free(), [[-1] * len(p.stages) for p in each]
        order = [(r, s) for r, p in enumerate(each) for s in range(len(p.stages))]
        for r, s in sorted(order, key=lambda at: -self.degrees[each[at[0]].stages[at[1]]]):
            kind = self.types.kinds[each[r].stages[s]]
            node = next((x for x in free[kind.at].values() if len(x) >= kind.degree), None)
            if node is None:
                return None
            rows[r][s] = node[0]
            del node[: kind.degree]
        return rows

    def tiled(self, each: list[Pipeline], length: int) -> list[list[int]] | None:
        """Tiles on nodes: `length` stages of one type in a row, of as many replicas that have the same layers there as a node has
        room for. The longer, the fewer outputs leave a node; the shorter, the fewer gradient sums."""
        together = dict[tuple[int, int, int], list[list[tuple[int, int]]]]()
        for r, p in enumerate(each):
            for v, run in groupby(range(len(p.stages)), key=p.stages.__getitem__):
                stages = list(run)
                for tile in (stages[i : i + length] for i in range(0, len(stages), length)):
                    key = v, p.ends[tile[0]], p.ends[tile[-1] + 1]
                    together.setdefault(key, []).append([(r, s) for s in tile])
        runs = list[tuple[Kind, list[tuple[int, int]]]]()
        for (v, *_), tiles in together.items():
            kind = self.types.kinds[v]
            room = max(1, self.types.node_size[kind.at] // kind.degree // len(tiles[0]))
            runs += [(kind, [place for tile in tiles[i : i + room] for place in tile]) for i in range(0, len(tiles), room)]
        return self._placed(each, runs)

    def packed(self, each: list[Pipeline]) -> list[list[int]] | None:
        """The stages of one type of each pipeline on one node, as long as there is one with room for them."""
        runs = []
        for r, p in enumerate(each):
            for v, places in groupby(range(len(p.stages)), key=p.stages.__getitem__):
                runs.append((self.types.kinds[v], [(r, s) for s in places]))
        return self._placed(each, runs)

    def _placed(
        self, each: list[Pipeline], runs: list[tuple[Kind, list[tuple[int, int]]]]
    ) -> list[list[int]] | None:
        """Each run of stages of one kind on the node that has the least room for it, or parts of it on those that have most; the
        largest groups, then the longest runs first."""
        free, rows = self.free(), [[-1] * len(p.stages) for p in each]
        for kind, places in sorted(runs, key=lambda run: (-run[0].degree, -len(run[1]))):
            left = places
            while left:
                nodes = [x for x in free[kind.at].values() if len(x) >= kind.degree]
                if not nodes:
                    return None
                fit = [x for x in nodes if len(x) >= len(left) * kind.degree]
                node = min(fit, key=len) if fit else max(nodes, key=len)
                now, left = left[: len(node) // kind.degree], left[len(node) // kind.degree :]
                for r, s in now:
                    rows[r][s] = node[0]
                    del node[: kind.degree]
        return rows
