"""The plan for Accelerate, as a device map. Sources: its "Big Model Inference" (design of a device map) and transformers'
"Parallelism methods" (naive model parallelism)."""

from __future__ import annotations

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.names import TRANSFORMERS, assumed_blocks, modules_of_stages
from hetpipe.exchange.grid.places import launches
from hetpipe.exchange.grid.script import Export, header
from hetpipe.exchange.grid.shape import HERE, block_range, nearest_shape, no_tensor_parallel
from hetpipe.files.messages import InputError, counted

SYSTEM = "Accelerate's device_map"


def export_accelerate(plan: Plan, cluster: Cluster | None, blocks: tuple[int, int] | None) -> Export:
    """A Python file with `device_map`, for `from_pretrained` and `dispatch_model`: which card has which modules."""
    _one_process(plan)
    lost: list[str] = []
    shape = nearest_shape(plan, lost)
    if shape.pp > 1:
        lost.append(f"a pipeline: the cards work one at a time, so {shape.microbatches} micro-batches pass one after another")
    if shape.recompute:
        lost.append("recompute: set gradient_checkpointing=True in the TrainingArguments")
    chosen = block_range(plan, blocks)
    stages = modules_of_stages(shape, chosen, TRANSFORMERS)
    cards = launches(plan.device_ids, None)[0].indices
    places = dict[str, int]()
    for card, stage in zip(cards, stages, strict=True):
        for module in stage:
            places.setdefault(module, card)
    assumed = [
        assumed_blocks(chosen),
        "the modules are named as in transformers' Llama, Qwen or Mistral",
        f"per_device_train_batch_size={shape.micro}, gradient_accumulation_steps={shape.microbatches}, in one process",
    ]
    text = [
        *header(plan, SYSTEM, lost, assumed),
        "#   from plan_map import device_map  # this file as plan_map.py",
        "#   model = AutoModelForCausalLM.from_pretrained(NAME, device_map=device_map)",
        "device_map = {",
        *(f'    "{module}": {card},' for module, card in places.items()),
        "}",
    ]
    return Export(target="accelerate", text="\n".join(text) + "\n", lost=tuple(lost))


def _one_process(plan: Plan) -> None:
    """InputError if the plan is more than one copy of the model on the cards of one node."""
    no_tensor_parallel(plan, SYSTEM)
    if len(plan.replicas) > 1:
        raise InputError(
            f"{SYSTEM} holds one copy of the model, but this plan has {counted(len(plan.replicas), 'replica')}. {HERE}; for one "
            "pipeline, plan with --partitioner chain. Accelerate's own data parallelism takes unequal batches by `hetpipe.uneven`"
        )
    if len(nodes := launches(plan.device_ids, None)) > 1:
        raise InputError(
            f"{SYSTEM} is of one process on one host, but this plan's devices are on {', '.join(n.node for n in nodes)}. {HERE}; "
            f"for {SYSTEM}, plan with a cluster of one node"
        )
