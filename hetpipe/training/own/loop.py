"""`hetpipe.wrap`: one's own model, one's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from hetpipe.documents.cluster import Cluster, Node
from hetpipe.documents.job import BatchNorm, CoupledLayers
from hetpipe.documents.number_types import Precision
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Backend, Plan
from hetpipe.files.messages import InputError, natural_key
from hetpipe.hf.replay.rows import refuse_mixed_rows
from hetpipe.layers.batch_norm import check_batch_norm
from hetpipe.layers.model import Loss, LossFunction, LossWeight, Model, Tensors
from hetpipe.layers.shards.styles import set_styles
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.processes.world import connect, create_world
from hetpipe.runtime.backends import check_backend, check_cluster, drives_a_replica
from hetpipe.runtime.checks.arguments import arguments
from hetpipe.runtime.checks.stale import set_aside
from hetpipe.runtime.gradients import ReplicaMismatchError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.session import Setting, join

ANY = "any"  # the device type of a plan without a cluster
FULL: Precision = "fp32"
OwnPrecision = Precision | Mapping[str, Precision] | None


def _nodes_of(plan: Plan) -> tuple[Node, ...]:
    """The nodes that a plan names, in natural order, each as large as its greatest index (for plans without a cluster file)."""
    greatest: dict[str, int] = {}
    for device in plan.device_ids:
        node, index = device.rsplit("/", 1)
        greatest[node] = max(greatest.get(node, 0), int(index))
    return tuple(Node(name=name, devices={ANY: greatest[name] + 1}) for name in sorted(greatest, key=natural_key))


def wrap(
    model: nn.Sequential,
    plan: Plan,
    sample: Tensors,
    loss_fn: LossFunction,
    *,
    loss_weight: LossWeight = "samples",
    ignore_index: int = -100,
    cluster: Cluster | None = None,
    backend: Backend = "torch",
    batch_norm: BatchNorm | None = None,
    coupled_layers: CoupledLayers | None = None,
    precision: OwnPrecision = None,
    tensor_parallel: Mapping[str, str] | None = None,
    seed: int | None = None,
) -> PlanEngine:
    """Train `model` by `plan` in one's own loop, under torchrun with one process per device of the plan (`backend` torch) or per
    replica (fairscale, torchgpipe; each on one host, in the order of the plan).

    `sample` is an input batch (any number of samples; types and the number of dimensions matter; other lengths of these may come
    from step to step, but no larger samples, since memory is planned by it). `loss_fn(output, targets)` returns a mean,
    over samples, (loss_weight "tokens") over the targets that differ from `ignore_index`, or a weighted one: `loss_weight` is
    then a function of targets that returns the number which the loss of these divides by. In the first step the loss is tried
    on two parts of its targets against the whole: InputError if it is no such mean. Every rank must build the same model (seed
    it). Nodes are bound to torchrun's agents in the order of `cluster`, or of the plan's node names.
    Modules stay in the mode they are in: what `.eval()` froze stays frozen, and `engine.evaluate` puts every mode back.
    `batch_norm` accepts that BatchNorm that trains normalises each micro-batch by itself: "per_microbatch", or "deferred" for
    running statistics of the whole batch (fairscale and torchgpipe only); without it, InputError. Layers are tried in the first
    step: InputError if one couples samples, keeps state, or adds a gradient of its own, unless `coupled_layers` is
    "per_microbatch", which accepts that each micro-batch is a batch of its own to them.
    `precision` (of parameters in float32) is what matrix products are computed in: "fp32", "bf16" or "fp16" on all devices, or
    one for each device type of `cluster` (fp32 on those that are not named); without it, as the plan says, or else in the
    caller's torch.autocast. Where a device computes in fp16 the engine scales the loss (`engine.loss_scale`): after a step whose
    gradients overflow, `engine.overflowed`, an optimizer's step leaves all parameters as they are.
    Where the plan splits a stage over several devices, `tensor_parallel` says how modules of the model are split: their names, in
    which `*` stands for anything, and styles, as in {"block*.up": "colwise", "block*.down": "rowwise"}. Without it, layers say so
    themselves, by an attribute of that name. In the first step split layers are compared with whole ones: InputError if they
    compute something else.
    What layers draw is decided by `seed` (by default the main rank's, as torch.manual_seed has set it), the rank and the step;
    the generators of torch, numpy and Python are left as they were, here and in each step.
    """
    loss = Loss(function=loss_fn, weight=loss_weight, ignore_index=ignore_index)
    told = arguments(
        model,
        loss_fn,
        loss_weight,
        cluster,
        ignore_index=ignore_index,
        backend=backend,
        batch_norm=batch_norm,
        coupled_layers=coupled_layers,
        precision=precision,
        tensor_parallel=tensor_parallel,
        seed=seed,
    )
    seed = torch.initial_seed() if seed is None else seed
    if tensor_parallel is not None:
        set_styles(model, tensor_parallel, "tensor_parallel")
    with drawing("wrap"):
        check_backend(backend, plan)
        check_cluster(backend, cluster)
        connect(use_cuda=torch.cuda.is_available(), told=told)
        nodes = cluster.nodes if cluster is not None else _nodes_of(plan)
        shown = cluster or Cluster.model_construct(format="hetpipe.cluster/1", device_types={}, nodes=nodes)
        world = create_world(shown)
        with set_aside(model):
            whole = Model(
                name=plan.model,
                layers=model,
                inputs=sample,
                targets=sample,
                loss=loss,
                batch_norm=batch_norm,
                coupled_layers=coupled_layers,
            )
        check_batch_norm(model, batch_norm, whole_replicas=drives_a_replica(backend))
        refuse_mixed_rows(model, sample)
        setting = Setting(world=world, cluster=shown, model=whole, seed=world.first(seed))
        plan = _at_precision(plan.model_copy(update={"backend": backend}), precision, setting, cluster)
        engine = join(setting, plan, None)
        if engine is None:
            per = "replica" if drives_a_replica(backend) else "device"
            raise InputError(
                f"rank {world.rank} has no part in the plan, which uses {list(plan.device_ids)}; start one process "
                f"per {per} of it"
            )
        check_same_model(engine)
    return engine


def _at_precision(plan: Plan, precision: OwnPrecision | Literal["auto"], setting: Setting, cluster: Cluster | None) -> Plan:
    """The plan with what each device type of the cluster, or the one type of a plan without a cluster, computes in."""
    if precision == "auto":
        raise InputError(
            "what is the fastest precision of a device is known once it is measured: hetpipe.auto(…, "
            "precision='auto') does that; give hetpipe.wrap one by name"
        )
    by_type = precision if isinstance(precision, Mapping) else None
    for given, others in ((by_type, ", or one precision for all devices, such as 'bf16'"), (plan.precision, "")):
        if cluster is None and given is not None and (given is by_type or len(set(given.values())) > 1):
            raise InputError(
                f"devices compute in {dict(given)}, by their types, which only a cluster tells: give hetpipe.wrap "
                f"the cluster{others}"
            )
    if cluster is None:
        planned = {ANY: next(iter(plan.precision.values()))} if plan.precision else None
        plan = plan.model_copy(update={"precision": planned})
    else:
        plan.check(cluster=cluster)
        precision = {**dict.fromkeys(cluster.device_types, FULL), **by_type} if by_type is not None else precision
    return setting.decided(plan, PlanOptions().changed({"precision": precision}))


def check_same_model(engine: PlanEngine) -> None:
    """InputError on every rank if replicas of a layer differ. (One pipeline has each layer once: any weights are one model.)"""
    try:
        engine.check_replicas(buffers=True)
    except ReplicaMismatchError as error:
        raise InputError(
            "the ranks built different models; call torch.manual_seed with the same seed on every rank "
            f"before building it, or load the same weights ({error})"
        ) from None
