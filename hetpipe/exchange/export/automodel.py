"""The plan for NeMo AutoModel.

Sources: its guide "Pipeline Parallelism with AutoPipeline", and the comments of PipelineConfig and of parse_distributed_section,
in release 0.7.0.
"""

from __future__ import annotations

import json
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.names import TRANSFORMERS, assumed_blocks, modules_of_stages
from hetpipe.exchange.grid.places import by_stage, devices_by_rank, few, launches
from hetpipe.exchange.grid.script import Export, header, starts
from hetpipe.exchange.grid.shape import HERE, Shape, block_range, nearest_shape, one_depth, unequal_devices
from hetpipe.files.messages import InputError

SYSTEM = "NeMo AutoModel"


def export_automodel(plan: Plan, cluster: Cluster | None, blocks: tuple[int, int] | None) -> Export:
    """The sections step_scheduler and distributed of a recipe (YAML)."""
    one_depth(plan, SYSTEM)
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    _enough_microbatches(shape)
    unequal_devices(plan, cluster, lost)
    order, wrong = devices_by_rank(plan, by_stage(shape), sort=False)
    lost += few(wrong)
    if shape.dp > 1:
        lost.append(f"whole stages in each replica: FSDP2 shards each over its {shape.dp} devices, and gathers it for each use")
    chosen = block_range(plan, blocks)
    assumed = ["these sections stand in your recipe, with the model, the data and the optimizer", assumed_blocks(chosen)]
    if shape.pp > 1:
        assumed.append("the modules are named as in transformers' Llama, Qwen or Mistral")
    text = [
        *header(plan, SYSTEM, lost, assumed),
        *starts(launches(order, cluster), "-m nemo_automodel.cli.app recipe.yaml"),
        *_sections(shape, chosen),
    ]
    return Export(target="automodel", text="\n".join(text) + "\n", lost=tuple(lost))


def _enough_microbatches(shape: Shape) -> None:
    if shape.pp > 1 and shape.microbatches < shape.pp:
        raise InputError(
            f"{SYSTEM} needs at least as many micro-batches as stages, but a replica of this plan has "
            f"{shape.microbatches} of {shape.micro} samples, and {shape.pp} stages. {HERE}; for {SYSTEM}, plan "
            "with a larger --global-batch"
        )


def _sections(shape: Shape, blocks: tuple[int, int]) -> list[str]:
    """YAML, with each section's values as JSON, which YAML reads."""
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "dp_size": shape.dp,
        "tp_size": shape.tp,
        "pp_size": shape.pp,
        "cp_size": 1,
        "activation_checkpointing": shape.recompute,
    }
    lines = [
        "step_scheduler:",
        f"  global_batch_size: {shape.batch}",
        f"  local_batch_size: {shape.pass_samples}",
        "distributed:",
        *(f"  {key}: {json.dumps(value)}" for key, value in distributed.items()),
    ]
    if shape.pp > 1:
        stages = modules_of_stages(shape, blocks, TRANSFORMERS)
        lines += [
            "  pipeline:",
            "    pp_schedule: 1f1b",
            f"    pp_microbatch_size: {shape.micro}",
            "    module_fqns_per_model_part:",
            *(f"      - {json.dumps(stage)}" for stage in stages),
        ]
    return lines
