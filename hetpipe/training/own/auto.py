"""`hetpipe.auto`: measure, plan and wrap one's own model in one call, on the devices that torchrun gave."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from hetpipe.building.called import extras_of, masked_first
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import BatchNorm, CoupledLayers, ProfileSection
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.hf.replay.rows import refuse_mixed_rows
from hetpipe.layers.batch_norm import check_batch_norm
from hetpipe.layers.model import Loss, LossFunction, LossWeight, Model, Tensors, select, unsplit_note
from hetpipe.layers.trials.loss_check import check_sample
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.processes.progress import warn
from hetpipe.runtime.checks.arguments import arguments
from hetpipe.runtime.checks.stale import set_aside
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.own.loop import OwnPrecision, check_same_model
from hetpipe.training.session import Request, Setting, join, meet, prepare


class UnusedRank(Exception):
    """The plan is faster without this rank's device: it has nothing to do, and may end (with exit code 0)."""


def auto(
    model: nn.Sequential,
    sample: tuple[Tensors, Tensors],
    loss_fn: LossFunction,
    *,
    global_batch: int,
    loss_weight: LossWeight = "samples",
    ignore_index: int = -100,
    cluster: Cluster | None = None,
    optimizer: str = "AdamW",
    partitioner: str = "auto",
    batch_norm: BatchNorm | None = None,
    coupled_layers: CoupledLayers | None = None,
    precision: OwnPrecision | Literal["auto"] = None,
    seed: int | None = None,
) -> PlanEngine:
    """Measure every layer on every type of device, plan for `global_batch` samples a step, and wrap the model by that plan.

    `sample` is a small batch (inputs, targets), like those of the training: shapes and types matter, and token counts. Steps may
    have samples of other lengths, but none that are larger.
    `loss_fn`, `loss_weight`, `ignore_index`, `batch_norm`, `coupled_layers`, `precision` and `seed` are as in `hetpipe.wrap`;
    `precision` "auto" is on each type of device the fastest that is safe, of those that it can compute in. `optimizer`
    names the class of torch.optim that will be used, whose time and memory are measured too. Every rank builds the same model
    (seed it) and calls this, under torchrun with one process per device. The devices are those of `cluster`, else those that are
    found. The measurement is kept in `.hetpipe/profiles` and used again for the same model on the same devices.

    The plan is `engine.plan`; `engine.replica` says which of its replicas this rank belongs to. Modules stay in the mode they
    are in: what `.eval()` froze stays frozen. UnusedRank on a rank without which the plan is faster: nobody waits for it, so
    it may end. InputError if an argument is wrong, PartitionError if no plan fits.
    """
    inputs, targets = sample
    loss = Loss(function=loss_fn, weight=loss_weight, ignore_index=ignore_index)
    told = arguments(
        model,
        loss_fn,
        loss_weight,
        cluster,
        global_batch=global_batch,
        ignore_index=ignore_index,
        optimizer=optimizer,
        partitioner=partitioner,
        batch_norm=batch_norm,
        coupled_layers=coupled_layers,
        precision=precision,
        seed=seed,
    )
    seed = torch.initial_seed() if seed is None else seed
    with drawing("auto"):
        world, machines = meet(cluster, told=told)
        with set_aside(model):
            whole = Model(
                name=type(model).__name__.lower(),
                layers=model,
                inputs=inputs,
                targets=targets,
                loss=loss,
                batch_norm=batch_norm,
                coupled_layers=coupled_layers,
            )
            order = masked_first(inputs, ("input_ids", *(extras_of(model) or ())))
            whole = replace(whole, inputs=select(inputs, order), targets=select(targets, order))
            check_batch_norm(model, batch_norm)
            refuse_mixed_rows(model, inputs)
            # a layer that does not take the sample, or a loss that does not do, is known before anything is measured
            rows, kinds = trace(model, inputs, backward=True)
            check_sample(whole, rows[-1], "the sample")
            whole = replace(whole, kinds=kinds)
            if world.is_main and (note := unsplit_note(model)):
                warn(f"note: {note}")
            setting = Setting(world=world, cluster=machines, model=whole, found=cluster is None, seed=world.first(seed))
            options = PlanOptions().changed({"partitioner": partitioner, "precision": precision})
            request = Request(
                global_batch=global_batch, options=options, profiler=ProfileSection(), optimizer=TorchNamed(name=optimizer)
            )
            plan, profile = prepare(setting, request)
        engine = join(setting, plan, profile)
        if engine is None:
            raise UnusedRank(f"rank {world.rank} is not used: the plan is faster without device {world.device_id}")
        check_same_model(engine)
    return engine
