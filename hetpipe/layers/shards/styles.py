"""How the modules of a layer are split over a group of devices, and the layout that follows.

A layer says so by an attribute `tensor_parallel`: a mapping from names of modules in it to styles, which are called as in
transformers' plans (`base_model_tp_plan`):

- `colwise`: a linear layer of which each device has a part of the outputs;
- `rowwise`: one of which each device has a part of the inputs, whose outputs are added up;
- `colwise_gather_output`: as `colwise`, and the outputs are put together again on each device;
- `rowwise_split_input`: as `rowwise`, of inputs that are whole on each device;
- `replicated_with_grad_allreduce`: a module that stays whole, and works on a part of the features, as a norm of the heads that a
  device has does: each device makes a part of its gradients;
- `split_heads`: an `nn.Identity` through which a tensor [b, heads, …] of all heads passes, of which each device takes its own.

`colwise:3` stands for three matrices one behind the other, each of which is cut (queries, keys and values of one product), and
`colwise/8` for outputs that come in eight units which are never parted (attention heads); both together: `colwise:3/8`.
`colwise/2x4` are two heads of keys or values, each of which four heads of queries share: over more than two devices it is not
cut, and each device computes the head that its queries share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.names import ADAPTER
from hetpipe.layers.adapters.quantised import LINEAR, QuantisedLinear
from hetpipe.layers.model import named_layers
from hetpipe.layers.shards.few_bits import parted, parts_cut
from hetpipe.layers.shards.layout import Cut, Layout
from hetpipe.layers.transforms import uncompiled

ATTRIBUTE = "tensor_parallel"
COLUMN, ROW, GATHER, TAKE, PARTIAL, HEADS = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "split_heads",
)
KINDS = (COLUMN, ROW, GATHER, TAKE, PARTIAL, HEADS)
AHEAD, BEHIND = "colwise, ahead", "colwise, behind"  # an adapter's A, whose gradients are parts, and its B; nobody writes these
_STYLE = re.compile(rf"({COLUMN})(?::([1-9]\d*))?(?:/([1-9]\d*)(?:x([1-9]\d*))?)?|({GATHER}|{ROW}|{TAKE}|{PARTIAL}|{HEADS})")
FEW = 8  # names that a message lists
ELSE = "Plan a stage with this layer over another number of devices"


class Style(NamedTuple):
    """How one module is split. `sharing`: how many heads of queries share each of its units. `of_lengths`: it is how DoRA's
    lengths are beside a matrix that is split so, and not the matrix."""

    kind: str
    packed: int = 1
    units: int | None = None
    sharing: int = 1
    of_lengths: bool = False

    def __str__(self) -> str:
        packed, sharing = f":{self.packed}" if self.packed > 1 else "", f"x{self.sharing}" if self.sharing > 1 else ""
        return f"{self.kind}{packed}{f'/{self.units}{sharing}' if self.units is not None else ''}"

    @classmethod
    def parse(cls, text: object, where: str) -> Style:
        """InputError if it is none."""
        found = _STYLE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise InputError(
                f"{where}: {text!r} is no style of tensor parallelism; there are {', '.join(KINDS)}, and, of matrices that stand "
                f"one behind the other, {COLUMN}:3, of 8 heads that are not parted {COLUMN}/8, or {COLUMN}:3/8, of 2 heads "
                f"each of which 4 others share {COLUMN}/2x4"
            )
        return cls(found[1] or found[5], int(found[2] or 1), int(found[3]) if found[3] else None, int(found[4] or 1))

    def is_shared(self, degree: int) -> bool:
        """Whether so many devices are more than its units, each of which several devices share."""
        if self.units is None or self.sharing == 1 or self.units >= degree:
            return False
        return degree % self.units == 0 and self.units * self.sharing % degree == 0

    def is_whole(self, degree: int) -> bool:
        """Whether the module is whole on each of so many devices."""
        return self.kind in (PARTIAL, AHEAD, HEADS) or self.is_shared(degree)

    @property
    def way(self) -> Cut:
        """How its weight is cut, if it is."""
        return Cut(1 if self.kind in (ROW, TAKE) else 0, self.packed)

    def cut(self, degree: int) -> Cut | None:
        """How its weight is cut; None where it is whole on each of so many devices."""
        return None if self.is_whole(degree) or (self.of_lengths and self.kind != COLUMN) else self.way


def styles_of(name: str, layer: nn.Module) -> dict[str, Style]:
    """The styles of a layer's modules, by their names in it; none, if nothing says how it is split. InputError if they are none,
    or of modules that it has not."""
    layer = uncompiled(layer)
    told, modules = getattr(layer, ATTRIBUTE, None) or {}, dict(layer.named_modules())
    if not isinstance(told, Mapping):
        raise InputError(f"layer {name!r}: {ATTRIBUTE} must be a mapping from names of modules to styles, and is {told!r}")
    found = {}
    for module, text in told.items():
        where = f"layer {name!r} ({type(layer).__name__}), tensor_parallel of {module!r}"
        if module not in modules:
            raise InputError(f"{where}: the layer has no such module; it has {sorted(filter(None, modules))}")
        style = Style.parse(text, where)
        for own, each in _with_adapter(module, modules[module], style).items():
            found[own] = each
            if not _fits(each, modules[own]):
                raise InputError(f"{where}: it is a {_told(modules[own])}, and only torch.nn.{_taken(each)} is split so")
    return found


def _fits(style: Style, module: nn.Module) -> bool:
    """Whether it is a module of the class that the style is for; a linear layer's weight is a parameter, or held in few bits."""
    if style.kind == HEADS:
        return type(module) is nn.Identity
    if style.kind == PARTIAL or style.of_lengths:
        return True
    return type(module) in LINEAR.values() or (type(module) is nn.Linear and "weight" in module._parameters)


