"""The last steps of local search: neighbours of one draft, each by what it really takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product

import numpy as np

from hetpipe.partitioners.pipelines.real import Reals
from hetpipe.partitioners.stage_kinds.plan_class import depth
from hetpipe.partitioners.step_times.desk import Budget, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Work, in_runs

SHORT = 8  # stages, of which any two are exchanged; of longer pipelines neighbours
BETTER = 1 - 1e-6  # of the step


class Polish:
    """Local search from drafts of one problem: at most `tries` neighbours, of which so many `tasks` are simulated; the first that
    is better is the next draft."""

    def __init__(self, desk: Desk, reals: Reals, tries: int, tasks: float) -> None:
        self.desk, self.reals, self.left = desk, reals, tries
        self.budget, self.L = Budget(desk.steps, tasks, 0, np.inf), reals.L
        self.kinds = {kind[1:]: v for v, kind in enumerate(reals.types.kinds)}
        self.seen = set[object]()

    def run(self, draft: Draft, step: float) -> tuple[Draft, float]:
        """The best that is found, and its step."""
        better = True
        while better:
            better = False
            for neighbour in self.neighbours(draft):
                key = neighbour.works, neighbour.which.tobytes(), neighbour.rows.tobytes()
                if key in self.seen:
                    continue
                if self.left <= 0 or self.budget.spent or self.desk.late():
                    return draft, step
                self.seen.add(key)
                self.left -= 1
                took = self.step(neighbour, step * BETTER)
                if took < step * BETTER:
                    draft, step, better = neighbour, took, True
                    break
        return draft, step

    def step(self, draft: Draft, below: float) -> float:
        """Seconds; infinite where it does not fit or is not `below` this."""
        return self.desk.step(draft, below, self.budget)

    def neighbours(self, draft: Draft) -> Iterator[Draft]:
        """All drafts that are one move apart."""
        if len(draft.works) > 1:
            yield from self.resized_all(draft)
        for i, work in enumerate(draft.works):
            yield from self.resized(draft, i, work)
        yield from self.shifted(draft)
        for i, work in enumerate(draft.works):
            yield from self.recut(draft, i)
            yield from self.swapped(draft, i, work)
            yield from self.changed(draft, i, work)

    def shifted(self, draft: Draft) -> Iterator[Draft]:
        """Drafts with samples moved from one pipeline to another."""
        count, which = np.bincount(draft.which, minlength=len(draft.works)).tolist(), draft.which.tolist()
        for i, j in permutations(range(len(draft.works)), 2):
            p, q = draft.works[i], draft.works[j]
            b, c = self.size(p), self.size(q)
            for k in sorted({1, p.samples % b, (p.samples - 1) % b + 1, c, c - q.samples % c, b} - {0}):
                if k >= p.samples:
                    continue
                less, more = self.given(p, -k), self.given(q, k)
                yield with_replicas(draft, {which.index(i): less, which.index(j): more})
                if count[i] > 1 and k * count[i] % count[j] == 0:
                    more = self.given(q, k * count[i] // count[j])
                    works = {i: less, j: more}
                    yield with_replicas(draft, {r: works[w] for r, w in enumerate(which) if w in works})

    def given(self, work: Work, samples: int) -> Work:
        """The work with so many samples more."""
        return self.with_runs(work, work.samples + samples, self.size(work), self.family(work))

    def size(self, work: Work) -> int:
        """The samples of the largest micro-batch."""
        return work.runs[0][0]

    def family(self, work: Work) -> int:
        """How many forwards more than the next one a stage does before its first backward, 0: all."""
        places, own = range(len(work.stages), 0, -1), work.in_flight(self.reals.schedule)
        same = (x for x in self.reals.forwards.tolist() if own == tuple(depth(x, place, work.m) for place in places))
        return next(same, 0)

    def with_runs(self, work: Work, samples: int, b: int, forwards: int) -> Work:
        """The work with other micro-batches and warm-up depths."""
        return work._replace(runs=in_runs(samples, b)).warmed(forwards, self.reals.schedule)

    def recut(self, draft: Draft, i: int) -> Iterator[Draft]:
        """Drafts with a cut a layer up or down, of one kind of pipeline or of all that are cut there."""
        work = draft.works[i]
        for s in range(1, len(work.stages)):
            for more in (1, -1):
                cut = work.ends[s]
                if not work.ends[s - 1] < cut + more < work.ends[s + 1]:
                    continue
                one = self.fitted(draft, i, moved(work, s, more))
                if one is not None:
                    yield with_works(draft, {i: one})
                every = {i: one}
                for j, other in enumerate(draft.works):
                    at = other.ends.index(cut) if j != i and cut in other.ends[1:-1] else 0
                    if 0 < at < len(other.stages) and other.ends[at - 1] < cut + more < other.ends[at + 1]:
                        every[j] = self.fitted(draft, j, moved(other, at, more))
                fitting = {j: work for j, work in every.items() if work is not None}
                if len(fitting) == len(every) > 1:
                    yield with_works(draft, fitting)

    def fitted(self, draft: Draft, i: int, work: Work) -> Work | None:
        """The work with recompute or offload where it does not fit otherwise; None if it does not fit."""
        for s in range(len(work.stages)):
            found = next(self.ways(draft, i, work, s), None)
            if found is None:
                return None
            work = found
        return work

    def ways(self, draft: Draft, i: int, work: Work, s: int) -> Iterator[Work]:
        """The work with stage s as it is, if that fits; else in the way that it has, or in another one that fits."""
        appraiser = self.desk.appraiser
        on = set(appraiser.type_of[draft.rows[draft.which == i][:, work.used[s]]].tolist())
        able = all((appraiser.types[k], work.groups[s], True) in self.kinds for k in on)
        ways = [(True, False)] * self.desk.problem.allow_recompute + [(False, True)] * able
        depth, own = work.in_flight(draft.schedule)[s], (work.recomputes[s], work.offloads[s])
        for recompute, offload in [(False, False), *sorted(ways, key=lambda way: way != own)]:
            tried = work.with_way(s, recompute=recompute, offload=offload)
            if all(appraiser.peak(k, s, tried, depth) <= appraiser.limits[k] for k in on):
                yield tried
                if not recompute and not offload:
                    return

    def changed(self, draft: Draft, i: int, work: Work) -> Iterator[Draft]:
        """Drafts in which a stage that does not fit as it is offloads instead of recomputing, or recomputes instead."""
        for s in range(len(work.stages)):
            for other in self.ways(draft, i, work, s):
                if other != work:
                    yield with_works(draft, {i: other})

    def resized_all(self, draft: Draft) -> Iterator[Draft]:
        """Drafts with other micro-batches or warm-up depths of all pipelines."""
        sizes = set.intersection(*(set(self.sizes(draft, i)) for i in range(len(draft.works))))
        for b, forwards in product([0, *sorted(sizes)], self.reals.forwards.tolist()):
            works = dict[int, Work]()
            for i, work in enumerate(draft.works):
                fitted = self.fitted(draft, i, self.with_runs(work, work.samples, b or self.size(work), forwards))
                if fitted is not None:
                    works[i] = fitted
            if len(works) == len(draft.works):
                yield with_works(draft, works)

    def resized(self, draft: Draft, i: int, work: Work) -> Iterator[Draft]:
        """Drafts with other micro-batches or warm-up depths of one kind of pipeline."""
        sizes, line = self.sizes(draft, i), self.line(draft, i)
        for b, forwards in product(sizes, self.reals.forwards.tolist()):
            other = self.fitted(draft, i, self.with_runs(work, work.samples, b, forwards))
            if other is not None:
                yield with_works(draft, {i: other})
        for b in sizes:
            found = self.reals.of(line, work.samples, b, len(draft.rows), ())
            if found is not None:
                yield with_works(draft, {i: found.work(work.samples, self.reals.types, len(work.ends) - 1 - len(work.stages))})

    def sizes(self, draft: Draft, i: int) -> list[int]:
        """The micro-batch sizes that were measured on all devices of a kind of pipeline."""
        take = np.bincount(self.line(draft, i), minlength=self.reals.types.V).tolist()
        return self.reals.sizes(tuple(take), draft.works[i].samples)

    def line(self, draft: Draft, i: int) -> tuple[int, ...]:
        """The kind of each stage of a kind of pipeline."""
        r = int(np.flatnonzero(draft.which == i)[0])
        work, appraiser = draft.works[i], self.desk.appraiser
        names = [appraiser.types[k] for k in appraiser.type_of[draft.rows[r]][work.used].tolist()]
        return tuple(self.kinds[seat] for seat in zip(names, work.groups, work.offloads, strict=True))

    def swapped(self, draft: Draft, i: int, work: Work) -> Iterator[Draft]:
        """Drafts with two stages of unlike kinds on each other's devices, with the best cuts."""
        line, n, R = self.line(draft, i), len(work.stages), len(draft.rows)
        pairs = combinations(range(n), 2) if n <= SHORT else ((s, s + 1) for s in range(n - 1))
        for s, t in pairs:
            if line[s] == line[t]:
                continue
            order = list(range(n))
            order[s], order[t] = t, s
            found = self.reals.of(tuple(line[x] for x in order), work.samples, self.size(work), R, ())
            if found is None:
                continue
            rows = draft.rows.copy()
            mine = draft.which == i
            used = np.array(work.used)
            rows[np.ix_(mine, used)] = draft.rows[np.ix_(mine, used[order])]
            yield with_works(draft._replace(rows=rows), {i: found.work(work.samples, self.reals.types, len(work.ends) - 1 - n)})


def moved(work: Work, s: int, more: int) -> Work:
    """The work with cut s so many layers on."""
    return work._replace(ends=(*work.ends[:s], work.ends[s] + more, *work.ends[s + 1 :]))


def with_works(draft: Draft, works: dict[int, Work]) -> Draft:
    """The draft with these works instead of those of these numbers."""
    return draft._replace(works=tuple(works.get(i, work) for i, work in enumerate(draft.works)))


def with_replicas(draft: Draft, replicas: dict[int, Work]) -> Draft:
    """The draft with the work of some replicas changed."""
    each = [replicas.get(r, draft.works[i]) for r, i in enumerate(draft.which.tolist())]
    numbers = {work: i for i, work in enumerate(dict.fromkeys(each))}
    return draft._replace(works=tuple(numbers), which=np.array([numbers[work] for work in each]))
