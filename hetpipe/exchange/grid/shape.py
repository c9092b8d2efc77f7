"""The facts of a plan that every export takes: the nearest regular grid, its layers for each stage, and in words what differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.schedule import default_depths
from hetpipe.files.messages import InputError, counted

HERE = "`hetpipe train JOB.yaml --plan PLAN` runs the plan as it is"  # what every refusal offers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The nearest regular grid: one depth, one list of ends of stages (pp + 1 values from 0), one micro-batch size; `batch`
    samples in all. `degrees`: devices of each stage; all of them are `tp` but for systems that take one for each stage."""

    tp: int
    degrees: tuple[int, ...]
    pp: int
    dp: int
    ends: tuple[int, ...]
    micro: int
    batch: int
    recompute: bool

    @property
    def microbatches(self) -> int:
        """How many one replica does in a step."""
        return self.batch // (self.micro * self.dp)

    @property
    def pass_samples(self) -> int:
        """What trainers with torch's pipelines call the local batch: the samples that one replica takes at a time. A pipeline
        takes all micro-batches of a step, one stage a micro-batch."""
        return self.micro if self.pp == 1 else self.micro * self.microbatches

    def counts(self, lo: int = 0, hi: int | None = None) -> tuple[int, ...]:
        """For each stage how many of the layers [lo, hi) it has; of all layers by default."""
        last = self.ends[-1] if hi is None else hi
        return tuple(max(0, min(b, last) - max(a, lo)) for a, b in zip(self.ends, self.ends[1:], strict=False))


def block_range(plan: Plan, blocks: tuple[int, int] | None) -> tuple[int, int]:
    """The layers [lo, hi) that are transformer blocks: as given, or all but the first and the last."""
    lo, hi = blocks or ((1, plan.layer_count - 1) if plan.layer_count > 2 else (0, plan.layer_count))
    if not 0 <= lo < hi <= plan.layer_count:
        raise InputError(f"--blocks {lo}:{hi} is outside of the plan's {plan.layer_count} layers")
    return lo, hi


def one_depth(plan: Plan, system: str) -> None:
    """InputError if replicas differ in depth: `system` cuts all of them alike, so no part of such a plan would be left."""
    depths = [len(replica.stages) for replica in plan.replicas]
    if len(set(depths)) > 1:
        listed = ", ".join(f"replica {r} has {counted(n, 'stage')}" for r, n in enumerate(depths))
        raise InputError(
            f"{system} has one pipeline depth for all replicas, but in this plan {listed}. {HERE}; for {system}, plan with "
            "--partitioner even-pipelines"
        )


def no_tensor_parallel(plan: Plan, system: str) -> None:
    """InputError if a stage is a group of devices, which `system` does not have."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            if len(stage.devices) > 1:
                raise InputError(
                    f"stage {s} of replica {r} is tensor-parallel over {', '.join(stage.devices)}, and {system} has one device "
                    f"for each stage. Plan without tensor parallelism, or export to Megatron-LM (--to megatron)"
                )


def nearest_shape(plan: Plan, lost: list[str], *, own_degrees: bool = False) -> Shape:
    """The regular grid that is closest to the plan; what differs is added to `lost`. `own_degrees`: each stage may have a
    tensor-parallel degree of its own, if it is the same in all replicas."""
    degrees = Counter(len(stage.devices) for replica in plan.replicas for stage in replica.stages)
    tp = degrees.most_common(1)[0][0]
    given = {tuple(len(stage.devices) for stage in replica.stages) for replica in plan.replicas}
    if plan.precision:
        lost.append(f"a precision per device type: the plan has {', '.join(f'{p} on {k}' for k, p in plan.precision.items())}")
    kept = own_degrees and len(given) == 1
    if len(degrees) > 1 and not kept:
        lost.append(f"a tensor-parallel degree per stage: the plan has {sorted(degrees)}, here all have {tp}")
    depths = Counter(len(replica.stages) for replica in plan.replicas)
    pp = max(depths, key=lambda n: (depths[n], sum(r.samples for r in plan.replicas if len(r.stages) == n)))
    if len(depths) > 1:
        lost.append(f"a depth per replica: the plan's have {sorted(depths)} stages, here all have {pp}")
    of_stages = given.pop() if kept else (tp,) * pp
    dp = max(1, len(plan.device_ids) // sum(of_stages))
    unused = len(plan.device_ids) - sum(of_stages) * dp
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
    return Shape(tp=tp, degrees=of_stages, pp=pp, dp=dp, ends=ends, micro=micro, batch=batch, recompute=any(recompute))


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
