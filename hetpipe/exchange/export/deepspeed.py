"""The plan for DeepSpeed. Sources: its "Pipeline Parallelism", "DeepSpeed Configuration JSON" and "Getting Started: Resource
Configuration"."""

from __future__ import annotations

import json
import shlex

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.places import by_stage, devices_by_rank, few, launches
from hetpipe.exchange.grid.script import SHEBANG, Export, header
from hetpipe.exchange.grid.shape import nearest_shape, unequal_devices


def export_deepspeed(plan: Plan, cluster: Cluster | None) -> Export:
    """A hostfile, a configuration and a start of `deepspeed`."""
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    unequal_devices(plan, cluster, lost)
    tp, pp, dp = shape.tp, shape.pp, shape.dp
    order, wrong = devices_by_rank(plan, by_stage(shape), sort=True)
    lost += few(wrong)
    counts = shape.counts()
    if max(counts) - min(counts) > 1:
        lost.append(
            f"given cuts: partition_method knows uniform, parameters and type:REGEX, not the plan's {list(counts)} layers per "
            "stage (override PipelineModule._partition_layers to have them)"
        )
    config = {
        "train_batch_size": shape.batch,
        "train_micro_batch_size_per_gpu": shape.micro,
        "gradient_accumulation_steps": shape.microbatches,
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
        assumed.append(f"topology=PipeModelDataParallelTopology(num_pp={pp}, num_mp={tp}, num_dp={dp}), with layers of your own")
    nodes = launches(order, cluster)
    include = "@".join(f"{launch.host}:{','.join(map(str, launch.indices))}" for launch in nodes)
    text = [
        SHEBANG,
        *header(plan, "DeepSpeed", lost, assumed),
        "cat > hostfile <<'END'",
        *(f"{launch.host} slots={max(launch.indices) + 1}" for launch in nodes),
        "END",
        "cat > ds_config.json <<'END'",
        json.dumps(config, indent=1),
        "END",
        f"deepspeed --hostfile=hostfile --include={shlex.quote(include)} train.py --deepspeed --deepspeed_config ds_config.json",
    ]
    return Export(target="deepspeed", text="\n".join(text) + "\n", lost=tuple(lost))
