"""What a draft sends over network adapters: no step is shorter than the adapter that carries most needs for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.step_times.drafts import Index
from hetpipe.partitioners.step_times.links import Links
from hetpipe.predict.cost import Costs, occupied_seconds, rate_alone

Array = NDArray[np.float64]


class PipelineTraffic(NamedTuple):
    """Pipelines that do the same: the devices of each [pipelines, stages], the bytes of all activations at each boundary, on
    links for themselves [stages − 1], and how many first stages get no gradients back."""

    devices: Index
    carried: Array
    frozen: int = 0


class SumTraffic(NamedTuple):
    """Gradient sums of the same devices: these, the bytes of each, and when all have made the gradients of the first, if nothing
    is shared."""

    devices: Index
    sizes: list[float]
    made: float


class Traffic:
    """What the adapters of one problem's cluster carry."""

    def __init__(self, costs: Costs, links: Links) -> None:
        self.costs, self.links = costs, links
        cluster = costs.cluster
        self.capacity = np.array([cluster.adapter_rates[node.name] for node in cluster.nodes])

    def least(self, lanes: Sequence[PipelineTraffic], rings: Iterable[SumTraffic]) -> float:
        """Seconds before which not all sums can have ended: all that crosses an adapter one way takes as long as it carries
        bandwidth · seconds (see `contention`), and all sums that do, that long after the first of them can begin."""
        count, node = len(self.capacity), self.links.node
        sent, summed, begin = np.zeros((count, 2)), np.zeros(count), np.full(count, np.inf)
        for lane in lanes:
            at = node[lane.devices]
            away = (at[:, :-1] != at[:, 1:]) * lane.carried
            back = away * (np.arange(away.shape[1]) >= lane.frozen)
            for way, moved in enumerate((away, back)):  # activations leave the one and enter the other, gradients go back
                for out, ends in enumerate((at[:, :-1], at[:, 1:])):
                    sent[:, way ^ out] += np.bincount(ends.ravel(), moved.ravel(), minlength=count)
        for ring in rings:
            nodes = np.unique(node[ring.devices])
            if len(nodes) > 1:
                summed[nodes] += self._bytes(ring)
                begin[nodes] = np.minimum(begin[nodes], ring.made)
        after = begin + summed / self.capacity.min(axis=1)
        return float(max(((sent + summed[:, None]) / self.capacity).max(), after[summed > 0].max(initial=0.0)))

    def _bytes(self, ring: SumTraffic) -> float:
        """The bytes that these sums send from each of their nodes, as `Costs.ring` has them."""
        k, links, total = len(ring.devices), list(self.links.among(self.costs, ring.devices)), 0.0
        for part in (size / k for size in ring.sizes):
            link = max(links, key=lambda link: link.seconds(part))
            total += 2 * (k - 1) * occupied_seconds(link, part) * rate_alone(link, part)
        return total
