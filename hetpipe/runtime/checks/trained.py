"""What is trained, as it was when the engine was built: for just that are gradients summed, and sent from stage to stage."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError, cut
from hetpipe.layers.transforms import written_names
from hetpipe.processes.world import World

# What is asked of all modules and parameters in each step: without a call of Python for any of them.
_PARAMETERS, _CHILDREN, _VALUES = attrgetter("_parameters"), attrgetter("_modules"), methodcaller("values")
_STATE = attrgetter("requires_grad", "dtype", "device")


class Trained:
    """The parameters of these layers, which of them require gradients, and of what type they are."""

    def __init__(self, layers: nn.Module) -> None:
        self._layers = layers
        self._look()
        self._names = _named(layers)
        self._states = {name: _state(p) for name, p in self._names.items()}

    def _look(self) -> None:
        """Remember what there is now."""
        self._modules = list(self._layers.modules())
        self._held = self._now()
        self._parameters = [held for held in self._held if isinstance(held, Tensor)]
        self._seen = list(map(_STATE, self._parameters))

    def _now(self) -> list[object]:
        """Return each parameter, and each module that is in another: the objects themselves, as an id may be another's later."""
        places = chain(map(_PARAMETERS, self._modules), map(_CHILDREN, self._modules))
        return [*chain.from_iterable(map(_VALUES, places))]

    def check(self) -> None:
        """InputError where that has changed. Every step asks it, so what has not changed must be found quickly."""
        now = self._now()
        same = len(now) == len(self._held) and all(map(is_, now, self._held))
        if same and list(map(_STATE, self._parameters)) == self._seen:
            return
        told = []
        for name, parameter in _named(self._layers).items():
            if name not in self._names:
                told.append(f"{name!r} is new")
            elif parameter is not self._names[name]:
                told.append(f"{name!r} is another tensor (.copy_ changes the values of the one that there was)")
            elif (now_state := _state(parameter)) != self._states[name]:
                told += [f"{name!r} was {a}, and is {b}" for a, b in _differences(self._states[name], now_state)]
        told += [f"{name!r} is gone" for name in self._names.keys() - _named(self._layers).keys()]
        if not told:  # modules without parameters have changed
            self._look()
            return
        raise InputError(
            f"what is trained has changed since the engine was made: {cut('; '.join(told))}. Sums of gradients, and what stages "
            "send each other, are for the parameters that there were: close the engine (engine.close()), wrap the model again, "
            "and make a new optimizer"
        )

    def check_modes(self, world: World) -> None:
        """InputError on every rank where replicas of a layer are in different modes. Collective."""
        first: dict[str, tuple[int, str]] = {}
        own = {name: modes(layer) for name, layer in self._layers.named_children()}
        for rank, told in zip(world.ranks, world.gather(own), strict=True):
            for name, mode in told.items():
                before, other = first.setdefault(name, (rank, mode))
                if mode != other:
                    raise InputError(
                        f"layer {name!r} is in the mode {cut(other, 120)!r} on rank {before} and in {cut(mode, 120)!r} on rank "
                        f"{rank}, so they do not train the same model: call .train() and .eval() alike on all ranks"
                    )


def modes(module: nn.Module) -> str:
    """Which modules train: the module, and those in it in another mode than the one that holds them."""
    changes = [
        f"{name} {_mode(part)}"
        for name, part in module.named_modules()
        if name and part.training != module.get_submodule(name.rpartition(".")[0]).training
    ]
    return _mode(module) + (f", but for {', '.join(changes)}" if changes else "")


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _named(layers: nn.Module) -> dict[str, nn.Parameter]:
    written = written_names(layers)
    return {written(name): p for name, p in layers.named_parameters(remove_duplicate=False)}


class _State(NamedTuple):
    trained: bool
    dtype: torch.dtype
    device: torch.device

    def words(self) -> tuple[str, str, str]:
        return "trained" if self.trained else "frozen", str(self.dtype).removeprefix("torch."), f"on {self.device}"


def _state(parameter: nn.Parameter) -> _State:
    return _State(parameter.requires_grad, parameter.dtype, parameter.device)


def _differences(before: _State, after: _State) -> list[tuple[str, str]]:
    return [(a, b) for a, b in zip(before.words(), after.words(), strict=True) if a != b]
