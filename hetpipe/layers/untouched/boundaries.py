"""What crosses the boundaries between layers, found without arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import Node
from torch.func import functional_call

from hetpipe.documents.number_types import NumberTypes
from hetpipe.files.messages import InputError, counted, cut
from hetpipe.layers.model import Tensors, alongside, as_tuple, as_value, named_layers
from hetpipe.layers.numbers import StageTypes, computing, held_types, types_alone
from hetpipe.layers.shards.split import as_if_whole, whole_shapes
from hetpipe.layers.split import REENTRANT, TensorSpec, ancestors, gradient_leaves, is_reentrant
from hetpipe.layers.transforms import added_as, tensors_of
from hetpipe.layers.untouched.fakes import Fakes, looked_at
from hetpipe.layers.untouched.kinds import Kinds, structure
from hetpipe.layers.weights import eagerly

Row = tuple[TensorSpec, ...]
LORA = "lora_"  # what the names of an adapter's modules begin with
LORA_A = f"{LORA}A"


class Traced(NamedTuple):
    """What enters layer 0, what leaves layer 0, …, what leaves layer L − 1 (L + 1 rows); and which layers compute the same."""

    rows: list[Row]
    kinds: Kinds


def trace_boundaries(
    layers: nn.Sequential,
    inputs: Tensors,
    device: torch.device | None = None,
    *,
    backward: bool = False,
    stages: Sequence[StageTypes] = (),
) -> list[Row]:
    """What crosses each boundary: the rows of `trace`."""
    return trace(layers, inputs, device, backward=backward, stages=stages).rows


def trace(
    layers: nn.Sequential,
    inputs: Tensors,
    device: torch.device | None = None,
    *,
    backward: bool = False,
    stages: Sequence[StageTypes] = (),
    kinds: Kinds | None = None,
) -> Traced:
    """What crosses each boundary for these inputs. No arithmetic is done: the layers run on fake tensors, so nothing (BatchNorm
    statistics, random state) changes. A tensor on which the last layer's output does not depend requires no gradient. All layers
    are traced as they run on `device` (under autocast, types depend on it); without one, each where its first tensor is.
    `stages`: those of a replica, each with number types of its own; what leaves one of them is what is sent, so that both ends
    know it. `backward`: InputError if a backward would find that a layer has overwritten what another needs. `kinds`: as an
    earlier trace of these layers found them, with other inputs: then one layer of each kind runs for all that are given the
    same."""
    with looked_at(layers) as fakes, eagerly():
        tracer = _Tracer(layers, device, stages, kinds, fakes)
        found = tracer.run(inputs, backward=backward)
        del tracer
    return found


class _Left(NamedTuple):
    """What a layer was given and what left it, and for each tensor of that, on which of those it depends."""

    given: Row
    tensors: tuple[Tensor, ...]
    links: list[set[int]]


class _Tracer:
    """One run through the layers. What is run there must not outlive it."""

    def __init__(
        self, layers: nn.Sequential, device: torch.device | None, stages: Sequence[StageTypes], kinds: Kinds | None, fakes: Fakes
    ) -> None:
        self.layers, self.device, self.fakes, self.kinds = layers, device, fakes, kinds
        whole = StageTypes(0, len(layers), types_alone(layers))
        self.stage_of = [next((s for s in stages if s.lo <= i < s.hi), whole) for i in range(len(layers))]
        self.rows, self.links, self.likes = list[Row](), list[list[set[int]]](), list[Hashable]()
        self.known = dict[tuple[int, NumberTypes], _Left]()
        self.overwriting, self.parameters, self.fakes_used = list[str](), list[Tensor](), dict[int, Tensor]()
        self.called = set[str]()  # modules with adapters, by their names

    def run(self, inputs: Tensors, *, backward: bool) -> Traced:
        """All layers, one after the other."""
        self.rows.append(_specs(as_tuple(inputs)))
        tensors: tuple[Tensor, ...] = tuple(self.fakes.mode.from_tensor(t.detach()) for t in as_tuple(inputs))
        for index in range(len(self.layers)):
            tensors = self.passed(index, tensors)
        if backward:
            _check_backward(tensors, self.parameters, self.overwriting)
            _refuse_idle_adapters(self.layers, tensors, self.fakes_used, self.called)
        return Traced(_with_gradients(self.rows, self.links), self.kinds or self.found_kinds())

    def found_kinds(self) -> Kinds:
        """The kinds of the layers, all of which have run. The last one, with which the loss is computed, is of its own."""
        steady = [given == left for given, left in zip(self.rows, self.rows[1:], strict=False)]
        return Kinds.of([*self.likes[:-1], "the last"], steady)

    def passed(self, index: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What leaves the next layer: found by running it, or by an earlier one of its kind."""
        stage = self.stage_of[index]
        inside = stage.lo < index < stage.hi - 1  # where nothing is cast before or behind the layer
        key = (self.kinds.first[index] if self.kinds is not None and inside else -1), stage.types
        left = self.known.get(key)
        if left is None or left.given != self.rows[-1]:
            nodes = [t.grad_fn for t in tensors]
            self.fakes.calls = [] if self.kinds is None else None
            outputs = self.ran(index, tensors)
            self.refuse_reentrant(index, outputs, nodes)
            left = _Left(self.rows[-1], outputs, [_reached(t, nodes) for t in outputs])
            if self.fakes.calls is not None:
                self.likes.append(self.like(index, tensors, left, self.fakes.calls))
                self.fakes.calls = None
            if key[0] >= 0:
                self.known[key] = left._replace(tensors=_copied(outputs))
        else:
            outputs = _copied(left.tensors)
        self.rows.append(_specs(outputs))
        self.links.append(left.links)
        return outputs

    def like(self, index: int, given: tuple[Tensor, ...], left: _Left, calls: Sequence[Hashable]) -> Hashable:
        """What a layer has to share with another to be of its kind. One that makes whole numbers is of its own: they may be too
        large for a layer that comes later, where others of its kind did not run."""
        passed = [next((k for k, t in enumerate(given) if t is made), None) for made in left.tensors]
        if any(at is None and not t.is_floating_point() for at, t in zip(passed, left.tensors, strict=True)):
            return index
        rows = left.given, _specs(left.tensors), tuple(map(frozenset, left.links)), tuple(passed)
        return structure(self.layers[index]), rows, tuple(calls)

    def ran(self, index: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the layer makes of these, as its device holds and computes it."""
        name, layer = named_layers(self.layers)[index]
        stage = self.stage_of[index]
        self.fakes.at_work = f"layer {name!r} ({type(layer).__name__})"
        # A stage has moved its own layers to its GPU, and with them what is tied to other stages' layers; these are where they
        # were built, or on the meta device. What is done with real parameters is 3 times as slow, since torch remembers no shapes
        # of it; buffers may be looked into.
        given = tensors_of(layer)
        home = self.device or next((t.device for t in given.values() if not t.is_meta), None)
        place = home or tensors[0].device
        fakes_of = {t: _fake(t, place, dtype) for t, dtype in held_types(layer, stage.types).items()}
        fake_of = {id(t): f for t, f in fakes_of.items() if isinstance(t, nn.Parameter) or _differs(t, home, f)}
        instead = {n: fake_of[id(t)] for n, t in given.items() if id(t) in fake_of}
        shapes = whole_shapes(layer)
        instead |= {n: _fake(given[n], place, fakes_of[given[n]].dtype, shape) for n, shape in shapes.items()}
        self.fakes_used |= fake_of
        self.parameters += [p for p in (instead.get(n, t) for n, t in given.items()) if p.requires_grad]
        try:
            value = as_value([t if home is None else t.to(home) for t in tensors])
            if index == stage.lo:
                value = as_value([stage.entered(t) for t in as_tuple(value)])
            versions = [t._version for t in as_tuple(value)]
            with computing(stage.types, place), as_if_whole(layer), _noting_calls(name, layer, self.called):
                outputs = as_tuple(functional_call(layer, instead, (value,)) if instead else layer(value))
            if [t._version for t in as_tuple(value)] != versions:
                self.overwriting.append(f"{name!r} ({type(layer).__name__})")
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise InputError(_decides(name, layer, error)) from error
        except Exception as error:
            raise InputError(_does_not_run(name, layer, self.rows, error)) from error
        return tuple(map(stage.left, outputs)) if index == stage.hi - 1 else outputs

    def refuse_reentrant(self, index: int, outputs: tuple[Tensor, ...], nodes: Collection[Node | None]) -> None:
        """InputError if the layer computes something again in a backward of its own."""
        if is_reentrant(outputs, nodes):
            raise InputError(
                f"layer {named_layers(self.layers)[index][0]!r} {REENTRANT}; "
                "call torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or leave recompute to the plan"
            )


def _specs(tensors: tuple[Tensor, ...]) -> Row:
    return tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def _copied(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies, since a layer may change what it is given."""
    return tuple(alongside(t.clone(), t) for t in tensors)


def _reached(output: Tensor, nodes: Sequence[Node | None]) -> set[int]:
    """Return the places of those tensors, by their nodes, on which an output depends."""
    behind = {output.grad_fn}
    for node in ancestors([output.grad_fn], nodes):
        behind |= {parent for parent, _ in node.next_functions}
    return {k for k, node in enumerate(nodes) if node is None or node in behind}


def _with_gradients(rows: Sequence[Row], links: Sequence[list[set[int]]]) -> list[Row]:
    """Return these rows; in them no gradient comes back for what the last layer's outputs do not depend on."""
    used = [set(range(len(rows[-1])))]
    for link in reversed(links):
        used.append(set[int]().union(*(link[k] for k in used[-1])))
    return [
        tuple(replace(spec, requires_grad=spec.requires_grad and k in wanted) for k, spec in enumerate(row))
        for row, wanted in zip(rows, reversed(used), strict=True)
    ]


@contextmanager
def _noting_calls(label: str, layer: nn.Module, called: set[str]) -> Iterator[None]:
    """Meanwhile, modules with adapters that are called are noted."""
    handles = [
        module.register_forward_pre_hook(lambda *_, name=f"{label}.{path}": called.add(name))
        for path, module in layer.named_modules()
        if added_as(layer) is not None and hasattr(module, LORA_A)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_idle_adapters(
    layers: nn.Sequential, outputs: Sequence[Tensor], fakes_used: Mapping[int, Tensor], called: Collection[str]
) -> None:
    """InputError if a layer has adapters that no output depends on, since its forward takes the matrix itself. Those that are
    called, and whose results nothing uses (the texts' way through the last block of a transformer for pictures), stay as they
    are, as they do in every trainer."""
    adapters = {
        f"{label}.{name}": fakes_used.get(id(p), p)
        for label, layer in named_layers(layers)
        if added_as(layer) is not None
        for name, p in layer.named_parameters()
        if f".{LORA}" in f".{name}"
    }
    used = {id(leaf) for leaf in gradient_leaves(outputs)} if adapters else set()
    idle = sorted({name.split(f".{LORA}")[0] for name, p in adapters.items() if id(p) not in used} - {*called})
    if idle:
        raise InputError(
            f"the adapter of {idle[0]!r} ({counted(len(idle), 'such module')}) changes nothing: the layer takes the module's "
            "matrix, and does not call it. Name the others in adapter.targets"
        )


def _decides(name: str, layer: nn.Module, error: Exception) -> str:
    return (
        f"layer {name!r} ({type(layer).__name__}) decides by the values of its tensors ({error}); a pipeline must "
        "know every shape beforehand: let the layer compute both ways and select, with torch.where. Where it only checks "
        "or logs them (.item(), .numpy(), 'if torch.isnan(x).any(): raise'), do that outside of the model, of what the "
        "engine returns, or in the loss"
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


def _differs(tensor: Tensor, home: torch.device | None, fake: Tensor) -> bool:
    """Whether a tensor is not as its device has it."""
    return tensor.is_meta or tensor.device != home or tensor.dtype != fake.dtype


def _fake(tensor: Tensor, device: torch.device, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
    """What stands for a layer's tensor, as a device has it that holds it in this type (and whole, where it is a shard of one of
    this shape), while fake tensors are in use."""
    fake = torch.empty(tensor.shape if shape is None else shape, dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):  # a layer may ask for one
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
