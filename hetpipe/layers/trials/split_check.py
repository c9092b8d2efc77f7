"""Does a split layer compute what the whole one does? A wrong rule is mostly silent: shapes fit, and numbers are others. So
before anything is trained each split layer is run on a few samples whole, and split, and what it gives and its gradients are
compared.

In both runs its parameters have numbers that are drawn, and it computes in float32 at least: a matrix that is zero at first, or a
tiny scale, would hide what is behind it, and rounding to half precision a wrong gradient."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.files.messages import cut
from hetpipe.layers.adapters.names import joined
from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.model import as_tuple, as_value, named_layers
from hetpipe.layers.numbers import without_autocast
from hetpipe.layers.shards.split import Split, as_if_whole, split_of, whole_size
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.stage import alias
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.trials.compare import NONE, Difference, of_rows, tolerance
from hetpipe.layers.trials.still import Still
from hetpipe.layers.untouched.kept import remember
from hetpipe.layers.untouched.randomness import drawing

ROUNDED = 0.01  # of the largest gradient: by this are those measured that are smaller, which may be but rounding
OUTPUTS, GRADIENTS = 1e-4, 1e-3  # by which numbers may differ, of the largest: sums are rounded otherwise in parts


class _Run(NamedTuple):
    outputs: tuple[Tensor, ...]
    of_inputs: dict[str, Tensor]
    of_parameters: dict[str, Tensor]
    exact: bool  # whether no number had fewer bits than those of float64


class Compared(NamedTuple):
    """What is wrong; or why it could not be found out."""

    fault: str | None = None
    untried: str | None = None


def shards_off(layers: nn.Sequential, given: Sequence[Tensor], group: Group) -> Compared:
    """Whether each split layer computes what it computes whole, up to the first that does not. `given` is what enters the first
    layer. Collective over the group: all of its devices go on, or none."""
    last = max((at for at, layer in enumerate(layers) if split_of(layer) is not None), default=-1)
    for name, layer in named_layers(layers)[: last + 1]:
        who, found, outputs = f"layer {name!r} ({type(layer).__name__})", Compared(), given
        try:
            with drawing("trial"), torch.enable_grad():
                found, outputs = _compared(layer, given, who)
        except torch.OutOfMemoryError:
            found = Compared(untried=f"{who}: a device has no room for the whole layer")
        except Exception as error:
            found = Compared(f"{who}: whether it can be split could not be tried: {cut(f'{type(error).__name__}: {error}')}")
        if group.any(found != Compared()):
            return found if found != Compared() else Compared(untried=f"{who}: as another device of its group says")
        given = outputs
    return Compared()


def _compared(layer: nn.Module, given: Sequence[Tensor], who: str) -> tuple[Compared, Sequence[Tensor]]:
    """(what is wrong with one layer, what it gives)."""
    split, put_back, dtype = split_of(layer), remember(layer), _wide(layer)
    given = [t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in given]
    try:
        with as_if_whole(layer), _drawn_numbers(layer, dtype, shards=False):
            reference = _run(layer, given)
        put_back()
        if split is None:
            return Compared(), reference.outputs
        with _drawn_numbers(layer, dtype, shards=True):
            fault = _fault(layer, split, given, reference)
    finally:
        put_back()
    if fault is None:
        return Compared(), reference.outputs
    styles = ", ".join(f"{module}: {style}" for module, style in split.styles.items())
    told = (
        f"{who}, split over {split.group.degree} devices, does not compute what it computes whole: {fault}. Its rule "
        f"(tensor_parallel: {{{styles}}}) is wrong: correct it, or plan its stage on one device"
    )
    return Compared(told), reference.outputs


def _wide(layer: nn.Module) -> torch.dtype:
    """In which it is compared."""
    return torch.float64 if any(p.dtype == torch.float64 for p in layer.parameters()) else torch.float32


@contextmanager
def _drawn_numbers(layer: nn.Module, dtype: torch.dtype, *, shards: bool) -> Iterator[None]:
    """Give the parameters of a layer, and its matrices in few bits, drawn numbers in here, the same on all devices: the whole
    ones, or shards of them. Other buffers are of this type."""
    split, before = split_of(layer), dict[Tensor, Tensor]()
    cuts, parts = split.layout.cut if split is not None else {}, _drawn_parts(layer)
    torch.clear_autocast_cache()  # it knows tensors, and not that they have other numbers now
    try:
        for own, tensor in tensors_of(layer).items():
            few = own in parts
            if tensor in before or (not few and (not tensor.is_floating_point() or tensor.element_size() < 2)):
                continue
            before[tensor] = tensor.data
            if not few and not isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(dtype)
                continue
            cut, degree = cuts.get(own), split.group.degree if split is not None else 1
            shape = tuple(tensor.shape) if cut is None else cut.whole_shape(tensor.shape, degree)
            value = parts.pop(own) if few else _drawn(own, shape, tensor.device, dtype)
            shard = shards and cut is not None and split is not None
            tensor.data = cut.shard(value, split.group.number, degree) if shard else value  # type: ignore[union-attr]
        yield
    finally:
        for tensor, data in before.items():
            tensor.data = data
        torch.clear_autocast_cache()


def _drawn(own: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers for a whole parameter: matrices that keep the size of what they multiply, others around 1."""
    draw = torch.Generator(device).manual_seed(zlib.crc32(own.encode()))
    value = torch.randn(shape, generator=draw, device=device, dtype=dtype)
    return value / max(shape[-1], 1) ** 0.5 if value.ndim > 1 else 1 + 0.3 * value


