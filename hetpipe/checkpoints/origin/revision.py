"""The revision of weights that are named on Hugging Face: it is the same on all ranks, and after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hetpipe.checkpoints.origin.base import with_saved_adapter
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.layers.transforms import uncompiled
from hetpipe.processes.world import World

KEY, WEIGHTS = "model.revision", "model.args.weights"  # of what a run depends on


def revision_of(layers: Iterable[nn.Module]) -> str | None:
    """The hash of the commit that the layers say (their `revision`); None where they are of a folder, or of none."""
    found = (getattr(uncompiled(layer), "revision", None) for layer in layers)
    return next((revision for revision in found if isinstance(revision, str)), None)


def pinned(layers: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the revision as one of the keys that a run depends on."""
    revision = revision_of(layers)
    return {KEY: revision} if revision is not None else {}


def at_revision(job: Job, saved: Mapping[str, Any]) -> Job:
    """The job with the revision of the model, and the adapters, that a checkpoint says."""
    job = with_saved_adapter(job, saved)
    name = job.model.args.get("weights")
    if KEY not in saved or name is None or name != str(saved.get(WEIGHTS)).partition("@")[0]:
        return job
    args = {**job.model.args, "weights": f"{name}@{saved[KEY]}"}
    return job.model_copy(update={"model": job.model.model_copy(update={"args": args})})


def check_same_revision(layers: Iterable[nn.Module], world: World) -> None:
    """InputError on every rank if they have other revisions: the model may have changed between two downloads. Collective."""
    every = world.gather(revision_of(layers))
    for rank, other in zip(world.ranks, every, strict=True):
        if other != every[0]:
            raise InputError(
                f"the ranks have different revisions of the model: rank {world.ranks[0]} has {every[0]}, rank {rank} has "
                f"{other}. "
                "Write one behind the model's name (owner/name@revision)"
            )


def is_another(saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether a run had one revision, and would go on with another."""
    return None not in (saved.get(KEY), own.get(KEY)) and saved[KEY] != own[KEY]


def to_set_back(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Both, and what to write."""
    name = str(saved.get(WEIGHTS, own.get(WEIGHTS))).partition("@")[0]
    return f"{KEY} was {saved[KEY]}, is {own[KEY]}: write {WEIGHTS}: {name}@{saved[KEY]}"
