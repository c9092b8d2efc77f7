"""What crosses the boundaries between layers, found without arithmetic; and what must not be cut apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import Node
from torch.func import functional_call

from hetpipe.files.messages import InputError, counted, cut
from hetpipe.layers.model import Tensors, as_tuple, as_value, named_layers
from hetpipe.layers.numbers import StageTypes, computing, held_types, type_name, types_alone
from hetpipe.layers.transforms import lineage_of, tensors_of
from hetpipe.layers.untouched.fakes import Fakes, fake_tensors
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.layers.weights import eagerly


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor that crosses a boundary, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.shape} of {type_name(self.dtype)}"

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def filled(self) -> Tensor:
        """Numbers of this shape on the CPU, always the same; zeros where they are no floating-point numbers."""
        if not self.dtype.is_floating_point:
            return torch.zeros(self.shape, dtype=self.dtype)
        drawn = torch.randn(self.shape, dtype=self.dtype, generator=torch.Generator().manual_seed(0))
        return drawn.requires_grad_(self.requires_grad)

    @property
    def numel(self) -> int:
        """Numbers of the tensor."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Generators, and what the module keeps, are afterwards what they were, and autocast, which keeps the weights that it has
    cast, keeps none of those that were cast here."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with kept(module), drawing("trace"), eagerly():
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


def trace_boundaries(
    layers: nn.Sequential, inputs: Tensors, device: torch.device | None = None, *, backward: bool = False,
    stages: Sequence[StageTypes] = (),
) -> list[tuple[TensorSpec, ...]]:  # fmt: skip
    """What enters layer 0, what leaves layer 0, …, what leaves layer L − 1 (L + 1 entries), for these inputs. No arithmetic
    is done: the layers run on fake tensors, so nothing (BatchNorm statistics, random state) changes. A tensor on which the last
    layer's output does not depend requires no gradient. All layers are traced as they run on `device` (under autocast, types
    depend on it); without one, each where its first tensor is. `stages`: those of a replica, each with number types of its own;
    what leaves one of them is what is sent, so that both ends know it. `backward`: InputError if a backward would find that
    a layer has overwritten what another needs."""
    with _unchanged(layers), fake_tensors() as fakes, torch.enable_grad():
        found = _traced(layers, inputs, device, fakes, backward=backward, stages=stages)
    fakes.refuse_what_is_left()
    return found


def _traced(
    layers: nn.Sequential, inputs: Tensors, device: torch.device | None, fakes: Fakes, *, backward: bool,
    stages: Sequence[StageTypes],
) -> list[tuple[TensorSpec, ...]]:  # fmt: skip
    overwriting: list[str] = []
    parameters: list[Tensor] = []
    fakes_used = dict[int, Tensor]()
    found, nodes = [_specs(as_tuple(inputs))], [[t.grad_fn for t in as_tuple(inputs)]]
    tensors: tuple[Tensor, ...] = tuple(fakes.mode.from_tensor(t.detach()) for t in as_tuple(inputs))
    whole = StageTypes(0, len(layers), types_alone(layers))
    for index, (name, layer) in enumerate(named_layers(layers)):
        stage = next((stage for stage in stages if stage.lo <= index < stage.hi), whole)
        fakes.at_work = f"layer {name!r} ({type(layer).__name__})"
        # A stage has moved its own layers to its GPU, and with them what is tied to other stages' layers; these are where they
        # were built, or on the meta device.
        given = tensors_of(layer)
        home = device or next((t.device for t in given.values() if not t.is_meta), None)
        place = home or tensors[0].device
        fakes_of = {t: _fake(t, place, dtype) for t, dtype in held_types(layer, stage.types).items()}
        fake_of = {id(t): f for t, f in fakes_of.items() if t.is_meta or t.device != home or t.dtype != f.dtype}
        instead = {n: fake_of[id(t)] for n, t in given.items() if id(t) in fake_of}
        fakes_used |= fake_of
        parameters += [p for p in (instead.get(n, t) for n, t in given.items()) if p.requires_grad]
        try:
            value = as_value([t if home is None else t.to(home) for t in tensors])
            if index == stage.lo:
                value = as_value([stage.entered(t) for t in as_tuple(value)])
            versions = [t._version for t in as_tuple(value)]
            with computing(stage.types, place):
                tensors = as_tuple(functional_call(layer, instead, (value,)) if instead else layer(value))
            if [t._version for t in as_tuple(value)] != versions:
                overwriting.append(f"{name!r} ({type(layer).__name__})")
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise InputError(
                f"layer {name!r} ({type(layer).__name__}) decides by the values of its tensors ({error}); a pipeline must "
                "know every shape beforehand: let the layer compute both ways and select, with torch.where. Where it only checks "
                "or logs them (.item(), .numpy(), 'if torch.isnan(x).any(): raise'), do that outside of the model, of what the "
                "engine returns, or in the loss"
            ) from error
        except Exception as error:
            raise InputError(_does_not_run(name, layer, found, error)) from error
        _refuse_reentrant(name, tensors)
        if index == stage.hi - 1:
            tensors = tuple(map(stage.left, tensors))
        found.append(_specs(tensors))
        nodes.append([t.grad_fn for t in tensors])
    if backward:
        _check_backward(tensors, parameters, overwriting)
        _refuse_idle_adapters(layers, tensors, fakes_used)
    used = ancestors(nodes[-1])
    return [tuple(replace(spec, requires_grad=spec.requires_grad and (node is None or node in used))
                  for spec, node in zip(specs, row, strict=True)) for specs, row in zip(found, nodes, strict=True)]  # fmt: skip


