"""The plan for diffusion-pipe. Sources: the comments of its examples/main_example.toml, and its utils/pipeline.py."""

from __future__ import annotations

import shlex

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.places import by_stage, devices_by_rank, few, launches
from hetpipe.exchange.grid.script import Export, header
from hetpipe.exchange.grid.shape import nearest_shape, no_tensor_parallel, one_depth, unequal_devices

SYSTEM = "diffusion-pipe"


def export_diffusion_pipe(plan: Plan, cluster: Cluster | None) -> Export:
    """The keys of its TOML that a plan decides. It is DeepSpeed's pipeline, with cuts of one's own."""
    one_depth(plan, SYSTEM)
    no_tensor_parallel(plan, SYSTEM)
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    unequal_devices(plan, cluster, lost)
    order, wrong = devices_by_rank(plan, by_stage(shape), sort=True)
    lost += few(wrong)
    assumed = [
        f"the model of your configuration has {plan.layer_count} layers (its to_layers()), one for each layer of the plan",
        f"data-parallel size {shape.dp}: DeepSpeed derives it from the number of processes; schedule 1F1B",
    ]
    nodes = launches(order, cluster)
    include = "@".join(f"{launch.host}:{','.join(map(str, launch.indices))}" for launch in nodes)
    cuts = list(shape.ends[1:-1])
    text = [
        *header(plan, SYSTEM, lost, assumed),
        "# Start, with these lines of a hostfile:",
        *(f"#   {launch.host} slots={max(launch.indices) + 1}" for launch in nodes),
        f"#   deepspeed --hostfile=hostfile --include={shlex.quote(include)} train.py --deepspeed --config THIS_FILE",
        "# These keys stand above the tables [model], [adapter] and [optimizer] of your configuration.",
        f"pipeline_stages = {shape.pp}",
        f"micro_batch_size_per_gpu = {shape.micro}",
        f"gradient_accumulation_steps = {shape.microbatches}",
        f"activation_checkpointing = {str(shape.recompute).lower()}",
        *(["partition_method = 'manual'", f"partition_split = {cuts}"] if cuts else []),
    ]
    return Export(target="diffusion-pipe", text="\n".join(text) + "\n", lost=tuple(lost))
