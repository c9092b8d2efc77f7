"""A cluster and its profile as a run has found them: devices that are no longer as fast as their type are of types of their
own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from statistics import geometric_mean
from typing import NamedTuple

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.measuring.discover import with_own_types

ALIKE = 1.1  # times as slow: devices of one type that differ by less are alike


class Seen(NamedTuple):
    """What a plan is made for and predicted by. Its types exist while planning and predicting only: devices are driven, and
    emulated, as the session's cluster and profile say."""

    cluster: Cluster
    profile: Profile

    @classmethod
    def by(cls, factors: Mapping[str, float], cluster: Cluster, profile: Profile) -> Seen:
        """Device → how many times as long as the profile says it computes. Its own type differs in seconds only: memory, links,
        precisions and tensor-parallel degrees are those of the type that it was. A node lists a type once, so its devices behind
        such a one are of a type of their own as well, which is as fast as before."""
        own = _own_types(factors, cluster)
        origin, nodes = dict[str, tuple[str, float]](), list[dict[str, int]]()
        for node in cluster.nodes:
            counts, times = dict[str, int](), dict[str, int]()
            devices = (device for device in cluster.devices if device.node == node.name)
            for (kind, factor), block in groupby(devices, key=lambda device: own.get(device.id, (device.type, 1.0))):
                name = kind if factor == 1.0 else f"{kind} ×{factor:.3g}"
                times[name] = times.get(name, 0) + 1
                name += f" ({times[name]})" if times[name] > 1 else ""
                origin[name], counts[name] = (kind, factor), len(list(block))
            nodes.append(counts)
        fields = {name: getattr(cluster, name) for name in type(cluster).model_fields}
        fields["device_types"] = {name: cluster.device_types[kind] for name, (kind, _) in origin.items()}
        fields["nodes"] = tuple(
            node.model_copy(update={"devices": counts}) for node, counts in zip(cluster.nodes, nodes, strict=True)
        )
        return cls(Cluster(**fields), _of_types(origin, profile))

    @property
    def linked(self) -> Cluster:
        """The cluster with the links that were measured."""
        return self.profile.joined(self.cluster)

    def named(self, plan: Plan, cluster: Cluster) -> Plan:
        """A plan for this cluster, with its precisions by the types that are here."""
        return plan if self.cluster is cluster else with_own_types(plan, cluster, self.cluster)


def _own_types(factors: Mapping[str, float], cluster: Cluster) -> dict[str, tuple[str, float]]:
    """Device → its type, and the factor of all that are about as slow."""
    found = dict[str, tuple[str, float]]()
    for kind in dict.fromkeys(device.type for device in cluster.devices):
        slow = sorted((factors[d.id], d.id) for d in cluster.devices if d.type == kind and factors.get(d.id, 1.0) != 1.0)
        while slow:
            alike = [(factor, device) for factor, device in slow if factor < ALIKE * slow[0][0]]
            mean = geometric_mean([factor for factor, _ in alike])
            found |= {device: (kind, mean) for _, device in alike}
            slow = slow[len(alike) :]
    return found


def _of_types(origin: Mapping[str, tuple[str, float]], profile: Profile) -> Profile:
    """The profile of these types, each so many times as slow as the one that it was."""
    measurements = tuple(
        (m if factor == 1.0 else m.slower(factor)).model_copy(update={"device_type": name})
        for name, (kind, factor) in origin.items()
        for m in profile.measurements
        if m.device_type == kind
    )
    overheads = tuple(
        overhead.model_copy(update={"device_type": name})
        for name, (kind, _) in origin.items()
        for overhead in profile.overheads
        if overhead.device_type == kind
    )
    return profile.model_copy(update={"measurements": measurements, "overheads": overheads})
