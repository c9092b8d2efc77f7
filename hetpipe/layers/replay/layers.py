"""The layers of a chain, which run the model's own forward: outputs and gradients are the model's own bits.

Between layers there are the tensors of `Anatomy.tracks`: [b, …] each, and [b, 0, …] where only the shape is of use. What has no
samples in the model goes as [b, …], the same for each, of which the first is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.names import names_in
from hetpipe.layers.model import Tensors, as_tuple, as_value
from hetpipe.layers.replay.anatomy import Anatomy, Input, Made, Source
from hetpipe.layers.replay.flow import tensors_in
from hetpipe.layers.replay.given import Given
from hetpipe.layers.replay.skeleton import Skeleton, Stop, helpers_of
from hetpipe.layers.replay.values import Values
from hetpipe.layers.transforms import without_wrappers


class Replayed(nn.Module):
    """A layer: it holds the modules that it calls, and the parameters of the model itself that it uses, and runs the rest of the
    model around them."""

    only_names = ("number", "paths", "library_names")  # see `layers/untouched/kinds.py`
    library_names: dict[str, str]

    def __init__(
        self, model: nn.Module, skeleton: Skeleton, anatomy: Anatomy, given: Given, number: int, source: Values | None = None
    ) -> None:
        super().__init__()
        self.number = number
        vars(self).update(skeleton=skeleton, anatomy=anatomy, given=given, source=source)
        self.paths = {_own_name(path, anatomy): path for path in anatomy.modules(number)}
        self.helpers = {f"shared_{path.replace('.', '_')}": path for path in helpers_of(model) if path in skeleton.helpers}
        for own, path in {**self.paths, **self.helpers}.items():
            self.add_module(own, model.get_submodule(path))
        self.tables = {name.replace(".", "_"): name for name in anatomy.parameters(number)}
        for own, name in self.tables.items():
            self.register_parameter(own, model.get_parameter(name))

    @property
    def model(self) -> nn.Module:
        """Return the model of which it is a layer, without its modules."""
        skeleton: Skeleton = vars(self)["skeleton"]
        return skeleton.model

    @property
    def shared_inputs(self) -> tuple[int, ...]:
        """Return which of the chain's inputs have the same row for each sample."""
        given: Given = vars(self)["given"]
        leaves = (leaf for leaf in given.leaves if leaf.is_tensor)
        return tuple(number for number, leaf in enumerate(leaves) if leaf.alone or leaf.sized)

    @property
    def base_digest(self) -> str | None:
        """Of what its values are read from, if they are."""
        source: Values | None = vars(self)["source"]
        return source.digest if source is not None else None

    def values(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors, read from the model's folder, or drawn. InputError where there is no such source, and for tensors that
        the model does not have."""
        source: Values | None = vars(self)["source"]
        if source is None:
            raise InputError(f"layer {self.number} is on the meta device: give hetpipe.chain the folder of its weights")
        wanted = {own: self.library_names.get(without_wrappers(own), "") for own in names}
        if (strange := next((own for own, name in wanted.items() if not name), None)) is not None:
            raise InputError(
                f"layer {self.number}: {strange!r} is on the meta device, and {type(self.model).__name__} has no tensor of that "
                "name, whose values could be read. Add adapters with hetpipe.adapt"
            )
        return source.read(wanted)

    def forward(self, given: Tensors) -> Tensors:
        """What crosses the boundary before it, to what crosses the one behind it; the last gives what the model returns."""
        anatomy: Anatomy = vars(self)["anatomy"]
        number, tensors = self.number, as_tuple(given)
        have = self._taken(tensors)
        own = anatomy.span(number)
        like = next(tensor for tensor in tensors if tensor.is_floating_point())
        calls = iter(range(len(anatomy.calls)))

        def act(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = next(calls, None)
            if call is None or anatomy.calls[call].path != path:
                raise InputError(f"layer {number}: {path!r} is called in another order than when the model was cut")
            output = anatomy.calls[call].output
            assert output is not None
            if call >= own.stop:
                raise Stop
            if call >= own.start:
                value = self._modules[_own_name(path, anatomy)](*args, **kwargs)  # type: ignore[misc]
                have.update({Made(call, leaf): tensor for leaf, tensor in enumerate(tensors_in(value))})
                if not any(Made(call, leaf) in anatomy.written for leaf in range(len(output.shapes))):
                    return value
            return output.holding([to_use(Made(call, leaf)) for leaf in range(len(output.shapes))])

        def to_use(source: Source) -> Tensor:
            return have[source].clone() if source in anatomy.written else have[source]

        inputs = [to_use(Input(at)) for at in range(anatomy.inputs)]
        parameters = {name: getattr(self, table) for table, name in self.tables.items()}
        helpers = {path: self.get_submodule(name) for name, path in self.helpers.items()}
        skeleton: Skeleton = vars(self)["skeleton"]
        with skeleton.lent(like, parameters, helpers):
            value = skeleton.run(act, vars(self)["given"].arguments(inputs))
        if number == len(anatomy.names) - 1:
            return outputs_in(value, anatomy)
        return self._given_on(have, tensors)

    def _taken(self, tensors: Sequence[Tensor]) -> dict[Source, Tensor]:
        """What was made by the layers before, as far as it was carried; else a tensor of its shape."""
        anatomy: Anatomy = vars(self)["anatomy"]
        have, empty = dict[Source, Tensor](), dict[Source, Tensor]()
        for (source, hollow), tensor in zip(anatomy.tracks(self.number), tensors, strict=True):
            found = tensor.new_zeros(tensor.shape[:1] + tensor.shape[2:]) if hollow else tensor
            have[source] = found[0] if anatomy.is_alone(source) else found
        for call in range(anatomy.begins[self.number]):
            output = anatomy.calls[call].output
            assert output is not None
            for leaf in range(len(output.shapes)):
                if Made(call, leaf) not in have:
                    like = anatomy.shaped_like(self.number, Made(call, leaf))
                    assert like is not None
                    if like not in empty:
                        empty[like] = have[like].new_zeros(have[like].shape)
                    have[Made(call, leaf)] = empty[like]
        return have

    def _given_on(self, have: Mapping[Source, Tensor], given: Sequence[Tensor]) -> Tensors:
        """What crosses the boundary behind it; what crossed the one before, as it came."""
        anatomy: Anatomy = vars(self)["anatomy"]
        found, samples = list[Tensor](), len(given[0])
        came = dict(zip(anatomy.tracks(self.number), given, strict=True))
        for track in anatomy.tracks(self.number + 1):
            source, hollow = track
            if track in came:
                found.append(came[track])
                continue
            tensor = have[source]
            if anatomy.is_alone(source):
                tensor = tensor.expand(samples, *tensor.shape)
            found.append(tensor.new_empty((len(tensor), 0, *tensor.shape[1:])) if hollow else tensor)
        return as_value(found)


def outputs_in(value: Any, anatomy: Anatomy) -> Tensors:
    """What the chain gives of what the model returns: its tensors, [b, …] where there is one for each sample."""
    found = tensors_in(value)
    return torch.stack(found) if anatomy.listed else as_value(found)


def layers_of(
    model: nn.Module, skeleton: Skeleton, anatomy: Anatomy, given: Given, source: Values | None = None
) -> nn.Sequential:
    """The chain, whose layers hold the model's own modules."""
    made = ((name, Replayed(model, skeleton, anatomy, given, number, source)) for number, name in enumerate(anatomy.names))
    layers, names = OrderedDict[str, nn.Module](made), names_in(model)
    for layer in layers.values():
        layer.library_names = names(layer)  # type: ignore[assignment]
    return nn.Sequential(layers)


def _own_name(path: str, anatomy: Anatomy) -> str:
    """What a layer calls a module of its own."""
    return "block" if anatomy.lists[path] else path.replace(".", "_")
