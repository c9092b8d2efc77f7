"""Which modules of a model are called when, which of them form a layer of the chain, and what must be carried from layer to
layer: seen in runs of the model's own forward on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetpipe.files.messages import InputError, shown
from hetpipe.layers.model import evaluating
from hetpipe.layers.replay.flow import NONE, Flow, Sources, tensors_in
from hetpipe.layers.untouched.kept import Fixed


class Input(NamedTuple):
    """The tensor of this number that the chain is given."""

    number: int


class Made(NamedTuple):
    """A tensor that the call of this number returns, the `leaf`-th in it."""

    call: int
    leaf: int


class Own(NamedTuple):
    """A parameter, by its name in the model."""

    name: str


Source = Input | Made


class Track(NamedTuple):
    """What crosses a boundary of the chain: the tensor of a source, or, where it is `hollow`, its shape only."""

    source: Source
    hollow: bool


class Output(NamedTuple):
    """How a module returns tensors: in this structure, beside other values. `alone`: whether each is without samples."""

    spec: TreeSpec
    others: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    alone: tuple[bool, ...] = ()

    @classmethod
    def of(cls, value: Any) -> tuple[Output, list[Tensor]]:
        """Return that of a value, and the value's tensors."""
        flat, spec = tree_flatten(value)
        tensors = [each for each in flat if isinstance(each, Tensor)]
        others = tuple(_TENSOR if isinstance(each, Tensor) else each for each in flat)
        return cls(spec, others, tuple(tuple(t.shape) for t in tensors)), tensors

    def holding(self, tensors: Sequence[Tensor]) -> Any:
        """Put these tensors where the others were."""
        left = iter(tensors)
        return tree_unflatten([next(left) if each is _TENSOR else each for each in self.others], self.spec)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_TENSOR = object()  # stands in `others` where a tensor was


@dataclass(eq=False)
class Called(Fixed):
    """A call of a module with parameters, by the module's path. `of`: of what its arguments are computed."""

    path: str
    of: Sources
    output: Output | None = None


@dataclass(frozen=True, eq=False)
class Anatomy(Fixed):
    """Calls in their order, of which each layer of the chain has those from one of `begins` to the next; `names`: of the layers.
    `lists`: path of a module → the path of the list of blocks that it is in, if any. `of_output`: sources. `inputs`: how
    many tensors the chain is given. `outputs`: the shapes of what the model returns; `listed`: one for each sample. `written`:
    what the model writes into later, so that layers are given copies."""

    calls: tuple[Called, ...]
    lists: Mapping[str, str | None]
    begins: tuple[int, ...]
    names: tuple[str, ...]
    inputs: int
    of_output: Sources
    outputs: tuple[tuple[int, ...], ...]
    written: frozenset[Source] = frozenset()
    listed: bool = False
    _tracks: dict[int, tuple[Track, ...]] = field(default_factory=dict)

    def span(self, layer: int) -> range:
        """The numbers of its calls."""
        ends = (*self.begins[1:], len(self.calls))
        return range(self.begins[layer], ends[layer])

    @cached_property
    def needed(self) -> tuple[frozenset[Source], ...]:
        """Return, for each layer, what it and all behind it compute of: the chain's inputs, and what layers before it make."""
        found, needed = list[frozenset[Source]](), self.of_output
        for layer in reversed(range(len(self.names))):
            needed = needed.union(*(self.calls[call].of for call in self.span(layer)))
            first = self.begins[layer]
            found.append(frozenset(s for s in needed if isinstance(s, Input) or (isinstance(s, Made) and s.call < first)))
        return tuple(reversed(found))

    def parameters(self, layer: int) -> list[str]:
        """Name the parameters that the layer uses outside of the modules that it calls."""
        own = NONE.union(*(self.calls[call].of for call in self.span(layer)))
        if layer == len(self.names) - 1:
            own |= self.of_output
        return sorted(source.name for source in own if isinstance(source, Own))

    def modules(self, layer: int) -> list[str]:
        """The paths of those that the layer calls."""
        return list(dict.fromkeys(self.calls[call].path for call in self.span(layer)))

    def tracks(self, layer: int) -> tuple[Track, ...]:
        """What is carried to a layer: all that it, or a later one, computes of, and shapes that its forward comes across."""
        if layer not in self._tracks:
            needed, made = self.needed[layer], self._made_before(layer)
            found = [Track(s, layer > 0 and s not in needed) for s in map(Input, range(self.inputs))]
            found += [Track(s, s not in needed) for s in made if s in needed or self.shaped_like(layer, s) is None]
            self._tracks[layer] = tuple(found)
        return self._tracks[layer]

    def _made_before(self, layer: int) -> list[Made]:
        outputs = ((call, self.calls[call].output) for call in range(self.begins[layer]))
        return [Made(call, leaf) for call, output in outputs if output is not None for leaf in range(len(output.shapes))]

    def shaped_like(self, layer: int, source: Made) -> Made | None:
        """What is carried to the layer, and has the shape of what another block of the same list made there."""
        calls, own = self.calls, self.calls[source.call]
        alike = self.lists[own.path]
        if alike is None:
            return None
        for call in range(self.begins[layer] - 1, source.call, -1):
            other = Made(call, source.leaf)
            if (
                self.lists[calls[call].path] == alike
                and other in self.needed[layer]
                and _shape(calls, other) == _shape(calls, source)
            ):
                return other
        return None

    def is_alone(self, source: Source) -> bool:
        """Whether it has no samples; what the chain is given always has."""
        if isinstance(source, Input):
            return False
        output = self.calls[source.call].output
        assert output is not None
        return output.alone[source.leaf]


