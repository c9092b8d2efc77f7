"""A layer becomes one of the shards of itself: the same module, with the same names, whose tensors are pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.shards.dora import SplitDora
from hetpipe.layers.shards.few_bits import become_shard, become_whole
from hetpipe.layers.shards.layout import Cut, Layout
from hetpipe.layers.shards.linears import GROUP, STYLE, dress
from hetpipe.layers.shards.styles import Style, layout_of, styles_of
from hetpipe.layers.shards.sums import ANEW, Group
from hetpipe.layers.transforms import lineage_of, tensors_of, uncompiled
from hetpipe.layers.untouched.kept import Fixed
from hetpipe.layers.untouched.kinds import SPLIT


@dataclass(frozen=True)
class Split(Fixed):
    """How a layer is split."""

    styles: Mapping[str, Style]
    layout: Layout
    group: Group


GROUPS = "num_key_value_groups"  # of transformers' attention: how many heads of queries share one of keys
COUNTS, LIBRARY = ("n_heads", "num_heads"), "transformers"  # of its T5's attention, and OPT's: how many heads there are
WHOLE = "_hetpipe_whole"  # what a module is in the whole layer
WHOLE_COUNTS = "_hetpipe_counts"  # what these are in the whole layer


class Piece(NamedTuple):
    """A tensor is this device's shard of one that lies over a group."""

    cut: Cut
    group: Group

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, one of whose shards has this shape."""
        return self.cut.whole_shape(shape, self.group.degree)

    def joined(self, tensor: Tensor) -> Tensor:
        """The whole tensor, of which each device gives its shard. Collective over the group."""
        return self.cut.join(self.group.gather(tensor))

    def shard(self, whole: Tensor) -> Tensor:
        """This device's shard of a whole tensor."""
        return self.cut.shard(whole, self.group.number, self.group.degree)


def split_of(layer: nn.Module) -> Split | None:
    """How the layer is split; None if it is whole."""
    found: Split | None = vars(uncompiled(layer)).get(SPLIT)
    return found


def refuse_shards(layers: Mapping[str, nn.Module]) -> None:
    """InputError if one of these layers is a shard of itself: an engine by a plan of split stages had it."""
    for name, layer in layers.items():
        split = split_of(layer)
        if split is not None:
            raise InputError(f"layer {name!r} is one of {split.group.degree} shards of itself, as an engine has split it: {ANEW}")


def refuse_use(layers: nn.Sequential, group: Group) -> Callable[[], None]:
    """Let the chain as a whole, some of whose layers are shards here, refuse to give its state, and to run. What is returned lets
    it run again."""

    def refuse(*_: object) -> None:
        raise InputError(
            f"this model's layers are split over {group.degree} devices, so this rank has parts of their tensors only: "
            "engine.whole_state_dict() on all ranks, or hetpipe.save_checkpoint, puts them together, and engine(inputs) runs them"
        )

    layers.register_state_dict_pre_hook(refuse)
    return layers.register_forward_pre_hook(refuse).remove


def check_split(name: str, layer: nn.Module, degree: int, tied: Collection[str] = ()) -> tuple[dict[str, Style], Layout]:
    """The styles of a layer's modules, and its layout over so many devices. A layer one of whose modules has `tied`
    parameters, by their names in the chain, which other layers share, stays whole. InputError if it cannot be split so."""
    styles, plain = styles_of(name, layer), uncompiled(layer)
    shared = {own for own, _ in layer.named_parameters(remove_duplicate=False) if f"{name}.{own}" in tied}
    if any(own.startswith(f"{module}." if module else "") for own in shared for module in styles):
        styles = {}
    if styles and plain is not layer:
        raise InputError(f"layer {name!r} is compiled, and cannot be split over {degree} devices: leave torch.compile out")
    made = lineage_of(layer)
    if styles and made is not None and getattr(made.written, "base_digest", None) is None:
        raise InputError(
            f"layer {name!r} has adapters, and does not say what its base was read from, so a checkpoint of shards could not "
            "tell it from others. Plan its stage on one device, or take a model of transformers (causal_lm)"
        )
    return styles, layout_of(name, layer, styles, degree)


def split_layer(name: str, layer: nn.Module, group: Group, tied: Collection[str] = ()) -> Callable[[], None]:
    """Let the layer be this device's shard of itself; what is returned makes it whole again, with the tensors that it had. A
    layer of which nothing says how it is split stays whole: each device of the group computes all of it. InputError if it cannot
    be split so."""
    styles, layout = check_split(name, layer, group.degree, tied)
    if not styles:
        return lambda: None
    tensors = tensors_of(layer)
    before = {own: tensors[own].data for own in layout.cut}
    names = Counter(id(tensor) for tensor in tensors.values())
    if any(names[id(tensors[own])] > 1 for own in layout.cut):
        raise InputError(f"layer {name!r} has a matrix under two names, and it is to be split: leave its modules out of the rule")
    for own, cut in layout.cut.items():
        tensors[own].data = cut.shard(tensors[own].data, group.number, group.degree)
    split = Split(styles, layout, group)
    _dress(layer, split)
    vars(layer)[SPLIT] = split
    hooks = [layer.register_forward_pre_hook(group.forgetting), layer.register_forward_hook(group.forgetting, always_call=True)]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for own, data in before.items():
            tensors[own].data = data
        _undress(layer, split)
        del vars(layer)[SPLIT]

    return undo


