"""What stages offload to the hosts of nodes, and which of these have too little memory for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hetpipe.files.units import in_bytes
from hetpipe.partitioners.memory_fit.packing import Packed, Packer


class Short(NamedTuple):
    """A host that lends fewer bytes than stages offload to it."""

    needed: int
    lent: int

    def text(self, node: str) -> str:
        """What is offloaded, and what there is."""
        return f"{in_bytes(self.needed)} to the host of node {node!r}, whose host_memory is {in_bytes(self.lent)}"


class _Stage(NamedTuple):
    type: str
    degree: int
    host_bytes: float  # 0 where it need not offload


def too_small(packer: Packer, packing: Sequence[Packed]) -> dict[str, Short]:
    """The hosts that have too little memory, by node, where the stages of these pipelines are put on the nodes so: the largest
    groups first, of these those that offload most, each where the host has most left; those that do not, where it has least."""
    stages = [stage for pipeline in packing for stage in _stages(packer, pipeline)]
    if not any(stage.host_bytes for stage in stages):
        return {}
    nodes = packer.problem.cluster.nodes
    free = [dict(node.devices) for node in nodes]
    lent = {i: node.host_memory for i, node in enumerate(nodes) if node.host_memory is not None}
    left = {i: float(lent.get(i, -math.inf)) for i in range(len(nodes))}
    for stage in sorted(stages, key=lambda x: (-x.degree, -x.host_bytes)):
        some = [i for i in (lent if stage.host_bytes else left) if free[i].get(stage.type, 0) >= stage.degree]
        if some:
            i = max(some, key=left.__getitem__) if stage.host_bytes else min(some, key=left.__getitem__)
            free[i][stage.type] -= stage.degree
            left[i] -= stage.host_bytes
    return {nodes[i].name: Short(round(has - left[i]), has) for i, has in lent.items() if round(left[i]) < 0}


def _stages(packer: Packer, pipeline: Packed) -> list[_Stage]:
    """The stages of a pipeline that holds all layers. One that offloads, but has the memory not to, does not."""
    found, lo, largest = list[_Stage](), 0, min(pipeline.b, pipeline.samples)
    for s, (v, hi, _) in enumerate(pipeline.stages):
        kind, size = packer.kinds[v], 0.0
        window = packer.window(pipeline.samples, pipeline.b, len(pipeline.stages) - s)
        plain = packer.kinds.index(kind._replace(offload=False))
        if kind.offload and packer.peak(plain, pipeline.samples, window, largest)[lo, hi] > packer.limits[v]:
            size = packer.types.costs.host_bytes_per_sample(kind.type, lo, hi, kind.degree) * window
        found.append(_Stage(kind.type, kind.degree, size))
        lo = hi
    return found
