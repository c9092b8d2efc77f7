"""The plan for Megatron-LM.

Sources: Megatron Core developer guide ("Parallelism Strategies Guide", "Custom Pipeline Model Parallel Layout") and the help
texts of megatron/training/arguments.py.
"""

from __future__ import annotations

import re

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.names import assumed_blocks
from hetpipe.exchange.grid.places import by_replica, by_stage, devices_by_rank, few, launches
from hetpipe.exchange.grid.script import SHEBANG, Export, cases, header, start
from hetpipe.exchange.grid.shape import Shape, block_range, nearest_shape, unequal_devices
from hetpipe.files.messages import InputError, shown


def parse_blocks(text: str | None) -> tuple[int, int] | None:
    """`"1:25"` as (1, 25); None stays None."""
    if text is None:
        return None
    lo, colon, hi = text.partition(":")
    if not (colon and re.fullmatch("[0-9]{1,6}", lo) and re.fullmatch("[0-9]{1,6}", hi)):
        raise InputError(f"cannot read --blocks {shown(text)}. Write LO:HI, such as 1:25")
    return int(lo), int(hi)


def export_megatron(plan: Plan, cluster: Cluster | None, blocks: tuple[int, int] | None) -> Export:
    """Arguments for pretrain_gpt.py, and its start by torchrun on each node."""
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    unequal_devices(plan, cluster, lost)
    lo, hi = block_range(plan, blocks)
    tp, pp, dp = shape.tp, shape.pp, shape.dp
    pipelines_together = devices_by_rank(plan, by_replica(shape), sort=False)
    stages_together = devices_by_rank(plan, by_stage(shape), sort=False)
    pp_first = len(pipelines_together[1]) < len(stages_together[1])
    order, wrong = pipelines_together if pp_first else stages_together
    lost += few(wrong)
    arguments = [
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {pp}",
        f"--num-layers {hi - lo}",
        *_split(shape, lo, hi),
        f"--micro-batch-size {shape.micro}",
        f"--global-batch-size {shape.batch}",
        *(["--use-tp-pp-dp-mapping"] if pp_first else []),
        *(["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"] * shape.recompute),
    ]
    assumed = [
        assumed_blocks((lo, hi)),
        f"data-parallel size {dp}: Megatron-LM derives it from the number of processes; schedule 1F1B, not interleaved",
    ]
    nodes = launches(order, cluster)
    lines = [
        (launch, f'{start(launch, i, nodes, True)} pretrain_gpt.py "${{PLAN[@]}}" "${{MODEL[@]}}"')
        for i, launch in enumerate(nodes)
    ]
    text = [
        SHEBANG,
        *header(plan, "Megatron-LM", lost, assumed),
        "PLAN=(",
        *(f"  {argument}" for argument in arguments),
        ")",
        "MODEL=()  # hidden size, heads, sequence length, data, optimizer: yours",
        *cases(lines),
    ]
    return Export(target="megatron", text="\n".join(text) + "\n", lost=tuple(lost))


def _split(shape: Shape, lo: int, hi: int) -> list[str]:
    """Nothing for equal stages; flags for an unequal first and last one; else the layout of all stages."""
    counts = shape.counts(lo, hi)
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
