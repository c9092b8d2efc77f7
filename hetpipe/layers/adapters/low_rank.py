"""LoRA as a transform of a chain's layers. peft adds the modules (Mangrulkar et al. 2022); their values come from a seed and
their names, or from a folder, so that every rank has the same, whatever it holds, and also on the meta device."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.documents.sections.adapter import AdapterSection
from hetpipe.files.messages import InputError, one_line
from hetpipe.layers.adapters.given import Given, given_by
from hetpipe.layers.adapters.names import ADAPTER, joined, split_kind, uncompiled_layers, without_base
from hetpipe.layers.adapters.quantised import LINEAR, QuantisedLinear, hush, load_bits
from hetpipe.layers.adapters.targets import is_turned, linear_modules, places_of, targets_of, trained_too
from hetpipe.layers.transforms import Changed, Made, tensors_of

_HELD = "layer"  # under which peft is given a layer: what it replaces must be in another module


class LowRank:
    """A frozen layer with adapters, and its matrices in few bits where the section says so. They are at first what the folder
    `section.weights` holds; without one, of `seed`: A as peft draws it (He et al. 2015, uniform), B zero, so that nothing changes
    before the first step. `section` is then as which adapters they were added, whoever said it."""

    def __init__(self, section: AdapterSection, layers: nn.Sequential, seed: int) -> None:
        load_peft()
        self._given = given_by(section, layers) if section.weights is not None else None
        section = self._given.section if self._given is not None else section
        self.section, self.seed = section, seed
        self._targets = targets_of(section, layers)
        self._few = dict[nn.Module, tuple[str, ...]]()
        if section.quantised is not None:
            load_bits(section.quantised)
            places = places_of(layers)  # what stands at several stays as it is
            self._few = {
                layer: tuple(name for name in names if len(places[layer.get_submodule(name)]) == 1)
                for layer, names in linear_modules(layers).items()
            }
            self._check_few()
        self._trained = {id(p) for module in trained_too(section.train_also, layers) for p in module.parameters(recurse=False)}
        self._check_targets(layers)

    def _check_targets(self, layers: nn.Sequential) -> None:
        """InputError where a target also trains in full, or is held otherwise than it can be adapted."""
        for label, layer in uncompiled_layers(layers):
            for path in self._targets.get(layer, ()):
                module, name = layer.get_submodule(path), joined(label, path)
                if any(id(p) in self._trained for p in module.parameters(recurse=False)):
                    raise InputError(
                        f"{name!r} is in adapter.targets, and trains as a whole by adapter.train_also (or shares a "
                        "parameter with what does): leave it out of one of the two"
                    )
                if self.section.use_dora and isinstance(module, nn.Embedding):
                    raise InputError(f"adapter.use_dora is for linear layers, and {name!r} is an embedding: leave it out")

    def _check_few(self) -> None:
        kinds = {type(layer.get_submodule(name)) for layer, names in self._few.items() for name in names}
        if not any(issubclass(kind, nn.Linear) for kind in kinds):
            raise InputError(
                f"adapter.base is {self.section.base}, and the model has no nn.Linear before its last layer that "
                "could be held in so few bits: leave it out"
            )

    @property
    def identity(self) -> str:
        """What it does."""
        return f"adapter {self.section.model_dump(exclude={'weights'})}"

    def apply(self, name: str, layer: nn.Module) -> Changed:
        """The layer with its adapters."""
        written = set(tensors_of(layer))
        trained = [p for p in layer.parameters() if id(p) in self._trained]
        given = self._given.adapters if self._given is not None else {}
        parts = {path: given.get(layer.get_submodule(path), {}) for path in self._targets.get(layer, ())}
        holder, made = nn.ModuleDict({_HELD: layer}), list[Made]()
        for path in self._few.get(layer, ()):
            linear = layer.get_submodule(path) if path else layer
            if type(linear) is nn.Linear:
                if linear._forward_hooks or linear._forward_pre_hooks:
                    raise InputError(
                        f"{joined(name, path)!r} has hooks, which would be lost with base {self.section.base}: "
                        "remove them, or write base: as-is"
                    )
                holder.set_submodule(joined(_HELD, path), LINEAR[self.section.quantised](linear))  # type: ignore[index]
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        targets = [joined(_HELD, path) for path in self._targets.get(layer, ())]
        if targets:
            self._inject(name, holder, targets)
        for parameter in trained:
            parameter.requires_grad_(True)
        found = holder[_HELD]
        renamed = _renamed(found, written)
        for path, module in found.named_modules():
            made += self._of_few(path, module)
        made += [*self._of_adapters(name, found, parts), *self._of_whole(found)]
        self._give_now(found, made)
        return Changed(found, renamed, made, added=self.section)

    def _inject(self, name: str, holder: nn.Module, targets: list[str]) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        section = self.section
        turned = any(is_turned(holder.get_submodule(path)) for path in targets)
        config = LoraConfig(
            r=section.r,
            lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft takes any number
            lora_dropout=section.dropout,
            use_rslora=section.rank_stabilized,
            use_dora=section.use_dora,
            target_modules="|".join(map(re.escape, targets)),
            fan_in_fan_out=turned,
        )
        # peft asks the first parameter for it, and a quantised layer may have none
        vars(holder)["hf_device_map"] = {"": next(chain(holder.parameters(), holder.buffers())).device}
        try:
            with torch.random.fork_rng(devices=[]):
                inject_adapter_in_model(config, holder, ADAPTER)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise InputError(f"layer {name!r}: peft cannot add adapters: {one_line(error)}") from error

    def _of_few(self, path: str, module: nn.Module) -> Iterator[Made]:
        """The parts of a matrix, of this as it was written."""
        if isinstance(module, QuantisedLinear):
            written = joined(without_base(path), "weight")

            def make(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
                return {joined(path, part): value for part, value in module.quantise(given[written]).items()}

            yield Made(tuple(joined(path, part) for part in module.PARTS), (written,), make)

    def _of_adapters(self, layer_name: str, layer: nn.Module, parts: Mapping[str, Mapping[str, str]]) -> Iterator[Made]:
        """`parts`: of each module, what its adapter's parts are called in the folder, if there is one."""
        for own, parameter in layer.named_parameters():
            path, kind = split_kind(own)
            if not kind:
                continue
            if self._given is not None:
                yield Made((own,), (), partial(_from_folder, self._given, parts[path][kind], own, tuple(parameter.shape)))
            elif kind == "lora_magnitude_vector":
                written = joined(without_base(path), "weight")
                yield Made((own,), (written,), partial(_lengths, layer.get_submodule(path), own, written))
            else:
                seed = self.seed ^ zlib.crc32(f"{layer_name}.{own}".encode())
                yield Made((own,), (), partial(_first, own, kind.partition(".")[0], tuple(parameter.shape), seed))

    def _of_whole(self, layer: nn.Module) -> Iterator[Made]:
        """What trains as a whole, and has values in the folder."""
        for own, tensor in tensors_of(layer).items():
            if self._given is not None and id(tensor) in self._given.whole:
                key = self._given.whole[id(tensor)]
                yield Made((own,), (), partial(_from_folder, self._given, key, own, tuple(tensor.shape)))

    @staticmethod
    def _give_now(layer: nn.Module, made: list[Made]) -> None:
        """What peft drew of adapters that are not on the meta device becomes what every rank draws, or reads."""
        tensors = tensors_of(layer)
        with torch.no_grad():
            for each in made:
                if not each.of and not tensors[each.names[0]].is_meta:
                    for own, value in each.make({}).items():
                        tensors[own].copy_(value)


