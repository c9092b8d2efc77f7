"""Nodes that can be exchanged: compositions, and groupings of them, that differ by nothing else are looked at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.space import Counts, Index, Space

Blocks = tuple[tuple[int, ...], ...]


class Turned(NamedTuple):
    """The first of all compositions that exchanges of nodes make of one, and its kind in the place of each."""

    comp: Counts
    kinds: tuple[int, ...]


class Symmetry:
    """The nodes of a space, each with its kinds of stage, in blocks of those that can be exchanged: the same devices and
    adapters, the same link inside, and the same links to all others."""

    def __init__(self, space: Space) -> None:
        self.space = space
        names = list(dict.fromkeys(kind.node for kind in space.kinds))
        self.kinds = [[k for k, kind in enumerate(space.kinds) if kind.node == name] for name in names]
        blocks: list[list[int]] = []
        for node in range(len(names)):
            alike = next((block for block in blocks if self._alike(block[0], node)), None)
            if alike is None:
                blocks.append([node])
            else:
                alike.append(node)
        self.blocks: Blocks = tuple(tuple(block) for block in blocks if len(block) > 1)

    def _alike(self, a: int, b: int) -> bool:
        space, cluster = self.space, self.space.problem.cluster
        ours, theirs = self.kinds[a], self.kinds[b]
        looks = [[(space.kinds[k].type, len(space.kinds[k].devices), *space.seat(k)) for k in x] for x in (ours, theirs)]
        if looks[0] != looks[1]:
            return False
        names = [space.kinds[x[0]].node for x in (ours, theirs)]
        if sum(count for _, count in {(kind, count) for kind, count, *_ in looks[0]}) > 1:
            inside = [cluster.link_between(name, name) for name in names]
            if inside[0] != inside[1]:
                return False
        adapters = [(node.adapter, node.adapter_count) for name in names for node in cluster.nodes if node.name == name]
        if adapters[0] != adapters[1]:
            return False
        swapped = np.arange(space.K)
        swapped[ours], swapped[theirs] = theirs, ours
        return bool((space.link_ids[np.ix_(swapped, swapped)] == space.link_ids).all())

    def codes(self, comps: list[Counts]) -> Index:
        """What each composition has of each node, as a number that rises with its counts in their order, [C, nodes]."""
        counts, base = np.array(comps), max(self.space.counts, default=0) + 1
        return np.stack([counts[:, kinds] @ base ** np.arange(len(kinds))[::-1].astype(np.int64) for kinds in self.kinds], axis=1)

    @memoized
    def turned(self, c: Counts) -> Turned:
        """The first composition of those that exchanges make of this one: within each block, nodes with less come first."""
        kinds = list(range(len(c)))
        for block in self.blocks:
            order = sorted(block, key=lambda node: [c[k] for k in self.kinds[node]])
            for node, source in zip(block, order, strict=True):
                for new, old in zip(self.kinds[node], self.kinds[source], strict=True):
                    kinds[old] = new
        comp = [0] * len(c)
        for old, new in enumerate(kinds):
            comp[new] = c[old]
        return Turned(tuple(comp), tuple(kinds))

    @staticmethod
    def rising(codes: Index, blocks: Blocks) -> NDArray[np.bool_]:
        """Compositions that have no more of a node than of the next one in its block, [C]."""
        found = np.ones(len(codes), dtype=bool)
        for block in blocks:
            found &= (codes[:, block[:-1]] <= codes[:, block[1:]]).all(axis=1)
        return found

    @staticmethod
    def told_apart(codes: Index, blocks: Blocks) -> Blocks:
        """The blocks when one composition [nodes] is chosen: nodes of which it has the same can still be exchanged."""
        found: list[tuple[int, ...]] = []
        for block in blocks:
            same: dict[int, list[int]] = {}
            for node in block:
                same.setdefault(int(codes[node]), []).append(node)
            found += [tuple(nodes) for nodes in same.values() if len(nodes) > 1]
        return tuple(found)
