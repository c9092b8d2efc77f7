"""Where the stages of a plan's pipelines are put: on the nodes of a cluster, in some ways, compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.pipelines.real import Pipeline
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.predict.compiled import compiled, get_ready, once

Index = NDArray[np.int64]
TILES = (1, 2, 4)  # stages in a row on one node, beside as many as it has room for


class Places:
    """The places of one problem. `kinds` and `nodes` are the numbers of each device's type and node."""

    def __init__(self, types: Types, kinds: Index, nodes: Index) -> None:
        self.types, self.nodes = types, nodes
        pairs = np.stack([kinds, nodes], axis=1)
        blocks, self.first, self.count = np.unique(pairs, axis=0, return_index=True, return_counts=True)  # devices side by side
        order = np.lexsort((self.first, blocks[:, 0]))
        self.first, self.count, self.type_of = self.first[order], self.count[order], blocks[order, 0]

    def of(self, mix: Sequence[tuple[Pipeline, int]], ways: Sequence[int] = ()) -> Iterator[tuple[int, Index]]:
        """The devices of each stage [R, stages], of so many pipelines of each kind: the first one's, where there is no stage. In
        all ways that differ, or in these: one pipeline after the other (0), or in tiles of so many stages."""
        lengths = [length for length in TILES if length < max(self.types.node_size)]
        width, seen = max(len(p.stages) for p, _ in mix), set[bytes]()
        for way in ways or (0, self.types.L, *lengths):
            starts, at, degrees, replicas, stages = self._tiles(mix, way) if way else self._line(mix)
            rows, free = np.full((sum(count for _, count in mix), width), -1), (self.first.copy(), self.count.copy())
            if not put(starts, at, degrees, replicas, stages, *free, self.type_of, way == 0, rows):
                continue
            rows = np.where(rows < 0, rows[:, :1], rows)
            nodes = self.nodes[rows].tobytes()
            if nodes not in seen:
                seen.add(nodes)
                yield way, rows

    def _line(self, mix: Sequence[tuple[Pipeline, int]]) -> tuple[Index, ...]:
        """Runs of one stage each: one pipeline after the other, on the nodes in their order; larger groups first."""
        kinds = np.concatenate([np.tile(p.stages, count) for p, count in mix])
        stages = np.concatenate([np.tile(np.arange(len(p.stages)), count) for p, count in mix])
        replicas = np.cumsum(stages == 0) - 1
        degrees = np.array([kind.degree for kind in self.types.kinds])[kinds]
        order = np.argsort(-degrees, kind="stable")
        starts = np.arange(len(order) + 1)
        return starts, self.types.at[kinds][order], degrees[order], replicas[order], stages[order]

    def _tiles(self, mix: Sequence[tuple[Pipeline, int]], length: int) -> tuple[Index, ...]:
        """Tiles: `length` stages of one type in a row, of as many replicas with the same layers there as a node has room for.
        The longer, the fewer outputs leave a node; the shorter, the fewer gradient sums. The largest groups, then the largest
        tiles first."""
        together, first = dict[tuple[int, int, int, int], list[tuple[Index, int]]](), 0
        for p, count in mix:
            for v, run in groupby(range(len(p.stages)), key=p.stages.__getitem__):
                at = list(run)
                for tile in (at[i : i + length] for i in range(0, len(at), length)):
                    key = v, p.ends[tile[0]], p.ends[tile[-1] + 1], len(tile)
                    together.setdefault(key, []).append((np.arange(first, first + count), tile[0]))
            first += count
        runs = list[tuple[int, int, int, Index, Index]]()  # −degree, −stages, type, replicas, stages
        for (v, _, _, n), same in together.items():
            kind = self.types.kinds[v]
            room = max(1, self.types.node_size[kind.at] // kind.degree // n)
            replicas = np.concatenate([which for which, _ in same])
            begins = np.concatenate([np.full(len(which), s) for which, s in same])
            for i in range(0, len(replicas), room):
                stages = (begins[i : i + room, None] + np.arange(n)).ravel()
                runs.append((-kind.degree, -len(stages), kind.at, np.repeat(replicas[i : i + room], n), stages))
        runs.sort(key=lambda run: run[:2])
        starts = np.cumsum([0, *(-run[1] for run in runs)])
        return (
            starts,
            np.array([run[2] for run in runs]),
            np.array([-run[0] for run in runs]),
            np.concatenate([run[3] for run in runs]),
            np.concatenate([run[4] for run in runs]),
        )


@once
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    get_ready(lambda: put(np.arange(2), zero, one, zero, zero, zero.copy(), one.copy(), zero, False, np.zeros((1, 1), np.int64)))


@compiled
def put(
    starts: Index,
    kinds: Index,
    degrees: Index,
    replicas: Index,
    stages: Index,
    first: Index,
    count: Index,
    type_of: Index,
    in_order: bool,
    rows: Index,
) -> bool:
    """Put each run of stages of one type on the node that has the least room for it, or parts of it on those that have most; or
    (`in_order`) on the first that has room. Blocks are devices of one type on one node: from the `first` on, `count` of them are
    free."""
    for x in range(len(kinds)):
        at, end, degree = starts[x], starts[x + 1], degrees[x]
        while at < end:
            best, fits = -1, False
            for block in range(len(count)):
                if type_of[block] != kinds[x] or count[block] < degree:
                    continue
                enough = count[block] >= (end - at) * degree
                better = best < 0 or (not fits if enough else False)
                if best >= 0 and enough == fits:
                    better = count[block] < count[best] if enough else count[block] > count[best]
                if better:
                    best, fits = block, enough
                if in_order:
                    break
            if best < 0:
                return False
            for _ in range(min(end - at, count[best] // degree)):
                rows[replicas[at], stages[at]] = first[best]
                first[best] += degree
                count[best] -= degree
                at += 1
    return True