class _Whole(NamedTuple):
    """What a module is where its layer is whole: its class, and of a linear layer its outputs and inputs."""

    kind: type[nn.Module]
    shape: tuple[int, int] | None


def _dress(layer: nn.Module, split: Split) -> None:
    """Let the modules work on their shards."""
    degree, number = split.group.degree, split.group.number
    for module, style in split.styles.items():
        held, cut = layer.get_submodule(module), style.cut(degree)
        shape = (held.out_features, held.in_features) if isinstance(held, nn.Linear) else None
        vars(held)[WHOLE] = _Whole(type(held), shape)
        if style.of_lengths:
            held.__class__ = SplitDora
        else:
            dress(held, style, split.group)
        if style.units is not None:
            counts, parts = ((GROUPS,), degree // style.units) if style.is_shared(degree) else (COUNTS, degree)
            for parent, count in _that_count(layer, module, counts):
                whole = vars(parent).setdefault(WHOLE_COUNTS, {}).setdefault(count, getattr(parent, count))
                setattr(parent, count, whole // parts)
        if isinstance(held, nn.Linear) and shape is not None and cut is not None:
            if isinstance(held, QuantisedLinear):
                become_shard(held, cut, number, degree)
            held.out_features, held.in_features = cut.shard_shape(shape, degree)


def _that_count(layer: nn.Module, module: str, counts: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """The module around this one that has one of these counts of heads, and the count; of all heads only modules of transformers,
    since others may count whole ones."""
    paths = [".".join(module.split(".")[:at]) for at in range(module.count("."), -1, -1)]
    found = [(held, count) for path in paths for count in counts if hasattr(held := layer.get_submodule(path), count)][:1]
    return [(held, count) for held, count in found if count == GROUPS or type(held).__module__.partition(".")[0] == LIBRARY]


def _undress(layer: nn.Module, split: Split) -> None:
    """Let them work on whole tensors."""
    for module in split.styles:
        held = layer.get_submodule(module)
        whole: _Whole = vars(held).pop(WHOLE)
        held.__class__ = whole.kind
        if isinstance(held, nn.Linear) and whole.shape is not None:
            held.out_features, held.in_features = whole.shape
        if isinstance(held, QuantisedLinear):
            become_whole(held)
        for own in (GROUP, STYLE):
            vars(held).pop(own, None)
    for held in layer.modules():
        for count, number in vars(held).pop(WHOLE_COUNTS, {}).items():
            setattr(held, count, number)


def whole_size(linear: nn.Linear) -> tuple[int, int]:
    """The outputs and inputs of a linear layer, or of the one of which it is a shard."""
    found: _Whole | None = vars(linear).get(WHOLE)
    return found.shape if found is not None and found.shape is not None else (linear.out_features, linear.in_features)


def whole_shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole tensors of which the layer has shards."""
    split, tensors = split_of(layer), tensors_of(layer)
    if split is None:
        return {}
    return {own: cut.whole_shape(tensors[own].shape, split.group.degree) for own, cut in split.layout.cut.items()}


@contextmanager
def as_if_whole(layer: nn.Module) -> Iterator[None]:
    """In here a layer runs as the whole one would, if it is given whole tensors for those of which it has shards: for a look at
    shapes, which is no message to the others."""
    split = split_of(layer)
    if split is None:
        yield
        return
    try:
        _undress(layer, split)
        yield
    finally:
        _dress(layer, split)


@contextmanager
def whole(layer: nn.Module) -> Iterator[None]:
    """In here a split layer is whole on each device. Collective over its group."""
    split = split_of(layer)
    if split is None:
        yield
        return
    tensors = tensors_of(layer)
    pieces = {own: tensors[own].data for own in split.layout.cut}
    joined = {own: cut.join(split.group.gather(pieces[own])) for own, cut in split.layout.cut.items()}
    try:
        for own, data in joined.items():
            tensors[own].data = data
        _undress(layer, split)
        torch.clear_autocast_cache()  # it knows tensors, and not that they have other numbers now
        yield
    finally:
        for own, piece in pieces.items():
            tensors[own].data = piece
        _dress(layer, split)
        torch.clear_autocast_cache()


def whole_in(stage: nn.Module) -> list[str]:
    """The layers of a chain that have parameters and are not split, by their names."""
    layers = {name: layer for name, layer in stage._modules.items() if layer is not None}
    return [name for name, layer in layers.items() if split_of(layer) is None and any(True for _ in layer.parameters())]


def pieces_in(stage: nn.Module) -> dict[str, Piece]:
    """What the tensors of a chain of layers are of which that has shards only, by their names in it."""
    layers = {name: layer for name, layer in stage._modules.items() if layer is not None}
    splits = {name: split for name, layer in layers.items() if (split := split_of(layer)) is not None}
    return {f"{name}.{own}": Piece(cut, split.group) for name, split in splits.items() for own, cut in split.layout.cut.items()}