def _drawn_parts(layer: nn.Module) -> dict[str, Tensor]:
    """Such numbers for whole matrices in few bits, as the parts that hold them."""
    found = dict[str, Tensor]()
    for path, module in layer.named_modules():
        if isinstance(module, QuantisedLinear):
            weight = _drawn(joined(path, "weight"), whole_size(module), module.get_buffer("codes").device, torch.float32)
            found |= {joined(path, part): value for part, value in module.quantise(weight).items()}
    return found


def _fault(layer: nn.Module, split: Split, given: Sequence[Tensor], reference: _Run) -> str | None:
    found = _run(layer, given, like=reference)
    if [t.shape for t in found.outputs] != [t.shape for t in reference.outputs]:
        shapes = [", ".join(str(tuple(t.shape)) for t in run.outputs) for run in (found, reference)]
        return f"it gives tensors of the shapes {shapes[0]}, and {shapes[1]} whole"
    exact = found.exact and reference.exact
    off = _differs(found.outputs, reference.outputs, tolerance(OUTPUTS, reference.outputs, exact=exact))
    if off.share:
        return f"what it gives differs by {off.greatest:.2g} of the largest number"
    wanted = reference.of_inputs | {
        name: split.layout.cut[name].shard(g, split.group.number, split.group.degree) if name in split.layout.cut else g
        for name, g in reference.of_parameters.items()
    }
    partial = sorted(split.layout.partial & found.of_parameters.keys())
    made = found.of_inputs | found.of_parameters | {name: split.group.add_up(found.of_parameters[name]) for name in partial}
    if made.keys() != wanted.keys():
        return f"gradients are made of {sorted(made)}, and of {sorted(wanted)} where it is whole"
    most = tolerance(GRADIENTS, [*wanted.values(), *reference.outputs], exact=exact)
    least = ROUNDED * max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)
    for name, gradient in wanted.items():
        apart = float((made[name] - gradient).abs().max()) if gradient.numel() else 0.0
        scale = max(float(gradient.abs().max()) if gradient.numel() else 0.0, least)
        if apart > most * scale:
            return f"the gradient of {name!r} differs by {apart / scale:.2g} of the largest number"
    return None


def _differs(found: Sequence[Tensor], wanted: Sequence[Tensor], most: float) -> Difference:
    result = NONE
    for a, b in zip(found, wanted, strict=True):
        result |= of_rows(b, [a], (1,), most)
    return result


def _run(layer: nn.Module, given: Sequence[Tensor], like: _Run | None = None) -> _Run:
    """A forward as if nothing were drawn, and the gradients of a sum over what it gives, number by number (`like`: as in that
    run)."""
    leaves, apart = [t.detach().clone().requires_grad_(t.requires_grad) for t in given], without_autocast(given[0].device)
    with drawing("run"), apart, Still() as forward:
        outputs = as_tuple(layer(as_value([alias(t) if t.requires_grad else t for t in leaves])))
    named = {f"its input {at}": t for at, t in enumerate(leaves) if t.requires_grad}
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    ends = [(t, w) for t, w in zip(outputs, like.outputs if like is not None else outputs, strict=True) if t.requires_grad]
    made: Sequence[Tensor | None] = [None] * (len(named) + len(parameters))
    exact = forward.exact
    if ends and made and all(t.shape == w.shape for t, w in ends):
        seeds = [(torch.sin(w.detach().double() / _scale(w)) + 0.3).to(t.dtype) for t, w in ends]
        with drawing("run"), without_autocast(given[0].device), Still() as backward:
            made = torch.autograd.grad([t for t, _ in ends], [*named.values(), *parameters.values()], seeds, allow_unused=True)
        exact &= backward.exact
    of_inputs, of_parameters = made[: len(named)], made[len(named) :]
    return _Run(
        tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs),
        {name: g for name, g in zip(named, of_inputs, strict=True) if g is not None},
        {name: g for name, g in zip(parameters, of_parameters, strict=True) if g is not None},
        exact,
    )


def _scale(tensor: Tensor) -> float:
    """How large the numbers of a tensor are."""
    return float(tensor.detach().double().abs().mean()) or 1.0
