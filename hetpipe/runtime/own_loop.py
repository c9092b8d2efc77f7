"""`hetpipe.wrap`: one's own model, one's own loop."""

from __future__ import annotations

import os

import torch
from torch import nn

from hetpipe.cluster import Cluster, Node
from hetpipe.formats import InputError, natural_key
from hetpipe.model import Loss, LossFunction, LossWeight, Model, Tensors
from hetpipe.plan import Plan
from hetpipe.replicas import PlanGroups, ReplicaMismatchError
from hetpipe.runtime.engine import TorchEngine
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.split import tied_layers
from hetpipe.world import connect, create_world


def _nodes_of(plan: Plan) -> tuple[Node, ...]:
    """The nodes that a plan names, in natural order, each as large as its greatest index (for plans without a cluster file)."""
    greatest: dict[str, int] = {}
    for device in plan.device_ids:
        node, index = device.rsplit("/", 1)
        greatest[node] = max(greatest.get(node, 0), int(index))
    return tuple(
        Node(name=name, devices={"any": greatest[name] + 1}) for name in sorted(greatest, key=natural_key)
    )


def wrap(model: nn.Sequential, plan: Plan, sample: Tensors, loss_fn: LossFunction, *, loss_weight: LossWeight = "samples",
         ignore_index: int = -100, cluster: Cluster | None = None) -> PlanEngine:  # fmt: skip
    """Train `model` by `plan` in one's own loop, under torchrun with one process per device of the plan.

    `sample` is an input batch (any number of samples; shapes and types matter). `loss_fn(output, targets)` returns a mean,
    over samples or (loss_weight "tokens") over the targets that differ from `ignore_index`. Every rank must build
    the same model (seed it). Nodes are bound to torchrun's agents in the order of `cluster`, or of the plan's node names.
    """
    connect(use_cuda=torch.cuda.is_available())
    nodes = cluster.nodes if cluster is not None else _nodes_of(plan)
    shown = cluster or Cluster.model_construct(format="hetpipe.cluster/1", device_types={}, nodes=nodes)
    everyone = create_world(shown)
    groups = PlanGroups.create(plan, everyone.rank_of, tied_layers(model))
    world = everyone.restrict(plan.device_ids)
    if world.device_id is None:
        raise InputError(
            f"rank {world.rank} has no part in the plan, which uses {list(plan.device_ids)}; start one process per device of it"
        )
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    loss = Loss(function=loss_fn, weight=loss_weight, ignore_index=ignore_index)
    engine = TorchEngine(
        Model(name=plan.model, layers=model, inputs=sample, targets=sample, loss=loss),
        plan,
        world,
        groups,
        device,
    )
    check_same_model(engine)
    return engine


def check_same_model(engine: PlanEngine) -> None:
    """InputError on every rank if replicas of a layer differ. (One pipeline has each layer once: any weights are one model.)"""
    different = None
    try:
        engine.sync.check_equal()
    except ReplicaMismatchError as error:
        different = str(error)
    found = [message for message in engine.world.gather(different) if message is not None]
    if found:
        raise InputError("the ranks built different models; call torch.manual_seed with the same seed on every rank "
                         f"before building it, or load the same weights ({found[0]})")  # fmt: skip
