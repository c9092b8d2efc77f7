"""A model of transformers whose layers are left out: its own forward runs, and in each layer's place happens what it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.layers.untouched.kept import Fixed

PREFERRED = ("hidden_states", "x", "hidden", "inputs", "input")


class Call(NamedTuple):
    """What a layer is given: the features, and the rest; `name`: of the features, where they come by name."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """LookupError where no tensor of numbers is among them."""
        if args:
            if not _are_features(args[0]):
                raise LookupError
            return cls(args[0], tuple(args[1:]), dict(kwargs), None)
        names = [*(name for name in PREFERRED if name in kwargs), *kwargs]
        name = next(name for name in [*names, ""] if name == "" or _are_features(kwargs[name]))
        if not name:
            raise LookupError
        return cls(kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}, name)

    def on(self, layer: Callable[..., Any], hidden: Tensor) -> Any:
        """What the layer makes of other features."""
        if self.name is None:
            return layer(hidden, *self.args, **self.kwargs)
        return layer(**{self.name: hidden}, **self.kwargs)


def _are_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Form(NamedTuple):
    """What a layer returns: features (`kind` is Tensor), or a tuple or list of items, of which features are the first. `alone`:
    whether the others are None."""

    kind: type
    items: int = 1
    alone: bool = True

    @classmethod
    def of(cls, output: Any) -> Form:
        """LookupError where it gives no features."""
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            return cls(list if isinstance(output, list) else tuple, len(output), all(item is None for item in output[1:]))
        if not isinstance(output, Tensor):
            raise LookupError
        return cls(Tensor)

    def holding(self, features: Tensor) -> Any:
        """These features in this form; what else layers return is left out."""
        return features if self.kind is Tensor else self.kind([features, *[None] * (self.items - 1)])


def features_of(output: Any) -> Any:
    """Of what a layer returns."""
    return output[0] if isinstance(output, tuple | list) else output


class _Turn(Fixed):
    """What all slots do in the run that is going on."""

    act: Callable[[int, Call], Tensor]


class LeftOut(nn.Module, Fixed):
    """Stands where a layer stood, and has its attributes, which some forwards read. `form`: of what the layer returns."""

    def __init__(self, layer: nn.Module, number: int, form: Form, turn: _Turn) -> None:
        super().__init__()
        vars(self).update(like=layer, number=number, form=form, turn=turn)  # `like` is no module of this one

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training" and "turn" in vars(self):  # the layer itself, which runs elsewhere, would not know of it
            raise AttributeError(f"{name!r} of a layer is set by what runs around the layers")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["like"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return, in the form of the layer, what the run's `act` makes of the call."""
        return self.form.holding(self.turn.act(self.number, Call.of(args, kwargs)))


class Zeros(nn.Module):
    """Stands where a module with parameters stood whose values a later layer does not have: gives zeros of the shape that it
    gives, of the type that features have. `shape`: a letter for the batch's samples and tokens. Some forwards ask a model's first
    parameter for its type."""

    def __init__(self, shape: Sequence[int | str], sizes: dict[str, Any]) -> None:
        super().__init__()
        self.shape, self.sizes = tuple(shape), sizes
        self.empty = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)

    def take_type(self, dtype: torch.dtype) -> None:
        """That of the features that come."""
        if self.empty.dtype != dtype:
            self.empty = nn.Parameter(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=False)

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """Zeros."""
        shape = [self.sizes[each] if isinstance(each, str) else each for each in self.shape]
        return torch.zeros(shape, dtype=self.empty.dtype, device=self.sizes["device"])


def options(takes: Collection[str]) -> dict[str, bool]:
    """How a forward is called that takes these: without the cache of generation."""
    return {key: value for key, value in {"use_cache": False, "return_dict": True}.items() if key in takes}


class Stop(BaseException):
    """The forward has done what it was run for."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What belongs where in a model. Modules and tensors are given by their paths.

    Args:
        layers: the list of layers.
        form: of what a layer returns.
        embed: modules of the first layer of the chain.
        head: of the last.
        shared: without trained parameters, which run before the first layer, and whose outputs later ones need.
        tables: tensors that are not trained, of modules that hold the layers, which all layers may need.
        idle: modules that no token comes through (a tower for images): the first layer keeps them as they are.
        absent: which run there, too, but whose outputs reach later layers through the first only; with the shapes that they give.
        features: the width of what takes the place of embedded tokens.
        takes: what the forward takes.
        words: how many logits there are of a token.
        logits: the linear layer whose output they are, untouched; None where there is no such.
    """

    layers: str
    form: Form
    embed: tuple[str, ...]
    head: tuple[str, ...]
    shared: tuple[str, ...]
    tables: tuple[str, ...]
    idle: tuple[str, ...]
    absent: Mapping[str, tuple[int | str, ...]]
    features: int
    takes: frozenset[str]
    words: int
    logits: str | None


