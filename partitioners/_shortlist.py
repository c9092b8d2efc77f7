"""What a plan faster than T could be made of: for each number of replicas, the few compositions and loads that are left.

For a step T and R replicas, let N_c be the most samples of a pipeline of composition c (devices of each class, see `_kinds`)
beside R − 1 others, and π, ρ ≥ 0 prices with N_c ≤ P_c = π·c + ρ for every composition. With n_k devices of class k, the
replicas of a plan that ends within T have Σ P_c ≤ V = π·n + ρR together, and do B samples. So

- if V < B, no plan of R replicas ends within T;
- else each of its replicas does n > P_c − (V − B) samples: the others do at most V − P_c.

The prices are the dual of the linear program of `_master`, so that V is least; what is left is listed by `_columns`, whose
bounds are lower bounds of every pipeline of the cluster. Replica counts are looked at one by one, since the more there are, the
longer their gradient sums: with the sums of one, little would be left out for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._columns import Counts, Effort
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._master import NARROW, WIDE, Master, Prices, Range
from hetpipe.partitioners._space import Load, Space

ROUNDS = 20
COLUMNS = 200  # found at a time
NEAR = 1.002  # of the least V: good enough
CANDIDATES = 1_500_000  # partial pipelines looked at for one shortlist, at first: about 1 s
ROOM = 1e-6  # of a sample


class Listed(NamedTuple):
    """Of one replica count: the fewest and the most samples of each composition (devices of each class), and the (micro-batch
    size, samples) of all their pipelines."""

    samples: dict[Counts, tuple[int, int]]
    loads: frozenset[tuple[int, int]]
    single: frozenset[int]  # samples done as one micro-batch


class Shortlist:
    """What is left of a problem, in the counts of `_space`: stages of each kind."""

    def __init__(self, space: Space, kinds: Kinds, listed: dict[int, Listed]) -> None:
        self.listed, self.replicas = listed, frozenset(listed)
        self.devices = np.zeros((space.K, kinds.K), dtype=np.int64)  # of each class in a stage of each kind
        for k, kind in enumerate(space.kinds):
            for i, found in enumerate(kinds.classes):
                if found.type == kind.type and any(node.name == kind.node for node in found.nodes):
                    self.devices[k, i] = kind.degree
        self.used = np.array(sorted({c for part in listed.values() for c in part.samples}))

    def has(self, c: Counts) -> bool:
        """Whether a composition, or a part of one, is on the list."""
        return bool((np.array(c) @ self.devices <= self.used).all(axis=1).any())

    def loads(self, sizes: Sequence[int]) -> dict[int, list[int]]:
        """The samples on the list by micro-batch size; 0: those done as one micro-batch."""
        found: dict[int, set[int]] = {0: set(), **{b: set() for b in sizes}}
        for b, n in frozenset[tuple[int, int]]().union(*(part.loads for part in self.listed.values())):
            found[b if n > b else 0].add(n)
        return {b: sorted(samples) for b, samples in found.items()}

    def leaves(self, c: Counts, ranks: int, loads: Sequence[Load]) -> NDArray[np.bool_]:
        """Which loads [ranks, loads] a composition may have in plans of 1 replica, 2 or more, 3, 4, …, `ranks` or more."""
        used = tuple((np.array(c) @ self.devices).tolist())
        found = np.zeros((ranks, len(loads)), dtype=bool)
        for R, part in self.listed.items():
            least, most = part.samples.get(used, (1, 0))
            samples = np.array([load.samples for load in loads])
            there = [load.samples in part.single if load.m == 1 else (load.b, load.samples) in part.loads for load in loads]
            rows = {min(R, ranks) - 1, min(R - 1, 1)}
            found[list(rows)] |= np.array(there, dtype=bool) & (least <= samples) & (samples <= most)
        return found


class Shortlists:
    """Shortlists of one problem."""

    def __init__(self, master: Master) -> None:
        self.master, self.kinds = master, master.kinds
        self.most = self.kinds.most
        self.candidates = CANDIDATES
        self.prices: dict[int, Prices] = {}  # the last ones of each replica count

    def below(self, T: float, late: Callable[[], bool], most: float = math.inf) -> dict[int, Listed] | None:
        """By replica count, what plans that end within T could be made of; counts that are ruled out are left out. None where
        this takes too long, or more than so many candidates."""
        self.until = self.master.columns.seen + min(most, self.candidates)
        self.known: dict[Counts, int] = {}  # samples; from the most replicas down, since beside fewer more is possible
        found = {}
        for R in range(self.most, 0, -1):
            if late():
                return None
            prices, worth = self._settle(T, R)
            if math.isinf(worth):
                return None
            if worth >= 1.0:
                listed = self._list(T, R, prices, worth)
                if listed is None:
                    return None
                if listed.samples:
                    found[R] = listed
        return found

    def _effort(self, columns: float = math.inf) -> Effort:
        return Effort(columns=columns, candidates=self.until)

    def _settle(self, T: float, R: int) -> tuple[Prices, float]:
        """Prices of all devices and R replicas just below B together, and how much more than that any pipeline does at most;
        0.0 where none does more: no plan of R replicas ends within T. Infinite where that was not found out."""
        master, counts = self.master, Range(R, R)
        center, worth = master.scaled(self.prices.get(R, master.prices), R), math.inf
        prices = center
        for _ in range(ROUNDS):
            found, everything = master.found(T, counts, prices, self._effort(COLUMNS), WIDE)
            if not found and everything:
                self.prices[R] = master.prices = prices
                return prices, 0.0
            for column in found:
                self.known[column.used] = max(column.samples, self.known.get(column.used, 0))
            most = master.worth(found, prices)
            if everything and most < worth:
                center, worth = prices, most
            if master.columns.seen > self.until:
                break
            total, new = self._dual(R, prices)
            if worth <= NEAR * total / master.batch:
                break
            prices = Prices((new.device + center.device) / 2, (new.replica + center.replica) / 2)
        self.prices[R] = master.prices = center
        return center, worth

    def _dual(self, R: int, last: Prices) -> tuple[float, Prices]:
        """The most samples of the compositions known, and the dual prices."""
        comps = np.array(list(self.known), dtype=np.float64).reshape(-1, self.kinds.K)
        capacity = np.array(list(self.known.values()), dtype=np.float64)
        solved = self.master.filled(comps, capacity, R, last)
        return (math.inf, last) if solved is None else (float(capacity @ solved[0]), solved[1])

    def _list(self, T: float, R: int, prices: Prices, worth: float) -> Listed | None:
        """Everything worth nearly its price."""
        columns, batch = self.master.columns, self.master.batch
        device, replica = prices.device * worth, prices.replica * worth
        fixed = replica - (worth - 1.0) * batch - ROOM
        step = columns.step(T, R, NARROW * NARROW)
        _, hit, everything = columns.search(step, device, fixed, self._effort())
        if not everything:
            return None
        step = columns.step(T, R, hit.split(1.0))
        found, hit, everything = columns.search(step, device, fixed, self._effort())
        if not everything:
            return None
        samples = {
            c.used: (max(1, math.ceil(master_price - ROOM)), c.samples)
            for c in found
            for master_price in [self.master.price(c.used, Prices(device, fixed))]
        }
        sizes = columns.stages.sizes
        loads = frozenset((sizes[i], n) for i, n in zip(hit.size.tolist(), hit.low.tolist(), strict=True))
        return Listed(samples, loads, frozenset(n for b, n in loads if n <= b))
