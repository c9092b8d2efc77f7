"""Real pipelines of a composition: the orders and cuts with the least bounds, simulated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._columns import BUDGET, Columns, Counts
from hetpipe.partitioners._enumerate import FIRST, LO, USED, WHOLE
from hetpipe.partitioners._kinds import Array
from hetpipe.partitioners._loads import Index, Loads
from hetpipe.partitioners._space import allowed_families, depth_of, families_of
from hetpipe.predict.cost import Costs
from hetpipe.predict.simulator import pipeline_times, replica_costs
from hetpipe.spec.plan import ReplicaPlan, StagePlan

ALIKE, SIMULATED = 4, 30  # partial pipelines kept that hold the same layers on the same devices; and ends simulated
PLACE, SIMULATION = 1000, 5000  # partial pipelines that take as long as the tables of a place, and as one simulation


class Path(NamedTuple):
    """Kinds of the stages, first to last, and the layers between which they are cut."""

    kinds: tuple[int, ...]
    cuts: tuple[int, ...]


class Pipeline(NamedTuple):
    """A path with samples, simulated: a replica on devices that stand for others of their classes, when each stage's
    last backward ends, and the longest optimizer."""

    path: Path
    used: Counts
    size: int
    samples: int
    replica: ReplicaPlan
    ready: tuple[float, ...]
    optimizer: float

    def end(self, sums: Array) -> float:
        """When a step with this pipeline ends at least, with these sums [V, lo, hi]."""
        pairs = zip(self.path.cuts, self.path.cuts[1:], strict=False)
        late = max(r + float(sums[v, lo, hi]) for r, v, (lo, hi) in zip(self.ready, self.path.kinds, pairs, strict=True))
        return late + self.optimizer


class Paths:
    """Search and simulation of single pipelines; each is simulated once."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.stages, self.kinds = columns, columns.stages, columns.kinds
        self.families = allowed_families(self.kinds.problem)
        self.costs: Costs = self.kinds.costs
        self._known: dict[tuple[Path, int, int], Pipeline | None] = {}
        self.work = 0  # partial pipelines looked at, or as many as would have taken as long

    def search(self, T: float, R: int, used: Counts, size: int, samples: int) -> list[Path]:
        """Paths over exactly these devices that might end within T, least bound first. Devices have prices, by their speeds:
        layers left must not cost more than devices left."""
        columns, limit = self.columns, np.array(used)
        row, prices = columns.coarse.row(size, samples), columns.budget(columns.speeds[size], limit)
        step = columns.step(T, R, Loads(*(np.array([x]) for x in (size, samples, BUDGET + 1, row))))
        to_go, alive = columns.to_go(step, prices, 0.0)
        self.work += PLACE
        if not alive.all():
            return []
        rows, values = columns.nothing(step)
        least = self.stages.least[size].sum(axis=1)
        levels: list[Index] = []
        found: list[tuple[float, Path]] = []
        for place in range(1, columns.L + 1):
            rows, values, seen = columns.extended(step, limit, rows, values, place, prices, to_go)
            self.work += seen + PLACE
            keep = (rows[:, LO] == 0) == (rows[:, USED:] == limit).all(axis=1)
            rows, values = rows[keep], values[keep]
            end = values[:, [FIRST, WHOLE]].max(axis=1) + least[rows[:, LO]]
            levels.append(rows)
            found += [(float(end[j]), self._path(levels, j)) for j in np.flatnonzero(rows[:, LO] == 0).tolist()]
            keep = self._fewer(rows, end)
            rows, values = rows[keep], values[keep]
            levels[-1] = rows
            if not len(rows):
                break
        return [path for _, path in sorted(found)[:SIMULATED]]

    @staticmethod
    def _fewer(rows: Index, end: Array) -> Index:
        """The best few of those that hold the same layers on the same devices, and are to go on."""
        order = np.lexsort((end, *rows[:, USED:].T, rows[:, LO]))
        ordered = rows[order][:, [LO, *range(USED, rows.shape[1])]]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        start = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        kept: Index = order[(np.arange(len(order)) - start < ALIKE) & (ordered[:, 0] > 0)]
        return kept

    def _path(self, levels: list[Index], j: int) -> Path:
        """Back from a complete row to the last stage."""
        kinds, cuts = [], []
        for rows in reversed(levels):
            _, lo, before, v = rows[j, :USED].tolist()
            cuts.append(lo)
            kinds.append(v)
            j = before
        return Path(tuple(kinds), (*cuts, self.columns.L))

    def simulated(self, path: Path, size: int, samples: int) -> Pipeline | None:
        """With the fastest of the allowed schedules that fit in memory; None if none does."""
        key = (path, size, samples)
        if key not in self._known:
            self.work += SIMULATION
            self._known[key] = self._simulated(path, size, samples)
        return self._known[key]

    def _simulated(self, path: Path, size: int, samples: int) -> Pipeline | None:
        b, n = self.stages.sizes[size], len(path.kinds)
        sizes = (b,) * (samples // b) + ((samples % b,) if samples % b else ())
        best: tuple[ReplicaPlan, tuple[float, ...]] | None = None
        for family in families_of(self.families, n, len(sizes)):
            replica = self._replica(path, sizes, tuple(depth_of(family, n - s, len(sizes)) for s in range(n)))
            if replica is None:
                continue
            depths = replica.depths("gpipe" if self.families == ("gpipe",) else "1f1b")
            ready = tuple(time.backward[-1] for time in pipeline_times(replica_costs(self.costs, replica), depths))
            if best is None or max(ready) < max(best[1]):
                best = replica, ready
        if best is None:
            return None
        replica, ready = best
        return Pipeline(path, self._used(path), size, samples, replica, ready, self._optimizer(path))

    def _used(self, path: Path) -> Counts:
        used = [0] * self.kinds.K
        for v in path.kinds:
            used[self.columns.at[v]] += int(self.columns.degree[v])
        return tuple(used)

    def _optimizer(self, path: Path) -> float:
        spans = zip(path.cuts, path.cuts[1:], strict=False)
        return max(float(self.stages.optimizer[v, lo, hi]) for v, (lo, hi) in zip(path.kinds, spans, strict=True))

    def _replica(self, path: Path, sizes: tuple[int, ...], depths: tuple[int, ...]) -> ReplicaPlan | None:
        """On the first devices of each class, recompute only where a stage does not fit without."""
        free = [self._devices(k, number) for k, number in enumerate(self._used(path))]
        stages = []
        for s, v in enumerate(path.kinds):
            kind, lo, hi = self.kinds.kinds[v], path.cuts[s], path.cuts[s + 1]
            fits = [r for r in (False, True) if self._fits(v, lo, hi, sizes, depths[s], r)]
            if not fits:
                return None
            devices = tuple(free[kind.at].pop(0) for _ in range(kind.degree))
            plain = self.families == ("gpipe",) or depths[s] == max(1, min(len(path.kinds) - s, len(sizes)))
            stages.append(
                StagePlan(
                    layers=(lo, hi), devices=devices, recompute=fits[0], warmup=None if plain else depths[s]
                )
            )
        return ReplicaPlan(microbatch_sizes=sizes, stages=tuple(stages))

    def _fits(self, v: int, lo: int, hi: int, sizes: tuple[int, ...], depth: int, recompute: bool) -> bool:
        kind = self.kinds.kinds[v]
        if recompute and not self.kinds.problem.allow_recompute:
            return False
        memory = self.costs.stage_memory(
            kind.type, lo, hi, samples=sum(sizes), recompute=recompute, degree=kind.degree
        )
        return memory.peak(sizes, depth) <= self.kinds.classes[kind.at].limit

    def _devices(self, k: int, number: int) -> list[str]:
        """The first devices of a class, node by node."""
        found: list[str] = []
        for node in self.kinds.classes[k].nodes:
            found += self.kinds.ids[node.name, self.kinds.classes[k].type]
            if len(found) >= number:
                break
        return found

