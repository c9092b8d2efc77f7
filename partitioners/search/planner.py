"""The search of `auto`: a bound (`lower`) whose pipelines are wishes, plans of what can be built of them (`assembly`), and
local search from the best (`improve`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import chain, compress, islice, product, zip_longest

import numpy as np

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import counted
from hetpipe.partitioners.bound.lower import Lower, Part
from hetpipe.partitioners.memory_fit.packing import Packer, samples_of
from hetpipe.partitioners.search.assembly import ABOVE, Assembled, Assembly, Wish
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.partitioners.search.improve import ENDS, Improvement
from hetpipe.partitioners.search.polish import Polish
from hetpipe.partitioners.stage_kinds.limit import PER_SECOND
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.step_times.desk import Desk
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Problem

NODES = (0.125, 0.25, 0.5, 1, 2, 4, 8)  # nodes, of whose devices a pipeline is
RUNGS, EVENEST = 1.2, 6  # replica counts whose equal pipelines are looked at; how many of its splits, the evenest first
BESIDE, NEXT = 1.25, 32  # times a number of replicas that was better, and a part of it: its neighbours
NEARLY = 1.05  # times the best step: plans from which the last moves may begin


class Planner:
    """The search of one problem: a plan, if one is found, and a bound. The search of plans ends when it is `late`. `prove` raises
    the bound after that, `until` this says so: it needs the best step, which says where the bound is worth raising."""

    def __init__(self, problem: Problem, late: Callable[[], bool] | None = None, until: Callable[[], bool] | None = None) -> None:
        self.problem, self.late, self.until = problem, late or problem.stopped, until or problem.stopped
        self.desk = Desk(problem, self.late)
        self.types = Types(problem)
        self.effort = EFFORTS[problem.effort].times(self.types.ways)
        self.over = self.late
        self.lower = Lower(self.types, fluid_bound(problem), lambda: self.over())
        self.workers = ThreadPoolExecutor()
        self.assembly = Assembly(self.desk, self.types, self.workers)
        self.parts, self.bound = list[Part](), 0.0  # of the bound, when the search of plans began

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.shutdown(cancel_futures=True)

    def run(self) -> Plan | None:
        """The plan of the search; None if it found none."""
        self.desk.say("bounding")
        self.bound = self.lower.run(math.inf, self.effort.before)  # with a T near a step wishes are worse
        self.parts = [replace(part) for part in self.lower.parts]
        self._search()
        return None if self.assembly.draft is None else self.assembly.draft.plan(self.problem)

    def _search(self) -> None:
        """Look at plans of all devices."""
        tried, near, far, least = set[int](), list[int](), self.numbers(), math.inf
        while (near or far) and len(tried) < self.effort.numbers and not self.late():
            in_turn = near if near and (len(tried) % 2 or not far) else far
            R, step = in_turn.pop(0), self.assembly.step
            if R in tried or not 1 <= R <= self.types.most:
                continue
            tried.add(R)
            self.desk.say(f"{counted(R, 'replica')}; best step {step:.4g} s")
            about = self.assembly.look(R, self.wishes(R), self.bound)
            if about < least or self.assembly.step < step:  # and others about as many
                by = max(1, R // NEXT)
                near, least = [R - by, R + by, round(R / BESIDE), round(R * BESIDE), *near], min(about, least)
        if not self.assembly.made and not self.late():
            self._pack()
        starts = dict[int, Assembled]()
        for made in self.assembly.made:
            starts.setdefault(sum(count for _, count in made.mix), made)
        for made in list(starts.values())[: self.effort.starts]:
            if self.late():
                break
            self.desk.say(f"local search; best step {self.assembly.step:.4g} s")
            Improvement(self.assembly, self.effort.tries).run(made)
        self.assembly.play(ENDS, last=True)
        self.polish()

    def _pack(self) -> None:
        """Make the plan of pipelines that memory holds, whatever time they take, if such are found for the whole batch."""
        reals, ways = self.assembly.reals, sorted({False, self.problem.allow_offload})
        for packing in (Packer(replace(self.problem, allow_offload=way)).packing(whole=True) for way in ways):
            if samples_of(packing) == self.problem.global_batch and not self.assembly.made:
                mix = tuple(Counter(reals.cut(x.stages, x.samples, x.b, len(packing)) for x in packing).items())
                self.assembly.make(mix, shares=[p.samples for p, count in mix for _ in range(count)])
                self.assembly.play(1)

    def polish(self) -> None:
        """Go on from the best plans that were simulated."""
        polish = Polish(self.desk, self.assembly.reals, self.effort.moves, self.effort.tasks)
        step = self.assembly.step
        for took, _, draft in self.assembly.played[: self.effort.finalists]:
            if self.late() or took > NEARLY * step:
                break
            self.desk.say(f"last moves; best step {self.assembly.step:.4g} s")
            better, seconds = polish.run(draft, took)
            if seconds < self.assembly.step:
                self.assembly.step, self.assembly.draft = seconds, better

    def prove(self, step: float) -> float:
        """The bound in seconds, raised as far as the rest of its effort goes, or the time limit, where the best plan of all takes
        `step`."""
        self.desk.say(f"bounding; best step {step:.4g} s")
        self.over = self.until
        return min(step, self.lower.run(step, max(self.effort.after, (self.problem.time_limit_seconds or 0.0) * PER_SECOND)))

    def numbers(self) -> list[int]:
        """The replica counts that are worth a look: in turns those at which the bound rests and those whose equal pipelines
        promise most."""
        parts = [x for x in self.parts if x.R and x.columns]
        parts.sort(key=lambda x: (min(x.possible, 2 * x.shown), x.R))
        found = list[int]()
        for pair in zip_longest((x.R for x in parts), self.promising()):
            found += [R for R in pair if R is not None]
        return list(dict.fromkeys(found))[: self.effort.numbers]

    def promising(self) -> list[int]:
        """Replica counts, some of which leave few devices idle, by about what the best of some plans of equal pipelines takes."""
        counts = Counter(device.type for device in self.problem.cluster.devices).values()
        ladder, R = list[int](), 1
        while self.types.most >= R:
            above = max(R + 1, round(R * RUNGS))
            rung = range(R, min(above, self.types.most + 1))
            ladder += [R, min(rung, key=lambda r: sum(n % r for n in counts))]
            R = above
        found = list[tuple[float, int]]()
        for R in dict.fromkeys(ladder):
            share, best = max(1, self.problem.global_batch // R), math.inf
            even, nodes = ([x for x in takes if self.assembly.all_can(R, x)] for takes in (self.even(R), self._nodes))
            away = [self.types.offloads(take) for take in even]
            some = [list(compress(even, own))[:EVENEST] for own in ([not x for x in away], away)]
            for take in (*chain.from_iterable(some), *nodes):
                pipeline = self.assembly.reals.quickest(take, share, R, ())
                if pipeline is not None:
                    best = min(best, self.assembly.seconds(pipeline, share, R))
            found.append((best, R))
        return [R for best, R in sorted(found) if math.isfinite(best)]

    def wishes(self, R: int) -> list[Wish]:
        """Wishes for so many replicas: the linear program's, those near an even split, those of one type, and those that fill
        nodes."""
        columns = next(x.columns for x in self.parts if x.low <= R <= x.high)
        found = list[Wish]()
        for x in list(columns)[: self.effort.wishes]:
            found += [Wish(x.take, (x.low + x.high) // 2, x.b), Wish(x.take, (x.low + x.high) // 2, x.b, x.line)]
        share = max(1, self.problem.global_batch // R)
        found += [Wish(take, share, 0) for take in (*self.even(R), *self.pure(R), *self.filling(share))]
        return list(dict.fromkeys(found))

    @cached_property
    def _nodes(self) -> list[tuple[int, ...]]:
        """Takes of a part of a node, of all of it, and of several like it, for each node that is unlike the others: they send
        little from node to node."""
        kinds, found = self.types.kinds, dict[tuple[int, ...], None]()
        shapes = list({tuple(sorted(node.devices.items())): node.devices for node in self.problem.cluster.nodes}.values())
        for devices, seat, times in product(shapes, sorted({(kind.offload, kind.degree) for kind in kinds}), NODES):
            same = [(kind.offload, kind.degree) == seat for kind in kinds]
            each = [int(times * devices.get(x.type, 0)) // seat[1] if own else 0 for x, own in zip(kinds, same, strict=True)]
            if 0 < sum(each) <= self.types.L:
                found[tuple(each)] = None
        return list(found)

    def filling(self, share: int) -> list[tuple[int, ...]]:
        """Takes that fill nodes and could do so many samples in about the best step so far."""
        return [take for take in self._nodes if self.assembly.reals.least(take, share) < ABOVE * self.assembly.step]

    def pure(self, R: int) -> list[tuple[int, ...]]:
        """Takes of one type only, of which up to R replicas use all devices."""
        there, found = self.types.limits[1], dict[tuple[int, ...], None]()
        for v in range(self.types.V):
            for r in range(1, R + 1):
                count = int(there[v] / r)
                if 0 < count <= self.types.L:
                    found[tuple(count if v == x else 0 for x in range(self.types.V))] = None
        return list(found)[: self.effort.pure]

    def even(self, R: int) -> list[tuple[int, ...]]:
        """Takes that have of each type none, or groups of one degree, as many as there are for each of R replicas, or one more;
        first those that use about all devices. As many that offload follow, if any can."""
        kept = self._even(R, [v for v, kind in enumerate(self.types.kinds) if not kind.offload])
        every = kept if self.types.ways == 1 else self._even(R, range(self.types.V))
        away = [take for take in every if self.types.offloads(take)]
        return kept[: self.effort.even] + away[: self.effort.even]

    def _even(self, R: int, kinds: Sequence[int]) -> list[tuple[int, ...]]:
        """Takes of some kinds, as `even` says, the evenest first."""
        there, each = self.types.limits[1], list[list[tuple[int, int]]]()
        for at in range(self.types.K):
            some = [v for v in kinds if self.types.kinds[v].at == at]
            options = [(v, round_(there[v] / R)) for v in some for round_ in (math.floor, math.ceil)]
            each.append(list(dict.fromkeys([(0, 0), *((v, count) for v, count in options if 0 < count <= there[v])])))
        found = dict[tuple[int, ...], int]()
        for choice in islice(product(*each), 50 * self.effort.even):
            take = np.zeros(self.types.V, dtype=np.int64)
            for v, count in choice:
                take[v] += count
            if 0 < take.sum() <= self.types.L:
                devices = sum(count * self.types.kinds[v].degree for v, count in choice)
                found.setdefault(tuple(take.tolist()), devices)
        every = len(self.problem.cluster.devices)
        return sorted(found, key=lambda take: abs(every - R * found[take]))
