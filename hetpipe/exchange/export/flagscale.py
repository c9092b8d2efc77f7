"""The plan for FlagScale's heterogeneous pipelines.

Sources: its guide "Heterogeneous training", and the checks in flagscale/train/arguments.py and the order of ranks in
flagscale/train/hetero/parallel_context.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.names import assumed_blocks
from hetpipe.exchange.grid.places import Launch, by_stage, devices_by_rank, few, launches
from hetpipe.exchange.grid.script import Export, header
from hetpipe.exchange.grid.shape import HERE, Shape, block_range, nearest_shape, one_depth
from hetpipe.files.messages import InputError


@dataclass
class Mesh:
    """Neighbouring stages on one type of device, with one tensor-parallel degree."""

    device_type: str
    tp: int
    pp: int


def export_flagscale(plan: Plan, cluster: Cluster | None, blocks: tuple[int, int] | None) -> Export:
    """The sections system and model of its configuration (YAML). Its processes form meshes along the pipeline, each of one
    type of device; all replicas are cut alike."""
    if cluster is None:
        raise InputError("FlagScale names the type of each device: give the cluster file (--cluster cluster.yaml)")
    one_depth(plan, "FlagScale")
    lost: list[str] = []
    shape = nearest_shape(plan, lost, own_degrees=True)
    lo, hi = block_range(plan, blocks)
    counts = shape.counts(lo, hi)
    if 0 in counts:
        raise InputError(
            f"stage {counts.index(0)} has no transformer block (they are the layers [{lo}, {hi})), and FlagScale's "
            f"hetero_pipeline_layer_split is {list(counts)}. Plan other cuts, or give the blocks with --blocks LO:HI"
        )
    meshes = _meshes(plan, cluster, shape)
    order, wrong = devices_by_rank(plan, by_stage(shape), sort=True)
    lost += few(wrong)
    if len({stage.recompute for replica in plan.replicas for stage in replica.stages}) > 1:
        lost[:] = [item for item in lost if not item.startswith("recompute per stage")]
        lost.append("recompute per stage, here: see its recompute_granularity_per_stage_micro_batch, which this file leaves out")
    nodes = launches(order, cluster)
    types = {node.node: _type_of_node(node, cluster) for node in nodes}
    assumed = [assumed_blocks((lo, hi)), "these sections stand in your configuration, with the rest of the model and the data"]
    text = [
        *header(plan, "FlagScale", lost, assumed),
        "# Its hostfile:",
        *(f"#   {node.host} slots={len(node.indices)} type={types[node.node]}" for node in nodes),
        *(f"# On {node.node}: CUDA_VISIBLE_DEVICES={','.join(map(str, node.indices))}" for node in nodes if _has_gaps(node)),
        *_sections(shape, meshes, counts),
    ]
    return Export(target="flagscale", text="\n".join(text) + "\n", lost=tuple(lost))


def _meshes(plan: Plan, cluster: Cluster, shape: Shape) -> list[Mesh]:
    """InputError where FlagScale, which orders its processes by type, could not have the plan's order."""
    meshes = list[Mesh]()
    for s, tp in enumerate(shape.degrees):
        types = sorted({cluster.device(d).type for replica in plan.replicas for d in replica.stages[s].devices})
        if len(types) > 1:
            raise InputError(
                f"stage {s} is on {' and '.join(types)} in different replicas, but FlagScale has one type of device for each "
                f"stage. {HERE}"
            )
        if meshes and (meshes[-1].device_type, meshes[-1].tp) == (types[0], tp):
            meshes[-1].pp += 1
        else:
            meshes.append(Mesh(device_type=types[0], tp=tp, pp=1))
    order = [mesh.device_type for mesh in meshes]
    for m, kind in enumerate(order):
        if m and order[m - 1] != kind and kind in order[:m]:
            raise InputError(
                f"the stages are on {', '.join(order)} in turn, but FlagScale has all stages of a type of device together. {HERE}"
            )
    return meshes


def _type_of_node(node: Launch, cluster: Cluster) -> str:
    types = sorted({cluster.device(f"{node.node}/{index}").type for index in node.indices})
    if len(types) > 1:
        raise InputError(
            f"node {node.node} has devices of {' and '.join(types)}, but a line of FlagScale's hostfile names one type. {HERE}"
        )
    return types[0]


def _has_gaps(node: Launch) -> bool:
    return node.indices != tuple(range(len(node.indices)))


def _sections(shape: Shape, meshes: list[Mesh], counts: tuple[int, ...]) -> list[str]:
    """YAML, with lists as JSON, which YAML reads."""
    recompute = ["  recompute_granularity: full", "  recompute_method: uniform", "  recompute_num_layers: 1"] * shape.recompute
    return [
        "system:",
        f"  tensor_model_parallel_size: {meshes[0].tp}",
        f"  pipeline_model_parallel_size: {shape.pp}",
        *recompute,
        "  hetero:",
        "    enable_hetero: true",
        f"    hetero_pipeline_layer_split: {json.dumps(counts)}",
        "    # for each mesh: tensor, context, expert, data and pipeline parallelism",
        f"    hetero_process_meshes: {json.dumps([n for mesh in meshes for n in (mesh.tp, 1, 1, shape.dp, mesh.pp)])}",
        f"    hetero_device_types: {json.dumps([mesh.device_type for mesh in meshes])}",
        f"    hetero_current_device_type: {json.dumps(meshes[0].device_type)}",
        "model:",
        f"  num_layers: {sum(counts)}",
        f"  micro_batch_size: {shape.micro}",
        f"  global_batch_size: {shape.batch}",
    ]
