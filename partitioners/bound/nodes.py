"""A step T that no plan of so many replicas is within, by what the network adapters of whole nodes carry.

All times are those of the whole batch. If a node does all samples of layers [lo, hi), and of no others, its adapters are busy for
`crossing` [lo, hi] seconds and its devices for `busy` [lo, hi]. If other nodes hold these layers, too, their gradients are summed
for `summed` [lo, hi] seconds more, however few samples the node does: of the batch it can do the part (T − summed) / crossing.
A linear program shares the layers out among the nodes, and its prices show that these cannot do the batch. docs/planner.md
("Adapters of whole nodes") has the proof."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Node
from hetpipe.partitioners.stage_kinds.memory import span
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.bounds import work_seconds
from hetpipe.planning.partition import never
from hetpipe.planning.programs import Program

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
SLACK = 1 + 1e-6  # adapters carry more by rounding, and sums are in another order than the simulator's
BISECTION_END = 1.004  # possible over ruled out, where bisection ends
ROUNDS = 60  # of prices for one T
MOST_KINDS = 24  # of nodes that are told apart


class NodeKind(NamedTuple):
    """Alike nodes: how many there are, and how many devices that stages can be put on each has. `crossing`, `busy` and `summed`
    are as the head of this file has them, of infinitely many replicas half of `summed`, and `fits` says which layers memory holds
    once [L + 1, L + 1]. Of each layer `seconds` are those of `busy`, `sums` those of `summed`, and `part` is the part of the
    node's memory that it takes [L]."""

    number: int
    devices: int
    crossing: Array
    busy: Array
    summed: Array
    fits: Flags
    seconds: Array
    sums: Array
    part: Array


class Able(NamedTuple):
    """What a node of one kind can do within T. `most` [L + 1, L + 1] is the part of the batch in layers [lo, hi): 0 where it
    cannot hold them, and 0 where these are all layers. `beside` are the seconds that its adapters have left where it holds all
    layers, and −1 where it cannot."""

    most: Array
    beside: float


class Run(NamedTuple):
    """A column of the linear program: a node of this kind does as much as it can of layers [lo, hi), and beside that, if it is
    `beside`, the whole batch in all layers."""

    kind: int
    lo: int
    hi: int
    beside: bool


class Prices(NamedTuple):
    """The price of the batch in each layer [L], all together 1, and of a second of all devices of a node of each kind [K]."""

    layers: Array
    seconds: Array


