"""Whole plans of pipelines that can be built: how many of each is an integer program, then shares of the batch with which all end
together, then places on the cluster's nodes."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.pipelines.real import Pipeline, Reals
from hetpipe.partitioners.search.estimate import Estimates
from hetpipe.partitioners.search.places import Places
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.step_times.desk import Budget, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index
from hetpipe.planning.programs import Program

Array = NDArray[np.float64]
Take = tuple[int, ...]  # stages of each kind
Mix = tuple[tuple[Pipeline, int], ...]  # pipelines, and how many of each
CLOSE = 1.02  # times the best step: plans of about this are simulated
WIDE, CHEAP = 1.15, 20_000  # those of up to so many tasks
DEEP = 1.02  # times what the slowest pipeline takes alone: a plan that takes longer may have deeper warm-ups
PLAYED = 4  # of the plans that one look makes: so many that take about least are simulated
TASKS = 5_000_000  # of plans whose transfers share adapters: so many are simulated
LONG = 0.125  # of `TASKS`: plans with more tasks wait until all others are made
ABOVE = 1.2  # times the best step: what local search may start from
SURE, NODES = 1.01, 5  # so well is T known; of the tree of an integer program
PROGRAM_PIPELINES = 40  # pipelines of an integer program
LEAST = 1e-3  # of a T that is possible, from which on T is bisected
LADDER = (1.01, 1.04, 1.1, 1.2)  # times the T of the linear program, until whole numbers are possible
ALIKE = 6  # pipelines of which all replicas are
SETS = 4  # of cuts that all replicas have
FINE = 14  # halvings of the time within which shares are done
MORE = 1.15  # times the samples that a pipeline was cut for: more it is not given


class Wish(NamedTuple):
    """A pipeline of so many stages of each kind, about so many samples, in micro-batches of b (of the best size: 0); in any
    order, or in this one."""

    take: Take
    samples: int
    b: int
    line: tuple[int, ...] = ()


class Assembled(NamedTuple):
    """About what a plan takes, its pipelines, and the way in which they are placed."""

    about: float
    mix: Mix
    way: int


class Assembly:
    """The plans of one problem; pipelines are built by all `workers` at once."""

    def __init__(self, desk: Desk, types: Types, workers: Executor) -> None:
        self.desk, self.types, self.reals, self.workers = desk, types, Reals(types), workers
        self.estimates = Estimates(self.reals)
        self.places = Places(types, desk.appraiser.type_of, desk.appraiser.links.node)
        self.step = math.inf  # of the best plan so far
        self.draft: Draft | None = None  # that
        self.fresh: list[tuple[float, int, Draft]] = []  # made since the last simulation: about what they take, their stages
        self.waiting: list[tuple[float, int, Draft]] = []  # those that wait for the end
        self.budget = Budget(desk.steps, TASKS, 0, math.inf)
        self.played: list[tuple[float, int, Draft]] = []  # plans that were simulated, the best first
        self.made: list[Assembled] = []  # plans made here, the best first
        self.near: list[Pipeline] = []  # among which an integer program chose last
        self.batch, self.L = desk.problem.global_batch, types.L
        self.takes, self.there = types.limits

    def look(self, R: int, wishes: Sequence[Wish], least: float) -> float:
        """Make plans of R replicas of pipelines such as these; none is quicker than `least`. First plans in which all replicas
        are alike; then the mix that the integer program chooses, with any cuts; then mixes of pipelines that it nearly chose, all
        cut where one of the chosen is, since their sums wait for fewer others. About what the best takes."""
        alike = [p for p in self.pool(R, wishes, ()) if self.all_can(R, p.take(self.types.V))]
        alike.sort(key=lambda p: self.seconds(p, -(-self.batch // R), R))
        for away in (False, True):  # hosts may have too little memory for those that offload
            for p in [p for p in alike if self.types.offloads(p.take(self.types.V)) == away][:ALIKE]:
                self.make(((p, R),))
        about = self.play(PLAYED)
        free = self._choice(R, wishes, least, ())
        if free is not None and self.make(free) is None:
            kept = [x for x in wishes if not self.types.offloads(x.take)]
            free = self._choice(R, kept, least, ()) if len(kept) < len(wishes) else free
            if free is not None:
                self.make(free)
        if free is not None:
            near = [Wish(p.take(self.types.V), p.samples, p.b) for p in self.near]
            used = {p.ends[1:-1]: count for p, count in free if 1 < len(p.stages) < self.L}
            for cuts in sorted(used, key=lambda x: (len(x), -used[x]))[:SETS]:
                mix = self._choice(R, near, least, cuts)
                if mix is not None:
                    self.make(mix)
            about = min(about, self.play(PLAYED))
        return about

    def _choice(self, R: int, wishes: Sequence[Wish], least: float, common: tuple[int, ...]) -> Mix | None:
        """The mix that is chosen, with the least T at which the linear program is possible, or a little more."""
        pool = self.pool(R, wishes, common)
        if not pool:
            return None
        takes = np.array([self.uses(p) for p in pool]).T
        program = self.program(takes, R)
        low, high = least, ABOVE * self.step
        if not math.isfinite(high):
            high = 2 * max(p.offset + (self.batch / R / p.b + 1) * p.period for p in pool)
        if self.most_samples(pool, program, high) is None:
            return None
        low = max(low, LEAST * high)
        while high > SURE * low:
            middle = math.sqrt(low * high)
            possible = self.most_samples(pool, program, middle) is not None
            low, high = (low, middle) if possible else (middle, high)
        for times in LADDER:
            if high * times >= ABOVE * self.step:
                return None
            chosen = self.chosen(pool, takes, program, R, high * times)
            if chosen is not None:
                return tuple((pool[i], int(chosen[i])) for i in np.nonzero(chosen)[0].tolist())
        return None

    def pool(self, R: int, wishes: Sequence[Wish], common: tuple[int, ...]) -> list[Pipeline]:
        """The pipelines of these wishes that can be built."""

        def built(x: Wish) -> Pipeline | None:
            n = max(1, min(x.samples, self.batch - R + 1))
            if x.line:
                return self.reals.of(x.line, n, x.b, R, common)
            return self.reals.best(x.take, n, x.b, R, common) if x.b else self.reals.quickest(x.take, n, R, common)

        found = dict.fromkeys(self.workers.map(built, dict.fromkeys(wishes)))
        return [pipeline for pipeline in found if pipeline is not None]

    def program(self, takes: Array, R: int, *, whole: bool = False, **options: float) -> Program:
        """The program for R pipelines in all, each of which takes so much of what there is [there, pipelines]."""
        rows, none = np.vstack([takes, np.ones(takes.shape[1])]), np.zeros_like(self.there)
        return Program(rows, np.append(none, R), np.append(self.there, R), whole=whole, **options)

    def most_samples(self, pool: Sequence[Pipeline], program: Program, T: float) -> tuple[Array, Array] | None:
        """The samples that each pipeline does within T, and the prices at which parts of them do most; None where that is not the
        batch."""
        samples = np.array([min(p.done(T), self.most(p)) for p in pool], dtype=np.float64)
        found = program.least(-samples, np.where(samples > 0, np.inf, 0.0))
        return None if found is None or -found.cost < self.batch * (1 - 1e-9) else (samples, found.prices[:-1])

    def chosen(self, pool: Sequence[Pipeline], takes: Array, program: Program, R: int, T: float) -> Index | None:
        """How many of each pipeline do most within T, R in all, among the few that cost least at the prices of the linear
        program; None where that is not the batch."""
        possible = self.most_samples(pool, program, T)
        if possible is None:
            return None
        samples, prices = possible
        some = np.nonzero(samples > 0)[0]
        some = some[np.argsort(-(prices @ takes + samples)[some], kind="stable")[:PROGRAM_PIPELINES]]
        self.near = [pool[i] for i in some.tolist()]
        best = self.program(takes[:, some], R, whole=True, mip_max_nodes=NODES, mip_rel_gap=5e-3).least(-samples[some])
        if best is None or samples[some] @ best.x < self.batch * (1 - 1e-9):
            return None
        chosen = np.zeros(len(pool), dtype=np.int64)
        chosen[some] = np.round(best.x)
        return chosen

    def most(self, p: Pipeline) -> int:
        """Samples that a pipeline is given at most."""
        return min(int(MORE * p.samples) + p.b, self.batch)

    def make(
        self, mix: Mix, below: float = math.inf, ways: Sequence[int] = (), shares: list[int] | None = None
    ) -> Assembled | None:
        """About what the plan of so many pipelines of each kind takes, placed in the best of these ways, or of all; None if it
        cannot be, or would not be `below` this even if none waited for others. Which is best `play` says. Each replica has the
        samples of its share; without `shares`, as many as it does while the others do theirs."""
        shares = shares or self.shares(mix, below)
        if shares is None:
            return None
        for about, way, draft in sorted(self.drafts(mix, shares, ways), key=itemgetter(0)):
            if about < min(below, self.close(draft)):
                if not self.desk.fits(draft):
                    continue
                self.fresh.append((about, sum(count * len(p.stages) for p, count in mix), draft))
            made = Assembled(about, mix, way)
            insort(self.made, made, key=itemgetter(0))
            return made
        return None

    def play(self, most: int, *, last: bool = False) -> float:
        """Simulate so many of the plans made since the last time, those first that take least; one may be the best plan. Those of
        many tasks, and all when as many tasks as may be are simulated, wait for the `last` time. About what the best takes."""
        unlike, best = dict[tuple[float, int], Draft](), math.inf
        if last:
            self.fresh, self.waiting = [*self.waiting, *self.fresh], []
        for about, stages, draft in self.fresh:
            unlike.setdefault((about, stages), draft)
        self.fresh = []
        for (about, stages), draft in sorted(unlike.items(), key=itemgetter(0))[:most]:
            if about < self.close(draft):
                waits = self.budget.spent or self.desk.steps.tasks(draft) > LONG * TASKS
                if waits and self.desk.steps.shared and not last:
                    self.waiting.append((about, stages, draft))
                    best = min(best, about)
                else:
                    best = min(best, self._simulate(draft))
        return best

    def close(self, draft: Draft) -> float:
        """The seconds, about, up to which a draft is simulated."""
        return (WIDE if self.desk.steps.tasks(draft) <= CHEAP else CLOSE) * self.step

    def _simulate(self, draft: Draft) -> float:
        """The seconds that a draft takes, which may be the best plan; or takes at least, where that is more than the best."""
        least = self.desk.steps.least(draft, self.step)
        if least >= self.step:
            return least
        step = self.budget.step(draft, least)
        insort(self.played, (step, len(self.played), draft), key=itemgetter(0, 1))
        if step < self.step:
            self.step, self.draft = step, draft
        return step

    def all_can(self, R: int, take: Take) -> bool:
        """Whether there are the devices for so many pipelines with these stages."""
        return bool((R * (self.takes @ take) <= self.there).all())

    def uses(self, p: Pipeline) -> Array:
        """How much a pipeline takes of all that there is."""
        found: Array = self.takes @ np.array(p.take(self.types.V))
        return found

    def shares(self, mix: Mix, below: float = math.inf) -> list[int] | None:
        """Samples of each replica: the least time in which all do the batch, a sample less where that is too many; None
        where it is not `below` this."""
        pipelines, counts = zip(*mix, strict=True)
        R = sum(counts)

        def room(p: Pipeline, T: float) -> int:
            """The most samples that it does within T: from about as many on, by steps that double."""
            low, high, step = 0, self.most(p) + 1, p.b
            at = min(max(1, p.done(T)), high - 1)
            while high - low > 1:
                if self.seconds(p, at, R) <= T:
                    low, at = at, at + step
                else:
                    high, at = at, at - step
                step *= 2
                if not low < at < high:
                    at = (low + high) // 2
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

    @memoized
    def seconds(self, p: Pipeline, samples: int, R: int) -> float:
        """The seconds until a pipeline has done so many samples."""
        return self.reals.seconds(p, samples, R) if samples else 0.0

    def drafts(self, mix: Mix, shares: list[int], ways: Sequence[int] = ()) -> Iterator[tuple[float, int, Draft]]:
        """Drafts of a plan, placed in some ways (see `Places`), and about what each takes."""
        n, works, which = max(len(p.stages) for p, _ in mix), dict[tuple[Pipeline, int], int](), []
        each = [p for p, count in mix for _ in range(count)]
        for p, samples in zip(each, shares, strict=True):
            which.append(works.setdefault((p, samples), len(works)))
        node, kinds, R = self.desk.appraiser.links.node, np.array(which), len(each)
        alone = max(self.seconds(p, samples, R) for p, samples in works)

        def drafted(rows: Index, forwards: int) -> tuple[float, Draft]:
            """The draft, and about what it takes; with other warm-ups, where `forwards` says which."""
            deep = [(p if forwards < 0 else p._replace(forwards=forwards), samples) for p, samples in works]
            own = tuple(p.work(samples, self.types, n - len(p.stages)) for p, samples in deep)
            about = self.estimates.seconds(deep, kinds, node[rows])
            return about, Draft("auto", self.reals.schedule, rows, own, kinds)

        found = [(*drafted(rows, -1), way, rows) for way, rows in self.places.of(mix, ways)]
        for about, draft, way, _ in found:
            yield about, way, draft
        if found:  # where the best way waits for others, deeper warm-ups may help
            about, _, way, rows = min(found, key=itemgetter(0))
            for forwards in self.reals.forwards[1:].tolist() if about >= DEEP * alone else ():
                about, draft = drafted(rows, forwards)
                yield about, way, draft
