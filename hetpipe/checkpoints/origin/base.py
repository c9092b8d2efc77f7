"""The model that adapters were added to: a checkpoint does not hold it, but says which one it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.stores.folder import FolderStore
from hetpipe.checkpoints.stores.store import Stored
from hetpipe.checkpoints.training_state import said_of
from hetpipe.documents.job import Job
from hetpipe.documents.sections.adapter import AdapterSection
from hetpipe.files.formats import validated
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.files.tensors import note_tensor
from hetpipe.layers.adapters.adapt import adapter_of
from hetpipe.layers.adapters.folder import AdapterFolder
from hetpipe.layers.adapters.names import joined, trained_in
from hetpipe.layers.transforms import added_as, kept_elsewhere, lineage_of, tensors_of, uncompiled
from hetpipe.processes.progress import warn
from hetpipe.processes.world import World

KEY, SECTION = "model.base", "adapter."  # of what a run depends on
BEGUN = "begun.adapter"  # there, too: the folder in which adapters began; None of new ones


def base_of(layers: Iterable[nn.Module]) -> str | None:
    """A digest of it: of what it was read or drawn from, where its layers say so (`base_digest`); else of names, types, shapes
    and a few numbers of each of its tensors. None where nothing was added."""
    found, own = list(map(uncompiled, layers)), hashlib.sha256()
    if not any(map(is_adapted, found)):
        return None
    for number, layer in enumerate(found):
        source = getattr(lineage.written if (lineage := lineage_of(layer)) is not None else layer, "base_digest", None)
        if isinstance(source, str):
            return source
        trained = {name for name, p in layer.named_parameters(remove_duplicate=False) if p.requires_grad}
        for name, tensor in sorted(tensors_of(layer).items()):
            if name in kept_elsewhere(layer) or (name not in trained and name not in layer.state_dict()):
                note_tensor(own, f"{number}.{name}", tensor.detach())
    return own.hexdigest()[:32]


def is_adapted(layer: nn.Module) -> bool:
    """Whether adapters were added to it."""
    return added_as(layer) is not None


def pinned_base(layers: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the digest of the base as one of the keys that a run depends on. For adapters that began in a folder the other
    keys say what these are, in the place of the folder's name."""
    found, adapter = base_of(layers), adapter_of(layers)
    begun = adapter.model_dump(mode="json") | {"weights": None} if adapter is not None and adapter.weights is not None else {}
    return ({KEY: found} if found is not None else {}) | {f"{SECTION}{key}": value for key, value in begun.items()}