@dataclass(eq=False)
class NodeBound:
    """The bound of one problem."""

    types: Types
    late: Callable[[], bool] = never
    runs: dict[Run, None] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> list[NodeKind]:
        """The nodes. There are none, and nothing is shown, where transfers share no adapters (those that block), where it is
        unknown how many bytes cross them (measured links), and where a boundary carries nothing."""
        types, cluster, names = self.types, self.types.cluster, work_seconds(self.types.problem)[0]
        links = [*types.between, *(link for some in types.inside.values() for link in some)]
        if (
            len(cluster.nodes) < 2
            or not cluster.runtime_overhead.overlap_transfers
            or not types.problem.profile.output_bytes[:-1].all()
            or any(link.points is not None for link in links)
        ):
            return []
        nodes = [node for node in cluster.nodes if any(node.devices.get(name, 0) for name in names)]
        alike: dict[object, list[Node]] = {}
        for node in nodes:
            alike.setdefault((tuple(sorted(node.devices.items())), self._rate(node)), []).append(node)
        return [self._kind(some) for some in alike.values()] if len(alike) <= MOST_KINDS else []

    def _rate(self, node: Node) -> float:
        """The most bytes/s of half of all that enters and leaves a node. Where each boundary carries gradients as many bytes
        enter as leave."""
        rates = self.types.cluster.adapter_rates[node.name]
        return min(rates) if self.types.costs.first_trained == 0 else sum(rates) / 2

    def _kind(self, nodes: list[Node]) -> NodeKind:
        """What alike nodes are as a kind."""
        types, devices, rate, L = self.types, nodes[0].devices, self._rate(nodes[0]), self.types.L
        names, _, whole = work_seconds(types.problem)
        rows = np.array([row for name, row in zip(names, whole, strict=True) if devices.get(name, 0)])  # [types, L]
        number = np.array([devices[name] for name in names if devices.get(name, 0)])
        speed = 1 / np.maximum(rows.sum(axis=1), 1e-300)
        seconds = (speed[:, None] / (speed @ number) * rows).min(axis=0)
        half = np.where(np.arange(1, L) > types.costs.first_trained, 1.0, 0.5)
        sent = types.problem.global_batch * types.problem.profile.output_bytes[:-1] * half / rate
        ends, sums = np.concatenate([[0.0], sent, [0.0]]), np.diag(types.summed, 1) / rate
        part = self._held / sum(count * (types.limit[types.types.index(name)] + 1) for name, count in devices.items())
        fits = np.triu(span(part) <= SLACK, 1)
        return NodeKind(len(nodes), int(number.sum()), ends[:, None] + ends, span(seconds), span(sums), fits, seconds, sums, part)

    @cached_property
    def _held(self) -> Array:
        """The least bytes of a node that a layer takes, however its tensors are split [L]; none of one whose parameters other
        layers share."""
        types, own = self.types, self.types.cluster.runtime_overhead.device_bytes
        each = [kind.degree * (np.diag(types.memory(v)[0], 1) - own) for v, kind in enumerate(types.kinds)]
        tied = [layer.tied is not None for layer in types.problem.profile.layers]
        return np.where(tied, 0.0, np.maximum(np.min(each, axis=0), 0.0))

    def bound(self, low: int, high: int, least: float, most: float) -> float:
        """A step up to `most` that no plan of `low` to `high` replicas is below, as none is below `least`."""
        if not self.kinds or most <= BISECTION_END * least:
            return least
        if self.ruled_out(low, high, most):
            return most
        while most > BISECTION_END * least and not self.late():
            T = math.sqrt(least * most)
            least, most = (T, most) if self.ruled_out(low, high, T) else (least, T)
        return least

    def ruled_out(self, low: int, high: int, T: float) -> bool:
        """Whether no plan of `low` to `high` replicas ends within T."""
        able = [self._able(kind, low, high, T * SLACK) for kind in self.kinds]
        prices = Prices(np.full(self.types.L, 1 / self.types.L), np.zeros(len(self.kinds)))
        for _ in range(ROUNDS):
            worth = 0.0
            for x, kind in enumerate(self.kinds):
                own, runs = self._worth(x, able[x], prices)
                worth += kind.number * (prices.seconds[x] * T * SLACK + own)
                self.runs |= dict.fromkeys(runs)
            if worth * SLACK < 1:
                return True
            done, prices = self._program(able, T)
            if done >= 1 or worth <= done * SLACK or self.late():
                return False
        return False

    def _able(self, kind: NodeKind, low: int, high: int, T: float) -> Able:
        """What a node of the kind can do in plans of `low` to `high` replicas. If it does some layers in all replicas, it sums
        nothing of them over adapters; but then all samples of these cross them, if it does not do all layers."""
        each = 2 * (low - 1) / low  # of the bytes that are summed, over each node's adapters
        summed = each * kind.summed
        if low <= kind.devices:
            less = np.maximum(summed - each * self._most_alone(kind, low, T), 0.0)
            least = np.where(kind.fits & (less <= T), kind.crossing, np.inf).min()
            summed = np.where(less + least <= T, less, summed)
        can = kind.fits & (summed <= T)
        if high == 1:  # all samples, or none
            can &= (kind.crossing <= T) & (kind.busy <= T)
        most = np.where(can, (T - summed) / np.maximum(kind.crossing, 1e-300), 0.0)
        most[0, -1] = 0.0
        return Able(most, T - float(summed[0, -1]) if can[0, -1] else -1.0)

    def _most_alone(self, kind: NodeKind, low: int, T: float) -> float:
        """The most of `sums` of layers that such a node can do in all replicas, with all their work, and with memory for so many
        copies of them."""
        return min(_most(kind.sums, kind.seconds, T), _most(kind.sums, low * kind.part, 1.0))

    def _worth(self, x: int, able: Able, prices: Prices) -> tuple[float, list[Run]]:
        """The most that a node of kind x can do, at the prices of layers less those of its seconds; and the best runs, one for
        each first layer."""
        kind, before = self.kinds[x], np.append(0.0, np.cumsum(prices.layers))
        gains = before - before[:, None] - prices.seconds[x] * kind.busy  # [L + 1, L + 1]
        each = able.most * gains
        ends = each.argmax(axis=1)
        worth = float(each.max())
        found = [Run(x, lo, hi, False) for lo, hi in enumerate(ends.tolist()) if each[lo, hi] > 0]
        if able.beside >= 0:
            rates = np.where(able.most > 0, gains / np.maximum(kind.crossing, 1e-300), 0.0)
            lo, hi = divmod(int(rates.argmax()), len(rates))
            worth = max(worth, max(0.0, float(gains[0, -1])) + able.beside * float(rates[lo, hi]))
            found.append(Run(x, lo, hi, True))
        return max(worth, 0.0), found

    def _program(self, able: list[Able], T: float) -> tuple[float, Prices]:
        """The most that the nodes can do of every layer by these runs, in batches, and the prices of that."""
        L, K = self.types.L, len(self.kinds)
        columns = [self._column(run, able[run.kind]) for run in self.runs]
        rows = np.array([*columns, np.append(np.full(L, -1.0), np.zeros(2 * K))]).T
        counts = np.array([kind.number for kind in self.kinds], dtype=np.float64)
        low, high = np.append(np.zeros(L), np.full(2 * K, -np.inf)), np.concatenate([np.full(L, np.inf), counts, T * counts])
        found = Program(rows, low, high).least(np.append(np.zeros(len(columns)), -1.0))
        layers = np.zeros(L) if found is None else np.maximum(found.prices[:L], 0.0)
        if found is None or layers.sum() <= 0:
            return math.inf, Prices(layers, np.zeros(K))
        return -found.cost, Prices(layers / layers.sum(), np.maximum(-found.prices[L + K :], 0.0))

    def _column(self, run: Run, able: Able) -> Array:
        """What a node does by a run: of each layer, then of the nodes of each kind, then seconds of their devices [L + 2K]. Where
        there is no such run within T it does nothing."""
        L, K, kind = self.types.L, len(self.kinds), self.kinds[run.kind]
        found, most = np.zeros(L + 2 * K), float(able.most[run.lo, run.hi])
        if run.beside and most > 0:
            most = max(0.0, able.beside) / float(kind.crossing[run.lo, run.hi])
        found[run.lo : run.hi] = most
        found[:L] += run.beside and able.beside >= 0
        found[L + run.kind], found[L + K + run.kind] = 1.0, found[:L] @ kind.seconds
        return found


def _most(gains: Array, each: Array, limit: float) -> float:
    """The most of some gains, or of parts of them, each of which takes so much of the limit."""
    order = np.argsort(each / np.maximum(gains, 1e-300))
    left = np.maximum(limit - np.append(0.0, np.cumsum(each[order])[:-1]), 0.0)
    return float(gains[order] @ np.minimum(1.0, left / np.maximum(each[order], 1e-300)))