def _shape(calls: Sequence[Called], source: Made) -> tuple[int, ...] | None:
    output = calls[source.call].output
    assert output is not None
    return output.shapes[source.leaf] if source.leaf < len(output.shapes) else None


def anatomy_of(model: nn.Module, runs: Sequence[tuple[Sequence[Tensor], Mapping[str, Any]]]) -> Anatomy:
    """Find the anatomy of a model by running it with each of these arguments, of which each has another number of samples. The
    tensors beside them are the chain's. InputError says why it is no chain."""
    lists = _modules(model)
    first, *others = [_run(model, lists, *run) for run in runs]
    for other in others:
        if [(call.path, call.of) for call in other.calls] != [(call.path, call.of) for call in first.calls]:
            raise InputError(f"{_kind(model)} calls other modules for {len(runs[0][0][0])} samples than for {len(runs[1][0][0])}")
        for own, its in zip(first.calls, other.calls, strict=True):
            assert own.output is not None
            assert its.output is not None
            _refuse_numbers(_kind(model), own.path, own.output, its.output)
            own.output = own.output._replace(alone=_alone(_kind(model), own.path, own.output, its.output))
    used = {source.name for call in first.calls for source in call.of if isinstance(source, Own)}
    used |= {source.name for source in first.of_output if isinstance(source, Own)}
    strange = [name for name in sorted(used) if any(name.startswith(f"{path}.") for path in lists)]
    if strange:
        raise InputError(f"{_kind(model)} cannot be cut into layers: {strange[0]!r} is used outside of its module, too")
    listed = any(len(other.outputs) != len(first.outputs) for other in others)
    for (tensors, _), run in zip(runs, (first, *others), strict=True):
        if not listed:
            _refuse_others(_kind(model), run.outputs, len(tensors[0]))
    return replace(first, listed=listed)


def _refuse_others(kind: str, shapes: Sequence[tuple[int, ...]], samples: int) -> None:
    """InputError unless a model gives a row for each sample."""
    for shape in shapes:
        if shape[:1] != (samples,):
            raise InputError(
                f"{kind} cannot be cut into layers: for {samples} samples it gives a tensor of shape {list(shape)}, which has no "
                "row for each"
            )


def _refuse_numbers(kind: str, path: str, one: Output, two: Output) -> None:
    """InputError where a module returns numbers beside tensors, which may be others in another call."""
    plain = [(a, b) for a, b in zip(one.others, two.others, strict=False) if a is not _TENSOR]
    number = next((a for a, b in plain if a != b or (isinstance(a, int | float) and not isinstance(a, bool))), None)
    if number is not None or len(one.others) != len(two.others):
        raise InputError(
            f"{kind} cannot be cut into layers: {path!r} returns {shown(number)} beside tensors, which may be another value in "
            "another call"
        )


def _alone(kind: str, path: str, one: Output, two: Output) -> tuple[bool, ...]:
    found = list[bool]()
    for own, other in zip(one.shapes, two.shapes, strict=True):
        if own != other and (not own or own[0] == other[0] or own[1:] != other[1:]):
            raise InputError(
                f"{kind} cannot be cut into layers: {path!r} makes a tensor of shape {list(own)}, and of {list(other)} "
                "for one sample more: samples are not in its first dimension"
            )
        found.append(own == other)
    return tuple(found)