def _refuse_idle_adapters(layers: nn.Sequential, outputs: Sequence[Tensor], fakes_used: Mapping[int, Tensor]) -> None:
    """InputError if a layer has adapters that no output depends on, since its forward takes the matrix itself."""
    adapters = {f"{label}.{name}": fakes_used.get(id(p), p) for label, layer in named_layers(layers)
                if (lineage := lineage_of(layer)) is not None and lineage.adapter is not None
                for name, p in layer.named_parameters() if ".lora_" in f".{name}"}  # fmt: skip
    used = {id(leaf) for leaf in gradient_leaves(outputs)} if adapters else set()
    idle = sorted({name.split(".lora_")[0] for name, p in adapters.items() if id(p) not in used})
    if idle:
        raise InputError(
            f"the adapter of {idle[0]!r} ({counted(len(idle), 'such module')}) changes nothing: the layer takes the module's "
            "matrix, and does not call it. Name the others in adapter.targets"
        )


def _does_not_run(name: str, layer: nn.Module, found: Sequence[tuple[TensorSpec, ...]], error: Exception) -> str:
    """`found`: what enters the layers up to this one."""
    given = "; ".join(map(str, found[-1]))
    source, hint = "what the layer before it gives", ""
    if len(found) == 1:
        source = "the inputs"
        if not any(s.dtype.is_floating_point or s.dtype.is_complex for s in found[0]):
            hint = "; where it wants floating-point numbers, let the data give them (tensor.float()), or begin with an Embedding"
    return f"layer {name!r} ({type(layer).__name__}) does not run on {source}: {given}: {cut(str(error))}{hint}"


def _check_backward(outputs: Sequence[Tensor], parameters: Sequence[Tensor], overwriting: Sequence[str]) -> None:
    """InputError if a tensor that these outputs' backward needs was overwritten; any other fault is left to real tensors."""
    ends = [t for t in outputs if t.requires_grad]
    if not overwriting or not ends or not parameters:
        return
    try:
        torch.autograd.grad(ends, list(parameters), [torch.ones_like(t) for t in ends], allow_unused=True)
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            raise InputError(
                "the model has no backward pass, on one device either: a tensor was overwritten that is needed for a gradient. "
                f"Let the layers that overwrite their input work on a copy: {cut(', '.join(overwriting))} (torch: "
                f"{cut(str(error).split('; expected')[0])})"
            ) from error


def _fake(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What stands for a layer's tensor, as a device has it that holds it in this type, while fake tensors are in use."""
    fake = torch.empty(tensor.shape, dtype=dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def joint_gradients(rows: Sequence[tuple[TensorSpec, ...]]) -> list[tuple[TensorSpec, ...]]:
    """One boundary's tensors for several micro-batches: a gradient comes back for all of them if for any."""
    needed = [any(column) for column in zip(*([s.requires_grad for s in row] for row in rows), strict=True)]
    return [tuple(replace(s, requires_grad=n) for s, n in zip(row, needed, strict=True)) for row in rows]


def ancestors(nodes: Iterable[Node | None], stops: Collection[Node | None] = ()) -> dict[Node, None]:
    """All nodes of the autograd graph that a backward from these visits, in this order; not those in `stops`, nor behind them."""
    pending, seen = [*nodes], dict[Node, None]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and node not in stops:
            seen[node] = None
            pending += [parent for parent, _ in node.next_functions]
    return seen


def gradient_leaves(tensors: Iterable[Tensor], stops: Collection[Node | None] = ()) -> list[Tensor]:
    """The tensors that would be given a gradient by a backward from these, which ends at `stops`."""
    found = [getattr(node, "variable", None) for node in ancestors((t.grad_fn for t in tensors), stops)]
    return [variable for variable in found if isinstance(variable, Tensor)]


REENTRANT = "uses reentrant checkpointing, under which a pipeline loses gradients without a word"


def is_reentrant(tensors: Iterable[Tensor]) -> bool:
    """Whether some of what was computed for these will be computed again in a backward of its own."""
    return any(node.name() == "CheckpointFunctionBackward" for node in ancestors(t.grad_fn for t in tensors))


def _specs(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def _refuse_reentrant(name: str, tensors: tuple[Tensor, ...]) -> None:
    if is_reentrant(tensors):
        raise InputError(
            f"layer {name!r} {REENTRANT}; "
            "call torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or leave recompute to the plan"
        )


def tied_layers(layers: nn.Sequential) -> dict[str, tuple[int, ...]]:
    """Tied parameters: the first name of each → the layers that hold the same object."""
    names: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index, (child, layer) in enumerate(named_layers(layers)):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append((index, f"{child}.{name}"))
    found = {places[0][1]: tuple(dict.fromkeys(index for index, _ in places)) for places in names.values()}
    return {name: indices for name, indices in found.items() if len(indices) > 1}


CARRY = "carry the tensor instead: let the layers between take and return it beside their own, as a tuple"


def skipping_layers(layers: nn.Sequential) -> dict[str, str]:
    """Layers with skip connections by fairscale's or torchgpipe's @skippable: name → the library. (Found by the class's own
    package, so that neither needs to be installed.)"""
    found = {}
    for name, layer in named_layers(layers):
        for base in type(layer).__mro__:
            if base.__name__ == "Skippable" and hasattr(layer, "stashable"):
                found[name] = base.__module__.split(".")[0]
    return found


def refuse_skips(layers: nn.Sequential, backend: str) -> None:
    """InputError if a layer has skip connections that this back end does not know."""
    for name, library in skipping_layers(layers).items():
        if library != backend:
            raise InputError(
                f"layer {name!r} is @skippable by {library}, and the back end {backend!r} passes tensors from layer to layer "
                f"only; use the back end {library!r}, or {CARRY}"
            )
