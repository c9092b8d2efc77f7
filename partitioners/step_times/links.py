"""The links between a cluster's devices as numbers, for arrays of devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.files.messages import InputError
from hetpipe.partitioners.step_times.drafts import Index
from hetpipe.predict.cost import Costs


class Links:
    """The links of a cluster as numbers, equal ones the same; −1 where none is known."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.all = cluster, list[Link]()
        self._number: dict[object, int] = {}
        self.names = names = [node.name for node in cluster.nodes]
        place = {name: i for i, name in enumerate(names)}
        self.node = np.array([place[device.node] for device in cluster.devices])
        self.inside = np.array([self._of(name, name) for name in names])
        self.other = -1 if cluster.link is None else self._numbered(cluster.link)
        own = {(place[a], place[b]): self._of(a, b) for a, b in (link.between for link in cluster.links) if a != b}
        codes = {min(pair) * len(names) + max(pair): number for pair, number in own.items()}
        self.codes = np.array(sorted(codes))
        self.own = np.array([codes[code] for code in sorted(codes)])
        self.between = {self.other, *codes.values()} - {-1}
        self._last: tuple[Index | None, list[Link]] = (None, [])

    def _of(self, a: str, b: str) -> int:
        try:
            return self._numbered(self.cluster.link_between(a, b))
        except InputError:
            return -1

    def _numbered(self, link: Link) -> int:
        number = self._number.setdefault((link.bandwidth, link.latency, link.points), len(self.all))
        if number == len(self.all):
            self.all.append(link)
        return number

    def numbers(self, a: Index, b: Index) -> Index:
        """The numbers of the links between devices, pair by pair."""
        x, y = self.node[a], self.node[b]
        found = np.where(x == y, self.inside[x], self.other)
        if len(self.codes):
            wanted = np.minimum(x, y) * len(self.inside) + np.maximum(x, y)
            at = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
            found = np.where((self.codes[at] == wanted) & (x != y), self.own[at], found)
        return found

    def among(self, costs: Costs, devices: Index) -> Iterable[Link]:
        """The links among these devices, as `Costs.links_among` has them. The last are kept, since the same devices sum bucket
        after bucket."""
        if self._last[0] is not devices:
            self._last = devices, list(self._among(costs, devices))
        return self._last[1]

    def _among(self, costs: Costs, devices: Index) -> Iterable[Link]:
        count = np.bincount(self.node[devices], minlength=len(self.names))
        nodes = np.nonzero(count)[0]
        numbers = {self.other} if len(nodes) > 1 else set()
        numbers.update(np.unique(self.inside[count > 1]).tolist())
        if len(self.codes) or -1 in numbers:
            return costs.links_among({self.names[node]: int(count[node]) for node in nodes})
        return [self.all[number] for number in numbers]

    def link(self, number: int) -> Link:
        """The link of a number; InputError that says which link is not known."""
        if number < 0:
            self.refuse()
        return self.all[number]

    def refuse(self) -> None:
        """InputError that says which link is not known."""
        for name, link, node in zip(self.names, self.inside.tolist(), self.cluster.nodes, strict=True):
            if link < 0 and sum(node.devices.values()) > 1:
                self.cluster.link_between(name, name)
        for a, b in combinations(self.names, 2):
            self.cluster.link_between(a, b)