def _modules(model: nn.Module) -> dict[str, str | None]:
    """The paths of modules that the model's forward calls, which have parameters or draw numbers, and which lists of blocks they
    are in. Of a module that holds more than half of the parameters, and lists, these are its own."""
    found, homes, most = dict[str, str | None](), dict[int, str](), _size(model) / 2

    def visit(path: str, module: nn.Module, of: str | None) -> None:
        children = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None]
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            of = path if isinstance(module, nn.ModuleList) else None
        elif module is not model and not (of is None and _size(module) > most and _has_lists(module)):
            if any(True for _ in module.parameters()):
                if (before := homes.setdefault(id(module), path)) != path:
                    raise InputError(f"{_kind(model)} cannot be cut into layers: {path!r} is {before!r}, too")
                found[path] = of
            elif _draws(module):
                found[path] = None
            return
        for name, child in children:
            visit(name, child, of)

    visit("", model, None)
    if not any(found.values()):
        raise InputError(f"{_kind(model)} cannot be cut into layers: it has no list of blocks (nn.ModuleList)")
    return found


def _draws(module: nn.Module) -> bool:
    return any(isinstance(each, DROPOUTS) and each.p > 0 for each in module.modules())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_lists(module: nn.Module) -> bool:
    return not isinstance(module, nn.Sequential) and any(isinstance(each, nn.ModuleList) for each in module.modules())


class _Writes:
    """Which tensors the model itself writes into, and not a module that it calls, which does so in the chain, too."""

    def __init__(self) -> None:
        self._begun, self._known, self._before = dict[Source, Tensor](), dict[Source, int](), dict[Source, int]()

    def begins(self, source: Source, tensor: Tensor) -> None:
        """From now on, this one is looked at."""
        self._begun[source], self._known[source] = tensor, tensor._version

    def enter(self) -> None:
        """A module begins."""
        self._before = {source: tensor._version for source, tensor in self._begun.items()}

    def leave(self) -> None:
        """It has ended."""
        for source, version in self._before.items():
            self._known[source] += self._begun[source]._version - version

    def written(self) -> frozenset[Source]:
        """What the model has written into so far."""
        return frozenset(source for source, tensor in self._begun.items() if tensor._version != self._known[source])


def _run(model: nn.Module, lists: Mapping[str, str | None], tensors: Sequence[Tensor], given: Mapping[str, Any]) -> Anatomy:
    calls, flow, writes = list[Called](), Flow(), _Writes()
    for number, tensor in enumerate(tensors):
        flow.begins(tensor, Input(number))
        writes.begins(Input(number), tensor)
    for name, parameter in model.named_parameters():
        flow.begins(parameter, Own(name))

    def before(module: nn.Module, args: Any, kwargs: Any, path: str) -> None:
        calls.append(Called(path, flow.sources([args, kwargs])))
        writes.enter()

    def behind(module: nn.Module, args: Any, kwargs: Any, value: Any) -> Any:
        writes.leave()
        call = len(calls) - 1
        calls[call].output, made = Output.of(value)
        own = [tensor.clone() for tensor in made]  # of storages that nothing else has
        for leaf, tensor in enumerate(own):
            flow.begins(tensor, Made(call, leaf))
            writes.begins(Made(call, leaf), tensor)
        output = calls[call].output
        assert output is not None
        return output.holding(own)

    with _hooked(model, lists, before, behind), torch.no_grad(), flow:
        outputs = tensors_in(model(**given))
        of_output = flow.sources(outputs)
    missing = [path for path, of in lists.items() if of and path not in {call.path for call in calls}]
    if missing:
        raise InputError(f"{_kind(model)} cannot be cut into layers: {missing[0]!r} is not called")
    begins, names = _layers([(call.path, lists[call.path]) for call in calls])
    shapes = tuple(tuple(tensor.shape) for tensor in outputs)
    return Anatomy(tuple(calls), lists, begins, names, len(tensors), of_output, shapes, writes.written())


@contextmanager
def _hooked(model: nn.Module, paths: Mapping[str, Any], before: Any, behind: Any) -> Iterator[None]:
    """The modules at these paths call these functions, in evaluation."""
    handles = list[Any]()
    try:
        for path in paths:
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(partial(before, path=path), with_kwargs=True))
            handles.append(module.register_forward_hook(behind, with_kwargs=True))
        with evaluating(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(calls: Sequence[tuple[str, str | None]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Where each layer begins in the calls, and its name: one of what comes before the first block, one for each block (with what
    is called between it and the one before), and one of what comes behind the last."""
    blocks = [number for number, (_, of) in enumerate(calls) if of]
    begins = [0, *(0 if number == 0 else blocks[number - 1] + 1 for number in range(len(blocks))), blocks[-1] + 1]
    begins[1] = blocks[0]
    names = ["embed", *(calls[block][0].replace(".", "_") for block in blocks), "head"]
    return tuple(begins), tuple(names)


def _kind(model: nn.Module) -> str:
    return type(model).__name__
