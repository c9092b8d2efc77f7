"""A plan for other systems: the launch arguments that come closest in Megatron-LM, DeepSpeed or torchrun, and in words what that
system cannot express of the plan.

Sources: Megatron Core developer guide ("Parallelism Strategies Guide", "Custom Pipeline Model Parallel Layout")
and the help texts of megatron/training/arguments.py; DeepSpeed ("Pipeline Parallelism", "DeepSpeed Configuration JSON",
"Getting Started: Resource Configuration"); PyTorch, "torchrun (Elastic Launch)".
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hetpipe.files.messages import InputError, counted, nearest, shown
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan
from hetpipe.spec.schedule import default_depths

Target = Literal["megatron", "torchrun", "deepspeed"]
MOST = 8  # devices listed one by one


@dataclass(frozen=True, kw_only=True)
class Export:
    """`text` is a shell script; `lost` what the target cannot express of the plan, a sentence each."""

    target: Target
    text: str
    lost: tuple[str, ...]


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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One node: its name, its address, and the indices of its devices in the order of their local ranks."""

    node: str
    host: str
    indices: tuple[int, ...]


def export(
    plan: Plan, target: str, *, cluster: Cluster | None = None, blocks: tuple[int, int] | None = None
) -> Export:
    """The plan as launch arguments of `target`. `blocks` [lo, hi) are the layers that are transformer blocks (Megatron
    counts only those; by default all but the first and the last). InputError if something does not fit together."""
    if target not in get_args(Target):
        raise InputError(f"unknown system {target!r}{nearest(target, list(get_args(Target)))}")
    if cluster is not None:
        plan.check(cluster=cluster)
    if target == "torchrun":
        return _torchrun(plan, cluster)
    return _megatron(plan, cluster, blocks) if target == "megatron" else _deepspeed(plan, cluster)


def parse_blocks(text: str | None) -> tuple[int, int] | None:
    """`"1:25"` as (1, 25); None stays None."""
    if text is None:
        return None
    lo, colon, hi = text.partition(":")
    if not (colon and re.fullmatch("[0-9]{1,6}", lo) and re.fullmatch("[0-9]{1,6}", hi)):
        raise InputError(f"cannot read the blocks {shown(text)}: write LO:HI, such as 1:25")
    return int(lo), int(hi)


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
        lost.append(
            f"{unused} of the plan's {len(plan.device_ids)} devices, which do not fill another replica"
        )
    ends = _common_ends(plan, pp, lost)
    micro, batch = _common_batch(plan, dp, lost)
    recompute = [stage.recompute for replica in plan.replicas for stage in replica.stages]
    if any(recompute) and not all(recompute):
        lost.append(
            f"recompute per stage: the plan has it on {sum(recompute)} of {len(recompute)} stages, here all have it"
        )
    _schedule(plan, lost)
    return Shape(tp=tp, pp=pp, dp=dp, ends=ends, micro=micro, batch=batch, recompute=any(recompute))


def _common_ends(plan: Plan, pp: int, lost: list[str]) -> tuple[int, ...]:
    """The cuts of the replica of that depth that does most samples."""
    same = [r for r in plan.replicas if len(r.stages) == pp]
    found = {(0, *(stage.layers[1] for stage in r.stages)) for r in same}
    most = max(same, key=lambda r: r.samples)
    ends = (0, *(stage.layers[1] for stage in most.stages))
    if len(found) > 1:
        lost.append(
            f"different cuts per replica: the plan's are {sorted(list(e) for e in found)}, here all have {list(ends)}"
        )
    return ends


def _common_batch(plan: Plan, dp: int, lost: list[str]) -> tuple[int, int]:
    """The micro-batch size, and the global batch, which must be a multiple of it times dp."""
    shares = [replica.samples for replica in plan.replicas]
    if len(set(shares)) > 1:
        lost.append(
            f"unequal shares of the batch: the plan's replicas take {shares} samples, here all the same"
        )
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
        lost.append(
            f"a global batch of {plan.global_batch}: it is no multiple of {counted(dp, 'replica')}; here {batch}"
        )
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


def _types(plan: Plan, cluster: Cluster | None, lost: list[str]) -> None:
    kinds = [] if cluster is None else sorted({cluster.device(d).type for d in plan.device_ids})
    if len(kinds) > 1:
        lost.append(
            f"unequal devices: it takes {', '.join(kinds)} to be equally fast and to have the same memory"
        )


def launches(ids: Sequence[str], cluster: Cluster | None) -> list[Launch]:
    """Devices by node, nodes in the order of their first device; ranks count through the nodes."""
    by_node: dict[str, list[int]] = {}
    for device in ids:
        node, index = device.rsplit("/", 1)
        by_node.setdefault(node, []).append(int(index))
    hosts = {} if cluster is None else {node.name: node.host or node.name for node in cluster.nodes}
    return [
        Launch(node=node, host=hosts.get(node, node), indices=tuple(found)) for node, found in by_node.items()
    ]


