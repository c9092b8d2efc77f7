"""The nearest regular grid to a plan, for systems that have no other, and in words what then differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.schedule import default_depths
from hetpipe.files.messages import counted


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The nearest regular grid: one tensor-parallel degree, one depth, one list of ends of stages (L + 1 values from 0),
    one micro-batch size; `batch` samples in all."""

    tp: int
    pp: int
    dp: int
    ends: tuple[int, ...]
    micro: int
    batch: int
    recompute: bool


def nearest_shape(plan: Plan, lost: list[str]) -> Shape:
    """The regular grid that is closest to the plan; what differs is added to `lost`."""
    degrees = Counter(len(stage.devices) for replica in plan.replicas for stage in replica.stages)
    tp = degrees.most_common(1)[0][0]
    if plan.precision:
        lost.append(f"a precision per device type: the plan has {', '.join(f'{p} on {k}' for k, p in plan.precision.items())}")
    if len(degrees) > 1:
        lost.append(f"a tensor-parallel degree per stage: the plan has {sorted(degrees)}, here all have {tp}")
    depths = Counter(len(replica.stages) for replica in plan.replicas)
    pp = max(depths, key=lambda n: (depths[n], sum(r.samples for r in plan.replicas if len(r.stages) == n)))
    if len(depths) > 1:
        lost.append(f"a depth per replica: the plan's have {sorted(depths)} stages, here all have {pp}")
    dp = max(1, len(plan.device_ids) // (tp * pp))
    unused = len(plan.device_ids) - tp * pp * dp
    if unused > 0:
        lost.append(f"{unused} of the plan's {len(plan.device_ids)} devices, which do not fill another replica")
    ends = _common_ends(plan, pp, lost)
    micro, batch = _common_batch(plan, dp, lost)
    recompute = [stage.recompute for replica in plan.replicas for stage in replica.stages]
    if any(recompute) and not all(recompute):
        lost.append(f"recompute per stage: the plan has it on {sum(recompute)} of {len(recompute)} stages, here all have it")
    if away := sum(stage.offload for replica in plan.replicas for stage in replica.stages):
        lost.append(f"activations in host memory: the plan has {away} of {len(recompute)} stages offload them, here none does")
    _schedule(plan, lost)
    return Shape(tp=tp, pp=pp, dp=dp, ends=ends, micro=micro, batch=batch, recompute=any(recompute))


def _common_ends(plan: Plan, pp: int, lost: list[str]) -> tuple[int, ...]:
    """The cuts of the replica of that depth that does most samples."""
    same = [r for r in plan.replicas if len(r.stages) == pp]
    found = {(0, *(stage.layers[1] for stage in r.stages)) for r in same}
    most = max(same, key=lambda r: r.samples)
    ends = (0, *(stage.layers[1] for stage in most.stages))
    if len(found) > 1:
        lost.append(f"different cuts per replica: the plan's are {sorted(list(e) for e in found)}, here all have {list(ends)}")
    return ends


def _common_batch(plan: Plan, dp: int, lost: list[str]) -> tuple[int, int]:
    """The micro-batch size, and the global batch, which must be a multiple of it times dp."""
    shares = [replica.samples for replica in plan.replicas]
    if len(set(shares)) > 1:
        lost.append(f"unequal shares of the batch: the plan's replicas take {shares} samples, here all the same")
    sizes = Counter(size for replica in plan.replicas for size in replica.microbatch_sizes)
    usual = sizes.most_common(1)[0][0]
    fitting = [b for b in range(1, usual + 1) if plan.global_batch % (b * dp) == 0]
    batch = plan.global_batch if fitting else dp * max(1, round(plan.global_batch / dp))
    micro = fitting[-1] if fitting else max(b for b in range(1, usual + 1) if batch % (b * dp) == 0)
    if len(sizes) > 1:
        lost.append(f"micro-batches of unequal size: the plan has {sorted(sizes)}")
    if micro != usual:
        lost.append(
            f"micro-batches of {usual}: the batch must be a multiple of micro-batch × {counted(dp, 'replica')}; here {micro}"
        )
    if batch != plan.global_batch:
        lost.append(f"a global batch of {plan.global_batch}: it is no multiple of {counted(dp, 'replica')}; here {batch}")
    return micro, batch


def _schedule(plan: Plan, lost: list[str]) -> None:
    """What is not plain 1F1B."""
    for r, replica in enumerate(plan.replicas):
        depths, plain = (
            replica.depths(plan.schedule),
            default_depths("1f1b", len(replica.stages), len(replica.microbatch_sizes)),
        )
        if depths != plain and len(depths) > 1:
            lost.append(
                f"warm-up depths: replica {r} has {list(depths)} forwards before the first backward, 1F1B has {list(plain)}"
            )


def unequal_devices(plan: Plan, cluster: Cluster | None, lost: list[str]) -> None:
    """Of types that differ, `lost` says so."""
    kinds = [] if cluster is None else sorted({cluster.device(d).type for d in plan.device_ids})
    if len(kinds) > 1:
        lost.append(f"unequal devices: it takes {', '.join(kinds)} to be equally fast and to have the same memory")
