"""The chain: embedding, blocks, head. Logits, loss and gradients are transformers' own bits.

Shapes: b samples, t tokens, w features, v words. Inputs are int64 [b, t] tokens, or a tuple of these and what else the model's
forward is given, as `extras` names it: a mask [b, t] of 1 (token) and 0 (padding), positions [b, t]. These travel with the
features; without them nothing but the features crosses a boundary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.folder import WeightFolder
from hetpipe.hf.replay.skeleton import Anatomy, Call, Skeleton, Stop, features_of, skeleton_of
from hetpipe.layers.model import Tensors, as_tuple, as_value

_CALLS = "_hetpipe_calls"


class Part(HFLayer):
    """A layer of the chain, which holds these modules of the model, by their paths, and runs the rest of it around them."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, paths: Sequence[str], extras: Sequence[str], layer: int | None = None
    ) -> None:
        super().__init__()
        self.extras, self.number = tuple(extras), layer
        names = _own_names([*paths, *anatomy.tables])
        self.paths = {own: path for own, path in names.items() if path not in anatomy.tables}
        self.tables = {own: path for own, path in names.items() if path in anatomy.tables}
        for own, path in self.paths.items():
            self.add_module(own, model.get_submodule(path))
        for own, path in self.tables.items():
            self._hold(own, model, path)
        if layer is not None:
            self.layer = model.get_submodule(anatomy.layers)[layer]  # type: ignore[index]
        held = {path: getattr(self, own) for own, path in self.paths.items()}
        self.__dict__["skeleton"] = skeleton_of(model, anatomy, held)  # no module of this one: its tensors have no values

    def _hold(self, own: str, model: nn.Module, path: str) -> None:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        if name in module._parameters:
            self.register_parameter(own, module._parameters[name])
        else:
            self.register_buffer(own, module._buffers[name], persistent=name not in module._non_persistent_buffers_set)

    def ready(self) -> Skeleton:
        """The rest of the model, with the modules that this layer holds now."""
        skeleton: Skeleton = self.__dict__["skeleton"]
        for own, path in self.paths.items():
            skeleton.put(path, self._modules[own])  # type: ignore[arg-type]
        for own, path in self.tables.items():
            skeleton.put_tensor(path, getattr(self, own))
        return skeleton

    def mode(self, training: bool) -> None:
        """Of the rest of the model; what this layer holds is in the mode that it is in. Dropout before the first layer is not
        drawn where its result is not used, or else later numbers would depend on the cut."""
        own = {id(module) for module in self.modules()}
        for module in self.__dict__["skeleton"].modules():
            if id(module) not in own:
                module.training = training

    def named(self, extras: Sequence[Tensor]) -> dict[str, Tensor]:
        """What comes beside tokens or features, by name. ValueError where there is more than has a name."""
        if len(extras) > len(self.extras):
            raise ValueError(
                f"a sample has {len(extras)} tensors beside its tokens, and the model names {len(self.extras)} "
                f"({', '.join(self.extras)}): name all in extras, in their order"
            )
        return dict(zip(self.extras, extras, strict=False))


class Embedding(Part):
    """Tokens, and what else there is, to [b, t, w], and that."""

    def forward(self, given: Tensors) -> Tensors:
        tokens, *extras = as_tuple(given)
        extras = [extra.bool() if name == "attention_mask" else extra for name, extra in self.named(extras).items()]
        found: list[Tensor] = []

        def act(number: int, call: Call) -> Tensor:
            found.append(call.hidden)
            raise Stop

        skeleton = self.ready()
        self.mode(self.training)
        skeleton.run(act, input_ids=tokens, **self.named(extras))
        return as_value([found[0], *extras])


class Block(Part):
    """One of the layers that are alike: [b, t, w], and what else there is, to the same."""

    def forward(self, given: Tensors) -> Tensors:
        hidden, *extras = as_tuple(given)
        calls: list[Call] | None = getattr(hidden, _CALLS, None)
        if calls is None:
            calls = self.ready().calls(hidden, self.named(extras))
        assert self.number is not None
        out = features_of(calls[self.number].on(self.layer, hidden))
        if not torch.compiler.is_compiling():
            setattr(out, _CALLS, calls)  # for the next layer, where it is on this device
        return as_value([out, *extras])


class Head(Part):
    """What comes after the last layer: [b, t, w], and what else there is, to logits [b, t, v]."""

    def forward(self, given: Tensors) -> Tensors:
        hidden, *extras = as_tuple(given)
        skeleton = self.ready()
        last = len(skeleton.slots) - 1

        def act(number: int, call: Call) -> Tensor:
            if number < last:
                return call.hidden
            self.mode(self.training)
            return hidden

        self.mode(False)
        logits: Tensor = skeleton.dry(hidden, self.named(extras), act).logits
        return logits


def chain(model: Any, anatomy: Anatomy, folder: WeightFolder | None, extras: Sequence[str]) -> nn.Sequential:
    """The model, on the meta device, as a chain. What no token comes through is not trained."""
    for path in anatomy.idle:
        model.get_submodule(path).requires_grad_(False)
    children: OrderedDict[str, HFLayer] = OrderedDict(embed=Embedding(model, anatomy, [*anatomy.embed, *anatomy.idle], extras))
    for number in range(len(model.get_submodule(anatomy.layers))):
        children[f"layer{number}"] = Block(model, anatomy, anatomy.shared, extras, number)
    children["head"] = Head(model, anatomy, list(dict.fromkeys([*anatomy.shared, *anatomy.head])), extras)
    return Origin(model, folder).assemble(children)


def _own_names(paths: Sequence[str]) -> dict[str, str]:
    """A name for each path: as much of its end as tells it from the others."""
    found, depth = dict[str, str](), 1
    while len(found) < len(paths):
        found = {"_".join(path.split(".")[-depth:]): path for path in paths}
        depth += 1
    return found