def place(
    plan: Plan, shape: Shape, role: Callable[[int], tuple[int, int]], *, sort: bool
) -> tuple[list[str], list[str]]:
    """Devices in the order of their ranks when the system gives rank g the (replica, stage) `role(g)`, and what then
    differs from the plan. Ranks count through nodes, so a node's devices stay together; `sort`: and ascend."""
    where = {
        (r, s, t): device
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        for t, device in enumerate(stage.devices)
    }
    wish = [(*role(g), g % shape.tp) for g in range(shape.tp * shape.pp * shape.dp)]
    ids = [where[w] for w in wish if w in where]
    spare = [d for d in plan.device_ids if d not in ids]
    ids += spare[: len(wish) - len(ids)]
    order = [
        f"{launch.node}/{i}"
        for launch in launches(ids, None)
        for i in (sorted(launch.indices) if sort else launch.indices)
    ]
    role_of = {device: w for w, device in where.items()}
    wrong = [
        f"the place of {device}: stage {role_of[device][1]} of replica {role_of[device][0]} in the plan, here stage {w[1]} "
        f"of replica {w[0]}"
        for device, w in zip(order, wish, strict=True)
        if role_of[device][:2] != w[:2]
    ]
    return order, wrong


def _few(wrong: list[str]) -> list[str]:
    return wrong if len(wrong) <= MOST else [*wrong[:MOST], f"the places of {len(wrong) - MOST} more devices"]


def _header(plan: Plan, system: str, lost: Sequence[str], assumed: Sequence[str] = ()) -> list[str]:
    size = f"{counted(len(plan.replicas), 'replica')}, {counted(len(plan.device_ids), 'device')}"
    lines = [
        "#!/usr/bin/env bash",
        f"# {system}: what comes closest to this plan of {plan.partitioner!r} for model {plan.model!r}",
        f"# ({size}, {plan.global_batch} samples a step).",
    ]
    if plan.predicted is not None:
        seconds = plan.predicted.step_seconds
        lines.append(
            f"# The plan's predicted step, {seconds:.6g} s, is not predicted for what differs from it."
        )
    lines.append(f"# {system} cannot express:" if lost else f"# Nothing of the plan is lost in {system}.")
    lines += [f"#   - {item}" for item in lost]
    return lines + [f"# Assumed: {item}" for item in assumed]


def _cases(lines: Sequence[tuple[Launch, str]]) -> list[str]:
    """One branch a node: `bash FILE NODE` on each."""
    found = ["# On each node: bash FILE NODE", 'case "$1" in']
    for launch, line in lines:
        found.append(f"  {shlex.quote(launch.node)}) {line} ;;")
    usage = shlex.quote(f"give a node: {' '.join(launch.node for launch, _ in lines)}")
    return [*found, f"  *) echo {usage} >&2; exit 2 ;;", "esac"]


def _start(launch: Launch, number: int, all_: Sequence[Launch], visible: bool) -> str:
    """`torchrun` on one node. Static rendezvous: with c10d, --node-rank is ignored."""
    devices = f"CUDA_VISIBLE_DEVICES={','.join(map(str, launch.indices))} " if visible else ""
    return (
        f"{devices}torchrun --nnodes {len(all_)} --node-rank {number} --nproc-per-node {len(launch.indices)} "
        f"--master-addr {shlex.quote(all_[0].host)} --master-port 29500"
    )


def _torchrun(plan: Plan, cluster: Cluster | None) -> Export:
    """`hetpipe train` under torchrun: one process for each device of a node, so that local ranks are the plan's indices."""
    if cluster is not None:
        ids = [device.id for device in cluster.devices]
    else:
        most = Counter[str]()
        for device in plan.device_ids:
            node, index = device.rsplit("/", 1)
            most[node] = max(most[node], int(index) + 1)
        ids = [f"{node}/{i}" for node, count in most.items() for i in range(count)]
    lost = []
    if any(len(stage.devices) > 1 for replica in plan.replicas for stage in replica.stages):
        lost.append("tensor-parallel stages: hetpipe plans and prices them, but does not run them yet")
    idle = [device for device in ids if device not in plan.device_ids]
    assumed = ["JOB.yaml names the model, the data and the cluster file, PLAN.json is this plan"]
    if cluster is None:
        assumed.append(
            "the nodes below are all nodes of the cluster file, in its order (give --cluster to be sure)"
        )
    if idle:
        assumed.append(f"processes of devices without a stage wait: {', '.join(idle)}")
    nodes = launches(ids, cluster)
    lines = [
        (launch, f"{_start(launch, i, nodes, False)} -m hetpipe train JOB.yaml --plan PLAN.json")
        for i, launch in enumerate(nodes)
    ]
    text = "\n".join([*_header(plan, "torchrun", lost, assumed), *_cases(lines)]) + "\n"
    return Export(target="torchrun", text=text, lost=tuple(lost))


