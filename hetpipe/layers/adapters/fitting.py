"""Whether the tensors of a folder of peft fit a chain: each has its module, or its tensor of the model, each module all that it
needs, of the right shape; and what lies beside them is the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.documents.sections.adapter import CONFIG_FILE, AdapterSection
from hetpipe.files.messages import InputError, natural_key, one_line, shown
from hetpipe.layers.adapters.folder import PREFIX, AdapterFolder
from hetpipe.layers.adapters.names import Place, joined, modules_in, names_of, split_kind, uncompiled_layers, without_base
from hetpipe.layers.adapters.targets import adaptable, is_turned
from hetpipe.layers.transforms import lineage_of, tensors_of, written_names
from hetpipe.layers.weights import Deferred

Keys = Mapping[str, str]  # a name outside → the name in the file
Shape = tuple[int, ...]


class Held(NamedTuple):
    """A tensor of the model, in its layer under this name."""

    layer: nn.Module
    own: str
    tensor: Tensor

    def value(self) -> Tensor | None:
        """Return its value; None where nothing says it before training begins."""
        lineage = lineage_of(self.layer)
        source = self.layer if lineage is None else lineage.written
        if not self.tensor.is_meta:
            return self.tensor.detach().cpu()
        return source.values([self.own])[self.own] if isinstance(source, Deferred) else None


class Outside(NamedTuple):
    """A chain by what its modules and its tensors are called outside (see `Place`)."""

    modules: Mapping[str, Sequence[Place]]
    tensors: Mapping[str, Sequence[Held]]

    @classmethod
    def of(cls, layers: nn.Sequential) -> Outside:
        """Describe a chain without adapters."""
        modules, tensors = dict[str, list[Place]](), dict[str, list[Held]]()
        for place in modules_in(layers):
            if place.outside is not None:
                modules.setdefault(place.outside, []).append(place)
        for label, layer in uncompiled_layers(layers):
            names, written = names_of(label, layer), written_names(layer)
            for own, tensor in tensors_of(layer).items():
                said = written(own)
                outside = joined(label, said) if names is None else names.get(said)
                if outside is not None:
                    tensors.setdefault(outside, []).append(Held(layer, said, tensor))
        return cls(modules, tensors)

    def example(self) -> str:
        """How its modules are called, in words; for a line behind faults."""
        able = [name for name, places in self.modules.items() if adaptable(places[0].module)]
        return f"(in the model names are as in {shown(able[len(able) // 2])})" if able else ""

    def alike(self, name: str) -> list[str]:
        """Return all names of a tensor, including this one."""
        same = {id(held.tensor) for held in self.tensors[name]}
        return sorted(other for other, there in self.tensors.items() if any(id(held.tensor) in same for held in there))


class Sorted(NamedTuple):
    """What a file holds: of adapters, module → part → key; what trains as a whole, and copies of what does not, tensor → key."""

    adapters: Mapping[str, Keys]
    trained: Keys
    copies: Keys


def sort_out(folder: AdapterFolder, chain: Outside) -> Sorted:
    """The names in the file, by what they are of."""
    adapters, trained, copies = dict[str, dict[str, str]](), dict[str, str](), dict[str, str]()
    for key in sorted(folder.shapes, key=natural_key):
        name = key.removeprefix(PREFIX)
        path, kind = split_kind(name)
        plain = without_base(name)
        if kind:
            adapters.setdefault(path, {})[kind] = key
        elif plain == name and _is_saved(name, folder):
            trained[name] = key
        else:
            copies[plain] = key
    if folder.config.get("ensure_weight_tying"):
        tied = {other for name in trained.keys() & chain.tensors.keys() for other in chain.alike(name)} & copies.keys()
        trained |= {name: copies.pop(name) for name in tied}
    return Sorted(adapters, trained, copies)


def _is_saved(name: str, folder: AdapterFolder) -> bool:
    """Whether a tensor is of a module that modules_to_save names: as peft has it, whose name, or that of one above, ends so."""
    ends, whole = tuple(folder.config.get("modules_to_save") or ()), f"{PREFIX}{name}"
    return any(whole[:at].endswith(ends) for at, letter in enumerate(whole) if letter == "." and at >= len(PREFIX))


def misfits(folder: AdapterFolder, section: AdapterSection, found: Sorted, chain: Outside) -> list[str]:
    """Whatever does not fit, in words."""
    strange = [key for key in folder.shapes if not key.startswith(PREFIX)]
    faults = [f"{shown(key)} does not begin with {PREFIX}, as peft writes names" for key in strange]
    for name, parts in found.adapters.items():
        faults += _of_adapter(folder, section, name, parts, chain.modules.get(name, ()))
    left_out = _left_out(folder, found, chain)
    faults += [f"{shown(name)} has no tensors, and is one of the target_modules in {CONFIG_FILE}" for name in left_out]
    saved = [name for name, held in chain.tensors.items() if isinstance(held[0].tensor, nn.Parameter) and _is_saved(name, folder)]
    faults += [
        f"{shown(name)} is not there, and is one of the modules_to_save in {CONFIG_FILE}"
        for name in saved
        if name not in found.trained
    ]
    for name, key in {**found.trained, **found.copies}.items():
        there = chain.tensors.get(name)
        if not there:
            faults.append(f"{shown(name)} is no tensor of the model")
        elif tuple(there[0].tensor.shape) != folder.shapes[key]:
            faults.append(f"{shown(name)} has shape {list(folder.shapes[key])}, in the model {list(there[0].tensor.shape)}")
    return faults


def _of_adapter(folder: AdapterFolder, section: AdapterSection, name: str, parts: Keys, places: Sequence[Place]) -> Iterator[str]:
    if not places:
        yield f"{shown(name)} is no module of the model"
        return
    module = places[0].module
    if not adaptable(module):
        yield f"{shown(name)} is a {type(module).__name__}: adapters are added to linear layers and embeddings"
        return
    if section.use_dora and isinstance(module, nn.Embedding):
        yield f"{shown(name)} is an embedding: use_dora is for linear layers here"
        return
    wanted = parts_of(module, section)
    yield from (f"{shown(name)} has no {kind}" for kind in wanted if kind not in parts)
    yield from (f"{shown(name)} has {kind}, which is none of what {CONFIG_FILE} says" for kind in parts if kind not in wanted)
    for kind, shape in wanted.items():
        if kind in parts and (there := folder.shapes[parts[kind]]) != shape:
            yield f"{kind} of {shown(name)} has shape {list(there)}; beside this module, with r {section.r}, it is {list(shape)}"


def parts_of(module: nn.Module, section: AdapterSection) -> dict[str, Shape]:
    """What peft calls the tensors of a module's adapter, and their shapes."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    r, (rows, columns) = section.r, weight.shape
    if isinstance(module, nn.Embedding):
        return {"lora_embedding_A": (r, rows), "lora_embedding_B": (columns, r)}
    outputs, inputs = (columns, rows) if is_turned(module) else (rows, columns)
    length = {"lora_magnitude_vector": (outputs,)} if section.use_dora else {}
    return {"lora_A.weight": (r, inputs), "lora_B.weight": (outputs, r), **length}


