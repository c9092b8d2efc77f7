"""Adapters that were trained before, of a folder of peft, as those of this chain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from hetpipe.documents.sections.adapter import CONFIG_FILE, AdapterSection, TrainedToo
from hetpipe.files.formats import validated
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.layers.adapters.fitting import Outside, misfits, of_another_base, sort_out
from hetpipe.layers.adapters.folder import AdapterFolder
from hetpipe.layers.adapters.targets import described, targets_of, trained_too, whole_modules

KEYS = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rank_stabilized": "use_rslora", "use_dora": "use_dora"}
KINDS: tuple[TrainedToo, ...] = ("embed", "head", "norms")


class Given(NamedTuple):
    """`section`: as which adapters they go on. `adapters`: module → part (`lora_A.weight`) → name in the file; `whole`: tensor
    that trains as a whole (its id) → name in the file."""

    folder: AdapterFolder
    section: AdapterSection
    adapters: Mapping[nn.Module, Mapping[str, str]]
    whole: Mapping[int, str]

    def read(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the file. InputError where it does not have the shape any more that it had."""
        found = self.folder.read(key)
        if tuple(found.shape) != shape:
            told = f"has shape {list(found.shape)}, and had {list(shape)}: leave it alone until there is a checkpoint"
            raise InputError(f"adapter.weights: {shown(key)} in {self.folder} {told}")
        return found


def given_by(section: AdapterSection, layers: nn.Sequential) -> Given:
    """What the folder `section.weights` holds for this chain, which has no adapters yet. InputError where it is of another model,
    or damaged, or where the section says something else beside it."""
    folder, chain = AdapterFolder(str(section.weights)), Outside.of(layers)
    found, own = sort_out(folder, chain), _section(folder, section)
    if faults := misfits(folder, own, found, chain):
        names = f"\n{chain.example()}" if found.adapters.keys() - chain.modules.keys() else ""
        raise InputError(f"adapter.weights: the adapters in {folder} do not fit the model:\n{listed(faults)}{names}")
    for key in folder.shapes:
        folder.read(key)  # says which is damaged
    adapters = {place.module: parts for name, parts in found.adapters.items() for place in chain.modules[name]}
    whole = {id(held.tensor): key for name, key in found.trained.items() for held in chain.tensors[name]}
    kinds = tuple(kind for kind in KINDS if (ids := _tensors_of(whole_modules(kind, layers))) and ids <= whole.keys())
    known = _tensors_of([module for kind in kinds for module in whole_modules(kind, layers)])
    faults = of_another_base(folder, found, chain)
    faults += [
        f"{shown(name)} trained as a whole, which here all embeddings, the head, or all norms do (train_also)"
        for name in found.trained
        if id(chain.tensors[name][0].tensor) not in known
    ]
    if faults:
        raise InputError(f"adapter.weights: the adapters in {folder} cannot go on beside this model:\n{listed(faults)}")
    own = own.model_copy(update={"targets": described(adapters.keys(), layers), "train_also": kinds})
    return Given(folder, _agreed(section, own, folder, layers), adapters, whole)


def _section(folder: AdapterFolder, section: AdapterSection) -> AdapterSection:
    """What the configuration says of all adapters, and the job of the base."""
    said = {own: folder.config[key] for own, key in KEYS.items() if folder.config.get(key) is not None}
    if missing := [KEYS[key] for key in ("r", "alpha") if key not in said]:
        raise InputError(f"adapter.weights: {CONFIG_FILE} in {folder} says no {' and no '.join(missing)}")
    source = f"adapter.weights: {CONFIG_FILE} in {folder}"
    return validated(AdapterSection, said | {"base": section.base}, source, "configuration of adapters")


def _tensors_of(modules: Collection[nn.Module]) -> set[int]:
    """Return the ids of the tensors that train when these modules train as a whole: their own, with the buffers that are
    saved."""
    kept = [b for module in modules for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
    own = [p for module in modules for p in module._parameters.values()]
    return {id(tensor) for tensor in (*own, *kept) if tensor is not None}


def _agreed(section: AdapterSection, own: AdapterSection, folder: AdapterFolder, layers: nn.Sequential) -> AdapterSection:
    """The folder's, with what is said beside it: the same in other words, or another dropout. InputError for anything else."""
    meaning: dict[str, Any] = {
        "targets": lambda of: {(layer, name) for layer, names in targets_of(of, layers).items() for name in names},
        "train_also": lambda of: _tensors_of(list(trained_too(of.train_also, layers))),
        "dropout": lambda of: None,
    }
    other = [
        key
        for key, value in section.said.items()
        if (mean := meaning.get(key, lambda of, key=key: getattr(of, key)))(section) != mean(own)
    ]
    if other:
        faults = [f"adapter.{key} is {shown(getattr(section, key))}, and there {shown(getattr(own, key))}" for key in other]
        raise InputError(f"adapter.weights: {folder} says it otherwise; leave it out, or write what is there:\n{listed(faults)}")
    return own.model_copy(update=section.said | {"weights": section.weights})