class Skeleton(nn.Module):
    """The model without its layers, of which a process has one: it is lent to the layers of the chain one after the other, and
    has the modules of a layer while that runs. Else it has modules without values, and zeros where the trained ones stood that
    run before the first layer."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, layers: nn.ModuleList, turn: _Turn) -> None:
        super().__init__()
        self.model, self.anatomy, self.sizes, self.turn, self.count = model.eval(), anatomy, dict[str, Any](), turn, len(layers)
        self.is_lent = False
        self.zeros = {path: Zeros(shape, self.sizes) for path, shape in anatomy.absent.items()}
        for path, zeros in self.zeros.items():
            owner, _, name = path.rpartition(".")
            model.get_submodule(owner)._modules[name] = zeros
        slots = set(layers)
        self.outer = [module for module in model.modules() if module not in slots]

    def __deepcopy__(self, memo: object) -> Skeleton:
        return self  # a copy of a layer runs the same rest of the model

    @contextmanager
    def lent(self, modules: Mapping[str, nn.Module | None], tensors: Mapping[str, Any]) -> Iterator[Skeleton]:
        """Give the model these modules and tensors, by their paths, and take them back at the end. They are those that the layer
        holds now, since they may have been replaced (by adapters). RuntimeError where it is lent already, to another thread."""
        if self.is_lent:
            raise RuntimeError(
                "layers of one model of transformers run in two threads at once, and share the rest of it: let each thread have "
                "a model of its own, or run them one after the other"
            )
        before, self.is_lent = list[tuple[dict[str, Any], str, Any]](), True
        try:
            for path, module in modules.items():
                owner, _, name = path.rpartition(".")
                before.append(_put(self.model.get_submodule(owner)._modules, name, module))
            for path, tensor in tensors.items():
                owner, _, name = path.rpartition(".")
                module = self.model.get_submodule(owner)
                before.append(_put(module._parameters if name in module._parameters else module._buffers, name, tensor))
            yield self
        finally:
            for held, name, value in reversed(before):
                held[name] = value
            self.is_lent = False

    def mode(self, training: bool) -> None:
        """Put all modules into the mode of training or of evaluation, but for those that are lent, which stay as they are."""
        if self.model.training != training:
            for module in self.outer:
                module.training = training

    def run(self, act: Callable[[int, Call], Tensor], **given: Any) -> Any:
        """What the forward returns; None where `act` raised Stop."""
        self.turn.act = act
        try:
            return self.model(**given, **options(self.anatomy.takes))
        except Stop:
            return None
        finally:
            del self.turn.act  # it holds what the run has found

    def dry(self, hidden: Tensor, extras: Mapping[str, Any], act: Callable[[int, Call], Tensor]) -> Any:
        """A run whose embedded tokens are zeros, as many as there are features."""
        samples, tokens = hidden.shape[:2]
        self.sizes.update(b=samples, t=tokens, device=hidden.device)
        for zeros in self.zeros.values():
            zeros.take_type(hidden.dtype)
        features = torch.zeros(samples, tokens, self.anatomy.features, dtype=hidden.dtype, device=hidden.device)
        return self.run(act, inputs_embeds=features, **extras)

    def calls(self, hidden: Tensor, extras: Mapping[str, Any]) -> list[Call]:
        """What each layer is given."""
        found: list[Call] = []

        def act(number: int, call: Call) -> Tensor:
            found.append(call)
            if number == self.count - 1:
                raise Stop
            return call.hidden

        self.mode(False)
        with torch.no_grad():
            self.dry(hidden, extras, act)
        return found


def as_run(config: Any) -> Any:
    """No forward keeps what a generation would go on from: it would be one for all layers. Outputs have names, by which logits
    are found."""
    config.use_cache, config.return_dict = False, True
    return config


def skeleton_of(model: nn.Module, anatomy: Anatomy) -> Skeleton:
    """A copy of the model without its layers, and with zeros in place of what the trained modules before the first layer give."""
    layers, turn = model.get_submodule(anatomy.layers), _Turn()
    slots = nn.ModuleList([LeftOut(layer, number, anatomy.form, turn) for number, layer in enumerate(layers.children())])
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    memo: dict[int, Any] = {id(layers): slots}
    memo |= {id(tensor): tensor for module in model.modules() for tensor in _all_tensors(module)}
    memo |= {key: as_run(copy.copy(config)) for key, config in configs.items()}
    return Skeleton(copy.deepcopy(model, memo), anatomy, slots, turn)


def _all_tensors(module: nn.Module) -> list[Tensor]:
    """What `own_tensors` has, and the tensors that are plain attributes of the module."""
    return [*own_tensors(module).values(), *(value for value in vars(module).values() if isinstance(value, Tensor))]


def _put(held: dict[str, Any], name: str, value: Any) -> tuple[dict[str, Any], str, Any]:
    """Put a value there; returns the place, and what was in it."""
    place = held, name, held[name]
    held[name] = value
    return place


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a module itself holds."""
    return {name: t for name, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