def _left_out(folder: AdapterFolder, found: Sorted, chain: Outside) -> list[str]:
    """Modules that peft would adapt by its configuration, and of which the file has nothing."""
    from peft.tuners.tuners_utils import check_target_module_exists

    keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "target_parameters")
    config = SimpleNamespace(**{key: folder.config.get(key) for key in keys})
    if not isinstance(config.target_modules, str | list):
        return []
    able = [name for name, places in chain.modules.items() if adaptable(places[0].module)]
    try:
        return [name for name in able if name not in found.adapters and bool(check_target_module_exists(config, name))]
    except Exception as error:  # whatever peft says, of a regular expression above all
        raise InputError(
            f"adapter.weights: which modules {CONFIG_FILE} in {folder} names cannot be found out: {one_line(error)}"
        ) from error


def of_another_base(folder: AdapterFolder, found: Sorted, chain: Outside) -> list[str]:
    """What tells that the adapters were trained beside another base: its matrices differ, or one of them was two."""
    faults = []
    for name, key in found.copies.items():
        theirs, own = folder.read(key), chain.tensors[name][0].value()
        if own is not None and not torch.equal(own.to(theirs.dtype), theirs):
            faults.append(f"{shown(name)}, which did not train, has other numbers than in this model: it was another base")
    for name, key in found.trained.items():
        for other in chain.alike(name):
            if other not in found.trained:
                faults.append(f"{shown(name)} trained as a whole, and {shown(other)} did not: {_ONE}")
            elif other > name and not torch.equal(folder.read(key), folder.read(found.trained[other])):
                faults.append(f"{shown(name)} and {shown(other)} trained apart: {_ONE}")
    tied = folder.config.get("ensure_weight_tying")
    embeddings = [name for name in found.adapters if isinstance(chain.modules[name][0].module, nn.Embedding)]
    return faults + [
        f"the adapter of {shown(name)} is also that of the head (ensure_weight_tying): here each has its own"
        for name in embeddings
        if tied and len(chain.alike(joined(name, "weight"))) > 1
    ]


_ONE = "they are one matrix in this model; take a base in which they are two (tie_word_embeddings: false)"
