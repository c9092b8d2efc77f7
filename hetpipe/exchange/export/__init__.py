"""A plan for other systems: the arguments or the file that come closest, and in words what that system cannot express of the
plan. Read in this order:

megatron, torchtitan (arguments of a launch), deepspeed, diffusion_pipe (DeepSpeed's pipeline), automodel, flagscale (YAML),
accelerate (a device map), torchrun (hetpipe itself; a new system gets a line in `TARGETS`).
"""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.export.accelerate import export_accelerate
from hetpipe.exchange.export.automodel import export_automodel
from hetpipe.exchange.export.deepspeed import export_deepspeed
from hetpipe.exchange.export.diffusion_pipe import export_diffusion_pipe
from hetpipe.exchange.export.flagscale import export_flagscale
from hetpipe.exchange.export.megatron import export_megatron, parse_blocks
from hetpipe.exchange.export.torchrun import export_torchrun
from hetpipe.exchange.export.torchtitan import export_torchtitan
from hetpipe.exchange.grid.script import Export
from hetpipe.files.messages import InputError, nearest

__all__ = ["TARGETS", "Export", "export", "parse_blocks"]

TARGETS: dict[str, Callable[[Plan, Cluster | None, tuple[int, int] | None], Export]] = {
    "megatron": export_megatron,
    "torchtitan": export_torchtitan,
    "automodel": export_automodel,
    "flagscale": export_flagscale,
    "deepspeed": lambda plan, cluster, blocks: export_deepspeed(plan, cluster),
    "diffusion-pipe": lambda plan, cluster, blocks: export_diffusion_pipe(plan, cluster),
    "accelerate": export_accelerate,
    "torchrun": lambda plan, cluster, blocks: export_torchrun(plan, cluster),
}


def export(plan: Plan, target: str, *, cluster: Cluster | None = None, blocks: tuple[int, int] | None = None) -> Export:
    """The plan as `target` reads it. `blocks` [lo, hi) are the layers that are transformer blocks, for systems that count or
    name only those (by default all but the first and the last). InputError if something does not fit together, or if nothing
    of the plan would be left."""
    if target not in TARGETS:
        raise InputError(f"unknown system {target!r}{nearest(target, list(TARGETS))}")
    if cluster is not None:
        plan.check(cluster=cluster)
    return TARGETS[target](plan, cluster, blocks)