def _megatron(plan: Plan, cluster: Cluster | None, blocks: tuple[int, int] | None) -> Export:
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    _types(plan, cluster, lost)
    lo, hi = blocks or ((1, plan.layer_count - 1) if plan.layer_count > 2 else (0, plan.layer_count))
    if not 0 <= lo < hi <= plan.layer_count:
        raise InputError(f"blocks [{lo}, {hi}) are no range of the plan's {plan.layer_count} layers")
    tp, pp, dp = shape.tp, shape.pp, shape.dp
    by_replica = place(plan, shape, lambda g: (g // (tp * pp), g // tp % pp), sort=False)
    by_stage = place(plan, shape, lambda g: (g // tp % dp, g // (tp * dp)), sort=False)
    pp_first = len(by_replica[1]) < len(by_stage[1])
    order, wrong = by_replica if pp_first else by_stage
    lost += _few(wrong)
    arguments = [
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {pp}",
        f"--num-layers {hi - lo}",
        *_split(shape, lo, hi),
        f"--micro-batch-size {shape.micro}",
        f"--global-batch-size {shape.batch}",
        *(["--use-tp-pp-dp-mapping"] if pp_first else []),
        *(
            ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
            * shape.recompute
        ),
    ]
    assumed = [
        f"layers {lo} to {hi - 1} are transformer blocks, those before belong to the embedding, those after to the head",
        f"data-parallel size {dp}: Megatron-LM derives it from the number of processes; schedule 1F1B, not interleaved",
    ]
    nodes = launches(order, cluster)
    lines = [
        (launch, f'{_start(launch, i, nodes, True)} pretrain_gpt.py "${{PLAN[@]}}" "${{MODEL[@]}}"')
        for i, launch in enumerate(nodes)
    ]
    text = [
        *_header(plan, "Megatron-LM", lost, assumed),
        "PLAN=(",
        *(f"  {argument}" for argument in arguments),
        ")",
        "MODEL=()  # hidden size, heads, sequence length, data, optimizer: yours",
        *_cases(lines),
    ]
    return Export(target="megatron", text="\n".join(text) + "\n", lost=tuple(lost))


def _split(shape: Shape, lo: int, hi: int) -> list[str]:
    """Nothing for equal stages; flags for an unequal first and last one; else the layout of all stages."""
    counts = [max(0, min(b, hi) - max(a, lo)) for a, b in zip(shape.ends, shape.ends[1:], strict=False)]
    if len(set(counts)) == 1:
        return []
    inner = set(counts[1:-1])
    if len(inner) <= 1 and min(counts) > 0:
        middle = counts[1] if shape.pp == 2 else counts[1:-1][0]
        first, last = counts[0] != middle, counts[-1] != middle
        return [f"--decoder-first-pipeline-num-layers {counts[0]}"] * first + [
            f"--decoder-last-pipeline-num-layers {counts[-1]}"
        ] * last
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return [f'--pipeline-model-parallel-layout "E{"|".join(stages)}L"']


def _deepspeed(plan: Plan, cluster: Cluster | None) -> Export:
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    _types(plan, cluster, lost)
    tp, pp, dp = shape.tp, shape.pp, shape.dp
    order, wrong = place(plan, shape, lambda g: (g // tp % dp, g // (tp * dp)), sort=True)
    lost += _few(wrong)
    counts = [b - a for a, b in zip(shape.ends, shape.ends[1:], strict=False)]
    if max(counts) - min(counts) > 1:
        lost.append(
            f"given cuts: partition_method knows uniform, parameters and type:REGEX, not the plan's {counts} layers per stage "
            "(override PipelineModule._partition_layers to have them)"
        )
    config = {
        "train_batch_size": shape.batch,
        "train_micro_batch_size_per_gpu": shape.micro,
        "gradient_accumulation_steps": shape.batch // (shape.micro * dp),
        "zero_optimization": {"stage": 0},
    }
    module = (
        f"PipelineModule(layers=model, num_stages={pp}, partition_method='uniform', "
        f"activation_checkpoint_interval={int(shape.recompute)}, loss_fn=…)"
    )
    assumed = [
        f"your script builds {module}",
        f"data-parallel size {dp}: DeepSpeed derives it from the number of processes; schedule 1F1B",
    ]
    if tp > 1:
        assumed.append(
            f"topology=PipeModelDataParallelTopology(num_pp={pp}, num_mp={tp}, num_dp={dp}), with layers of your own"
        )
    nodes = launches(order, cluster)
    include = "@".join(f"{launch.host}:{','.join(map(str, launch.indices))}" for launch in nodes)
    text = [
        *_header(plan, "DeepSpeed", lost, assumed),
        "cat > hostfile <<'END'",
        *(f"{launch.host} slots={max(launch.indices) + 1}" for launch in nodes),
        "END",
        "cat > ds_config.json <<'END'",
        json.dumps(config, indent=1),
        "END",
        f"deepspeed --hostfile=hostfile --include={shlex.quote(include)} train.py --deepspeed --deepspeed_config ds_config.json",
    ]
    return Export(target="deepspeed", text="\n".join(text) + "\n", lost=tuple(lost))
