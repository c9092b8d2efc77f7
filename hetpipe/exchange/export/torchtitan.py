"""The plan for torchtitan.

Sources: the comments of its ParallelismConfig and TrainingConfig, and its pipeline_parallel.py and config/manager.py, in
release 0.3.0.
"""

from __future__ import annotations

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.names import TORCHTITAN, assumed_blocks, modules_of_stages
from hetpipe.exchange.grid.places import by_stage, devices_by_rank, few, launches
from hetpipe.exchange.grid.script import SHEBANG, Export, cases, header, start
from hetpipe.exchange.grid.shape import Shape, block_range, nearest_shape, one_depth, unequal_devices


def export_torchtitan(plan: Plan, cluster: Cluster | None, blocks: tuple[int, int] | None) -> Export:
    """Options of torchtitan.train, and its start by torchrun on each node. Only its earlier releases read TOML."""
    one_depth(plan, "torchtitan")
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    if shape.microbatches < shape.pp:
        lost.append(f"1F1B: torch's wants as many micro-batches as stages, but there are {shape.microbatches}; here GPipe")
    unequal_devices(plan, cluster, lost)
    order, wrong = devices_by_rank(plan, by_stage(shape), sort=False)
    lost += few(wrong)
    lo, hi = block_range(plan, blocks)
    renamed = f"pipeline_parallel_module_fqns_per_model_part, and num_pp_microbatches {shape.microbatches} for a micro-batch size"
    assumed = [assumed_blocks((lo, hi)), f"release 0.3.0; its main branch says {renamed}"]
    if shape.recompute:
        assumed.append("recompute: CONFIG sets activation_checkpoint to FullAC.Config()")
    nodes = launches(order, cluster)
    program = '-m torchtitan.train --module "$MODULE" --config "$CONFIG" "${PLAN[@]}"'
    lines = [(launch, f"{start(launch, i, nodes, True)} {program}") for i, launch in enumerate(nodes)]
    text = [
        SHEBANG,
        *header(plan, "torchtitan", lost, assumed),
        "MODULE=llama3 CONFIG=llama3_8b  # the model and the function of its config_registry.py: yours",
        "PLAN=(",
        *(f"  {option}" for option in _options(shape, (lo, hi))),
        ")",
        *cases(lines),
    ]
    return Export(target="torchtitan", text="\n".join(text) + "\n", lost=tuple(lost))


def _options(shape: Shape, blocks: tuple[int, int]) -> list[str]:
    """Whole copies of the model in each replica, and all micro-batches of a step in one pass through the pipeline."""
    options: dict[str, object] = {
        "parallelism.data_parallel_replicate_degree": shape.dp,
        "parallelism.data_parallel_shard_degree": 1,
        "parallelism.tensor_parallel_degree": shape.tp,
        "parallelism.pipeline_parallel_degree": shape.pp,
        "training.global_batch_size": shape.batch,
        "training.local_batch_size": shape.pass_samples,
    }
    if shape.pp > 1:
        stages = modules_of_stages(shape, blocks, TORCHTITAN)
        options |= {
            "parallelism.pipeline_parallel_schedule": "1F1B" if shape.microbatches >= shape.pp else "GPipe",
            "parallelism.pipeline_parallel_microbatch_size": shape.micro,
            "parallelism.module_fqns_per_model_part": " ".join(",".join(stage) for stage in stages),
        }
    return [f"--{name} {value}" for name, value in options.items()]