def _from_folder(given: Given, key: str, own: str, shape: tuple[int, ...], _given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {own: given.read(key, shape)}


def _first(own: str, kind: str, shape: tuple[int, ...], seed: int, _given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter before the first step: of a linear layer A is drawn, and B is zero; of an embedding the other way round, as peft
    has it."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "lora_A":
        return {own: nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)}
    if kind == "lora_embedding_B":
        return {own: torch.randn(shape, generator=generator)}
    return {own: torch.zeros(shape)}


def _lengths(module: Any, own: str, written: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The lengths of the rows of a matrix, as it is held."""
    base, weight = module.get_base_layer(), given[written]
    if isinstance(base, QuantisedLinear):
        parts = base.quantise(weight)
        weight = base.dequantise(tuple(parts[name] for name in base.PARTS), (base.out_features, base.in_features), torch.float32)
    else:
        weight = weight.to(base.weight.dtype)
        weight = weight.float() if weight.element_size() < 4 else weight
    turned = is_turned(base)
    return {own: torch.linalg.vector_norm(weight.T if turned else weight, dim=1)}


def _renamed(layer: nn.Module, written: set[str]) -> dict[str, str]:
    """What tensors were called → what they are called now, where that is another."""
    now = {without_base(own): own for own in tensors_of(layer)}
    return {own: now[own] for own in written if own in now and now[own] != own}


def load_peft() -> None:
    """InputError where peft is missing."""
    hush()
    try:
        import peft  # noqa: F401
    except ImportError:
        raise InputError("adapters need peft: pip install 'hetpipe[lora]'") from None