def _taken(style: Style) -> str:
    return "Identity" if style.kind == HEADS else "Linear"


def _told(module: nn.Module) -> str:
    return f"{type(module).__name__}{' whose weight is computed' if type(module) is nn.Linear else ''}"


def _with_adapter(name: str, module: nn.Module, style: Style) -> dict[str, Style]:
    """The styles of a module's parts, if it is a linear layer with a LoRA adapter (peft's, pull request 3079): beside one that is
    cut by its outputs A is whole and B is cut by outputs, beside one that is cut by its inputs A is cut by inputs and B is whole.
    Where what enters and what leaves is whole, so is the adapter. DoRA's lengths are cut as the outputs are, whatever else."""
    if style.kind == PARTIAL or not (hasattr(module, "base_layer") and hasattr(module, "lora_A")):
        return {name: style}
    found = {f"{name}.base_layer": style}
    if getattr(module, "lora_magnitude_vector", None):
        found[f"{name}.lora_magnitude_vector.{ADAPTER}"] = style._replace(of_lengths=True)
    a, b = f"{name}.lora_A.{ADAPTER}", f"{name}.lora_B.{ADAPTER}"
    if style.kind == COLUMN:
        return found | {a: Style(AHEAD), b: style._replace(kind=BEHIND)}
    return found | ({a: style} if style.kind == ROW else {})


def set_styles(layers: nn.Sequential, told: Mapping[str, str], where: str) -> None:
    """Say how layers of the chain are split: `told` maps names of modules in it, in which `*` stands for anything
    (`block*.up`), to styles. InputError if a name is none's, or a style is none."""
    found = dict[str, dict[str, str]]()
    for pattern, style in told.items():
        parsed = Style.parse(style, f"{where} of {pattern!r}")
        names = [(name, own) for name, layer in named_layers(layers) for own, _ in uncompiled(layer).named_modules()]
        matching = [(name, own) for name, own in names if fnmatchcase(f"{name}.{own}" if own else name, pattern)]
        if not matching:
            raise InputError(f"{where}: {pattern!r} is no module of the model; its first are {', '.join(_first(names))}")
        for name, own in matching:
            module = uncompiled(layers.get_submodule(name)).get_submodule(own)
            if not _fits(parsed, module) and (parsed.kind == HEADS or not hasattr(module, "base_layer")):
                raise InputError(
                    f"{where}: {pattern!r} fits {f'{name}.{own}' if own else name!r}, which is a {_told(module)}, and only "
                    f"torch.nn.{_taken(parsed)} is split so: let the name end with that of such a module"
                )
            found.setdefault(name, {})[own] = style
    for name, layer in named_layers(layers):
        if name in found:
            setattr(uncompiled(layer), ATTRIBUTE, found[name])


def _first(names: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name}.{own}" for name, own in names if own][:FEW]


def layout_of(name: str, layer: nn.Module, styles: Mapping[str, Style], degree: int) -> Layout:
    """How the tensors of a layer lie on so many devices. InputError if there are no so many equal parts."""
    cut, partial = dict[str, Cut](), set[str]()
    for module, style in styles.items():
        held, where = uncompiled(layer).get_submodule(module), f"{module}." if module else ""
        if style.is_whole(degree):
            partial |= {f"{where}{own}" for own, _ in held.named_parameters()}
        elif (own := style.cut(degree)) is not None:
            if isinstance(held, nn.Linear):
                _check_parts(f"layer {name!r} cannot be split over {degree} devices", module, held, style, degree)
            parts = parts_cut(held, own) if isinstance(held, QuantisedLinear) else {"weight": own}
            cut |= {f"{where}{part}": way for part, way in parts.items()}
            if getattr(held, "bias", None) is not None and own.dimension == 0:
                cut[f"{where}bias"] = own
    return Layout(cut, frozenset(partial))


def _check_parts(said: str, module: str, held: nn.Linear, style: Style, degree: int) -> None:
    """InputError if there are no so many equal parts of a linear layer."""
    few, cut = isinstance(held, QuantisedLinear), style.way
    shape = (held.out_features, held.in_features) if few else tuple(held.weight.shape)
    if style.units is not None and style.units % degree:
        raise InputError(
            f"{said}: {module!r} has {style.units} units (heads) that are not parted"
            f"{f', and {style.sharing} heads share each' if style.sharing > 1 else ''}. {ELSE}"
        )
    if not cut.divides(shape, degree):
        raise InputError(
            f"{said}: the {('outputs', 'inputs')[cut.dimension]} of {module!r} are {shape[cut.dimension]}"
            f"{f' in {cut.packed} parts' if cut.packed > 1 else ''}. {ELSE}"
        )
    if isinstance(held, QuantisedLinear) and (numbers := parted(held, cut, degree)) is not None:
        raise InputError(
            f"{said}: {module!r} is held in few bits, {held.TOGETHER} numbers by one scale, and a part would have {numbers} "
            f"numbers {'of each row' if cut.dimension else 'one after the other'}, which are no whole scales. {ELSE}, or write "
            "adapter.base: fp8 or int8 (hetpipe finetune --base fp8), which have a scale for each row"
        )