def begun_in(layers: Iterable[nn.Module], saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the folder in which adapters began, as one of the keys that a run depends on: as the checkpoint says it from
    which the run resumes (`saved`), else as its layers say it. Nothing where there are no adapters, or a checkpoint does not
    say it."""
    if saved is not None:
        return {BEGUN: saved[BEGUN]} if BEGUN in saved else {}
    adapter = adapter_of(layers)
    return {BEGUN: adapter.weights} if adapter is not None else {}


def adapter_keys(layers: Iterable[nn.Module]) -> dict[str, Any] | None:
    """Describe the adapters by the keys of a job's section; None without any. (Dropout may change.)"""
    found = adapter_of(layers)
    return found.model_dump(mode="json", exclude={"dropout", "weights"}) if found is not None else None


def adapter_names(layers: nn.Sequential) -> dict[str, str] | None:
    """What adapters, and what trains with them, are called by the library that the layers are of, by their names in a checkpoint;
    None where a layer does not say it."""
    try:
        found = trained_in(layers)
    except InputError:  # said when somebody writes them for that library
        return None
    return {name: joined(path, kind) for name, (path, kind) in found.adapters.items()} | found.whole


def adapter_said(state: object) -> dict[str, Any]:
    """Describe the adapters of a checkpoint by the keys of a job's section; nothing for one without. `state`: its plain part."""
    job: Mapping[str, Any] = getattr(state, "job", None) or {}
    keys = {name.removeprefix(SECTION): value for name, value in job.items() if name.startswith(SECTION)}
    return dict(getattr(state, "adapter", None) or keys)


def with_saved_adapter(job: Job, saved: Mapping[str, Any]) -> Job:
    """A job whose adapters begin in a folder, once its run has begun: with what they are by a checkpoint (`saved`: what its run
    depended on) in the place of the folder. What the job says beside that stays."""
    section = job.adapter
    keys = {name.removeprefix(SECTION): value for name, value in saved.items() if name.startswith(SECTION)}
    if section is None or section.weights is None or not keys:
        return job
    own = keys | section.said | {"weights": None, "base": section.base}
    found = validated(AdapterSection, own, "the job's section adapter and its checkpoint", "description of adapters")
    return job.model_copy(update={"adapter": found})


def going_on(job: Job, world: World) -> Job:
    """The job, or, where its adapters begin in a folder and there is a checkpoint, `with_saved_adapter` of that. Collective."""
    if job.adapter is None or job.adapter.weights is None or job.checkpoint is None:
        return job
    newest = checkpoint.newest(FolderStore(job.checkpoint.folder), world)
    if newest is None:
        return job
    said = list[Mapping[str, Any]]()
    world.on_main(lambda: said.append(said_of(newest)))
    saved = world.first(said)[0]
    _check_beginning(job.adapter.weights, saved, newest)
    own = with_saved_adapter(job, saved)
    if own is not job and world.is_main:
        warn(f"note: adapter.weights ({job.adapter.weights}) is not read, because the run resumes from {newest}")
    return own


def _check_beginning(weights: str, saved: Mapping[str, Any], newest: Stored) -> None:
    """InputError where a run goes on that began with other adapters than those that the job names."""
    if BEGUN not in saved or is_one(began := saved[BEGUN], weights):
        return
    before, back = "new adapters", "leave adapter.weights out"
    if began is not None:
        before, back = f"the adapters in {shown(began)}", f"write adapter.weights: {began}"
    raise InputError(
        f"adapter.weights is {shown(weights)}, but the run of checkpoint {newest} began with {before}. To begin with the "
        "adapters "
        f"in {weights}, name another checkpoint.folder. To resume that run, {back}"
    )


def check_begun(job: Job, world: World) -> None:
    """InputError on every rank if they begin with different adapters; a note where the folder names another base. Collective."""
    if job.adapter is None or job.adapter.weights is None:
        return
    folder = AdapterFolder(job.adapter.weights)
    every = world.gather(folder.digest())
    for rank, other in zip(world.ranks, every, strict=True):
        if other != every[0]:
            raise InputError(
                f"adapter.weights: the files in {folder} differ between rank {rank} ({other}) and rank "
                f"{world.ranks[0]} ({every[0]}). Give all hosts the same folder"
            )
    theirs, own = folder.config.get("base_model_name_or_path"), job.model.args.get("weights")
    if world.is_main and theirs and own is not None and not is_one(str(theirs), str(own)):
        warn(
            f"note: the adapters in {folder} were trained beside {shown(theirs)} (base_model_name_or_path), and now train beside "
            f"{shown(own)} (model.args.weights)"
        )


def is_one(theirs: str | None, own: str | None) -> bool:
    """Whether two names are of one folder, or one model on Hugging Face; or both None."""
    if theirs is None or own is None:
        return theirs is own
    names, paths = [name.partition("@")[0] for name in (theirs, own)], [os.path.expanduser(name) for name in (theirs, own)]
    return names[0] == names[1] or (all(map(os.path.exists, paths)) and os.path.samefile(*paths))


def check_adapted(state: object, layers: Sequence[nn.Module], source: object) -> None:
    """InputError where adapters would go on beside another model than that with which they were trained, or otherwise. `state`:
    the plain part of a checkpoint."""
    job: Mapping[str, Any] = getattr(state, "job", None) or {}
    saved, own = getattr(state, "base", None) or job.get(KEY), base_of(layers)
    if saved != own:
        told = [f"adapters of the model {base}" if base is not None else "no adapters" for base in (saved, own)]
        raise InputError(
            f"checkpoint {source} was saved with {told[0]}, but the model has {told[1]} (digests of names, shapes and a few "
            "numbers of all tensors). Build the model as it was, or name another folder to start anew"
        )
    before, now = adapter_said(state), adapter_keys(layers) or {}
    others = [
        f"adapter.{key} was {shown(before.get(key))}, is {shown(value)}" for key, value in now.items() if before.get(key) != value
    ]
    if others:
        raise InputError(f"checkpoint {source} holds other adapters. Set these keys back:\n{listed(others)}")


def other_base(saved: Mapping[str, Any]) -> str:
    """What is said where a job's model is another."""
    return "the adapters that were saved are of another model: write model.args.weights as it was" + (
        f" ({saved['model.args.weights']})" if "model.args.weights" in saved else ""
    )
