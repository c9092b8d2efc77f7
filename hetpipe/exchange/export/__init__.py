"""A plan for other systems: the launch arguments that come closest, and in words what that system cannot express of the plan.
Read in this order:

shape (the nearest regular grid), places (which process is which device), script (what is written), megatron, torchrun, deepspeed
(each a system, of which a new one gets a line in `TARGETS`).
"""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.export.deepspeed import export_deepspeed
from hetpipe.exchange.export.megatron import export_megatron, parse_blocks
from hetpipe.exchange.export.script import Export
from hetpipe.exchange.export.torchrun import export_torchrun
from hetpipe.files.messages import InputError, nearest

__all__ = ["TARGETS", "Export", "export", "parse_blocks"]

TARGETS: dict[str, Callable[[Plan, Cluster | None, tuple[int, int] | None], Export]] = {
    "megatron": export_megatron,
    "torchrun": lambda plan, cluster, blocks: export_torchrun(plan, cluster),
    "deepspeed": lambda plan, cluster, blocks: export_deepspeed(plan, cluster),
}


def export(plan: Plan, target: str, *, cluster: Cluster | None = None, blocks: tuple[int, int] | None = None) -> Export:
    """The plan as launch arguments of `target`. `blocks` [lo, hi) are the layers that are transformer blocks (Megatron
    counts only those; by default all but the first and the last). InputError if something does not fit together."""
    if target not in TARGETS:
        raise InputError(f"unknown system {target!r}{nearest(target, list(TARGETS))}")
    if cluster is not None:
        plan.check(cluster=cluster)
    return TARGETS[target](plan, cluster, blocks)
