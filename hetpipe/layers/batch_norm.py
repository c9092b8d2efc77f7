"""BatchNorm and its kin: modules whose output, or whose state, depends on which samples are in a batch together. Cut into
micro-batches and replicas, a batch is not the one that a single device sees, so they need a choice."""

from __future__ import annotations

from typing import get_args

from torch import nn

from hetpipe.documents.job import BatchNorm
from hetpipe.files.messages import InputError, nearest

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
AnyBatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def normalises_batches(module: nn.Module) -> bool:
    """Whether a module normalises by the samples that are in a batch together (BatchNorm of any kind that trains, or that keeps
    no running statistics), or gathers statistics of them (an InstanceNorm that tracks, and whatever else has buffers named
    `running_…`). In evaluation mode these are layers like any other."""
    if isinstance(module, BATCH_NORMS):
        return module.training or module.running_mean is None
    return module.training and _tracks(module)


def _tracks(module: nn.Module) -> bool:
    return any(name.startswith("running_") and buffer is not None for name, buffer in module._buffers.items())


def may_normalise_batches(layers: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, by name, that do so in one mode or the other."""
    return [(name, m) for name, m in layers.named_modules() if isinstance(m, BATCH_NORMS) or _tracks(m)]


def check_batch_norm(layers: nn.Sequential, choice: BatchNorm | None, *, whole_replicas: bool = False) -> None:
    """InputError if there are such modules and no choice, or one that cannot be kept to. `whole_replicas`: the back end drives
    each replica from one process."""
    if choice is not None and choice not in (known := get_args(BatchNorm)):
        raise InputError(f"unknown batch_norm {choice!r}{nearest(str(choice), known)}")
    found = [(name, module) for name, module in may_normalise_batches(layers) if normalises_batches(module)]
    for name, module in found:
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise InputError(
                f"layer {name!r} is a SyncBatchNorm, which waits for all ranks in the middle of a forward, while other ranks "
                "run other layers: build the model with BatchNorm, and choose batch_norm"
            )
    if choice == "deferred":
        if not whole_replicas:
            raise InputError("batch_norm: deferred needs the fairscale or torchgpipe back end; with torch choose per_microbatch")
        for name, module in found:
            if not isinstance(module, BATCH_NORMS):
                raise InputError(
                    f"batch_norm: deferred gathers the statistics of BatchNorm, and {name!r} is a {type(module).__name__}: "
                    "choose per_microbatch"
                )
    if found and choice is None:
        name, module = found[0]
        raise InputError(needs_a_choice(name, module))


def needs_a_choice(name: str, module: nn.Module) -> str:
    """What is said of the first such module."""
    if isinstance(module, BATCH_NORMS):
        what = f"the model has BatchNorm (first: {name!r}), which normalises every micro-batch by its own statistics, so "
        what += "gradients differ from those of one device with the whole batch"
    else:
        what = f"the model has running statistics (first: those of {name!r}, {type(module).__name__}), which count every "
        what += "micro-batch as a batch, so they differ from those of one device with the whole batch"
    return (
        f"{what}; to accept that, write 'batch_norm: per_microbatch' in the job's model section, or "
        'batch_norm="per_microbatch" in hetpipe.wrap and hetpipe.auto'
    )
