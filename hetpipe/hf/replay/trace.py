"""What belongs where in a causal language model, by a run of its own forward without values; or why it cannot be cut."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.hf.replay.skeleton import Anatomy, Call, LeftOut, Skeleton, Zeros, options
from hetpipe.layers.untouched.fakes import fake_tensors

SAMPLES, TOKENS = 41, 37  # of the run: sizes by which those of the batch are told in shapes
EXTRAS = ("attention_mask", "position_ids")


Shapes = Mapping[str, tuple[int | str, ...]]


class CannotCutError(InputError):
    """The model is no chain of layers, and why."""


class Trace:
    """One forward, with its layers, on tensors without values; `anatomy` is what follows from it. CannotCutError says why a model
    is no chain."""

    def __init__(self, model: nn.Module, layers: str) -> None:
        self.model, self.path = model, layers
        self.layers = list(model.get_submodule(layers).children())
        self.calls: list[Call] = []
        self.outputs: list[Tensor] = []
        self.widths = set[int]()
        self.order: list[int] = []
        self.phase = "before"
        self.called: dict[str, dict[str, Any]] = {"before": {}, "after": {}}  # path → what it gave
        self.first: Tensor | None = None
        self.first_node = 0

    def run(self, given: Mapping[str, Tensor]) -> Anatomy:
        """Its anatomy."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        handles = [
            module.register_forward_hook(self._note(path))
            for path, module in self.model.named_modules()
            if id(module) not in inside and (_own(module) or path == self._embedding())
        ]
        for number, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave(number)))
        takes = _parameters_of(self.model)
        try:
            logits = self.model(**given, **options(takes)).logits
        finally:
            for handle in handles:
                handle.remove()
        return self._anatomy(logits, takes, given)

    def _embedding(self) -> str:
        found: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return str(next(path for path, module in self.model.named_modules() if module is found))

    def _note(self, path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self.called.setdefault(self.phase, {})[path] = output

        return note

    def _enter(self, number: int) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.order.append(number)
            if self.order != list(range(len(self.order))):
                raise CannotCutError("its layers are not called once each, in their order")
            try:
                call = Call.of(args, kwargs)
            except LookupError:
                raise CannotCutError(f"layer {number} is given no features") from None
            if number == 0:
                self.first, self.first_node = call.hidden, _newest(call.hidden)
            elif call.hidden is not self.outputs[-1]:
                raise CannotCutError(f"something is computed between layers {number - 1} and {number}")
            self.calls.append(call)
            self.phase = "layer"
            hidden = call.hidden.detach().requires_grad_()
            if call.name is None:
                return (hidden, *call.args), call.kwargs
            return (), {**call.kwargs, call.name: hidden}

        return enter

    def _leave(self, number: int) -> Callable[..., Any]:
        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(hidden, Tensor):
                raise CannotCutError(f"layer {number} returns a {type(output).__name__}")
            self.widths.add(len(output) if isinstance(output, tuple) else 0)
            leaf = hidden.detach().requires_grad_()
            self.outputs.append(leaf)
            self.phase = "after" if number == len(self.layers) - 1 else "between"
            return (leaf, *output[1:]) if isinstance(output, tuple) else leaf

        return leave

    def _anatomy(self, logits: Tensor, takes: frozenset[str], given: Mapping[str, Tensor]) -> Anatomy:
        self._check_calls(given)
        owners = _owners(self.model, self.path)
        embed, head = dict.fromkeys(self.called["before"]), dict.fromkeys(self.called["after"])
        before, _ = self._ancestors([self.first])
        after, late = self._ancestors([logits])
        if not late:
            raise CannotCutError("what it computes after the last layer depends on more than that layer gives")
        for found, into in ((before, embed), (after, head)):
            for parameter in found:
                paths = owners.get(id(parameter))
                if paths is None:
                    raise CannotCutError("a parameter of a layer is used outside of it")
                if not any(path in into for path in paths):
                    into[paths[0]] = None
        shared, absent = self._before()
        embedded = self.called["before"].get(self._embedding())
        if not isinstance(embedded, Tensor) or "inputs_embeds" not in takes:
            raise CannotCutError("its forward takes no inputs_embeds")
        self._check_all_placed([*embed, *head], owners)
        return Anatomy(
            layers=self.path, width=self.widths.pop(), embed=_topmost(embed), head=_topmost(head), shared=_topmost(shared),
            absent=absent, features=embedded.shape[-1], takes=takes, words=logits.shape[-1], logits=self._gives(logits),
        )  # fmt: skip

    def _gives(self, logits: Tensor) -> str | None:
        """The linear layer whose very output these are."""
        found = [path for path, output in self.called["after"].items() if output is logits]
        return next((path for path in found if type(self.model.get_submodule(path)) is nn.Linear), None)

    def _before(self) -> tuple[list[str], dict[str, tuple[int | str, ...]]]:
        """Modules that run before the first layer: without trained parameters; and with them, with the shapes that they give."""
        shared, absent = list[str](), dict[str, tuple[int | str, ...]]()
        for path, output in self.called["before"].items():
            module = self.model.get_submodule(path)
            if not any(p.requires_grad for p in module.parameters()):
                shared.append(path)
            elif isinstance(output, Tensor):
                absent[path] = tuple({SAMPLES: "b", TOKENS: "t"}.get(n, n) for n in output.shape)
            else:
                raise CannotCutError(f"{path!r} gives a {type(output).__name__} before the first layer")
        return shared, {path: absent[path] for path in _topmost(absent)}

    def _check_calls(self, given: Mapping[str, Tensor]) -> None:
        if len(self.order) != len(self.layers):
            raise CannotCutError("not all of its layers are called")
        if len(self.widths) > 1:
            raise CannotCutError("its layers return tuples of several lengths")
        if "between" in self.called:
            raise CannotCutError(f"{next(iter(self.called['between']))!r} is called between layers")
        leaves = {id(output) for output in self.outputs}
        tokens = given["input_ids"]
        for number, call in enumerate(self.calls):
            for name, value in _items(call):
                if value is None or isinstance(value, bool | int | float | str | torch.dtype):
                    continue
                if not isinstance(value, Tensor):
                    raise CannotCutError(
                        f"layer {number} is given a {type(value).__name__} ({name}), by which layers may speak to each other"
                    )
                if value is tokens or value.requires_grad or id(value) in leaves:
                    raise CannotCutError(f"layer {number} is given more than features that depend on values ({name})")

    def _ancestors(self, tensors: Iterable[Tensor | None]) -> tuple[list[Tensor], bool]:
        """Parameters that tensors are computed of, and whether otherwise only of the last layer's output, and not of what came
        before the first."""
        leaves = {id(output): number for number, output in enumerate(self.outputs)}
        found, late = dict[int, Tensor](), True
        pending, seen = [t.grad_fn for t in tensors if t is not None and t.grad_fn is not None], set[Any]()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is None:
                late = late and node._sequence_nr() > self.first_node
            elif id(variable) in leaves:
                late = late and leaves[id(variable)] == len(self.outputs) - 1
            else:
                found[id(variable)] = variable
            pending += [parent for parent, _ in node.next_functions if parent is not None]
        return list(found.values()), late

    def _check_all_placed(self, paths: Iterable[str], owners: Mapping[int, list[str]]) -> None:
        placed = set(paths)
        for path in placed:
            if any(layer is module for module in self.model.get_submodule(path).modules() for layer in self.layers):
                raise CannotCutError(f"{path or 'the model'!r} holds parameters of its own beside the layers")
        for name, parameter in self.model.named_parameters():
            mine = owners.get(id(parameter))
            if mine is not None and not any(_within(path, placed) for path in mine):
                raise CannotCutError(f"{name!r} is in no layer, and neither before nor after them")


def anatomy_of(make: Callable[[], nn.Module], extras: Sequence[str] = EXTRAS) -> Anatomy:
    """Of a model, which `make` makes, with each of the extras and without. CannotCutError says why there is none."""
    with fake_tensors():
        model = make().eval()
        _choose_experts(model)
        for module in model.modules():
            if hasattr(module, "config"):
                _without_cache(module.config)
        path = layers_path(model)
        found = None
        known = _extras()
        for more in ({}, *({name: known[name]} for name in extras)):
            given = {"input_ids": torch.zeros(SAMPLES, TOKENS, dtype=torch.long), **more}
            trace = Trace(model, path)
            own = trace.run(given)
            if found is not None and replace(own, absent=found.absent) != found:
                raise CannotCutError(f"it computes in another way with {' and '.join(more)}")
            found = own if found is None else replace(own, absent=_larger(found.absent, own.absent))
            _check_dry(model, own, trace, more)
    assert found is not None
    return found


def _choose_experts(model: Any) -> None:
    """An implementation of experts whose shapes do not depend on values, where there is a choice (a grouped product wants types
    that tensors without values do not have)."""
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # a model without experts of that kind
            model.set_experts_implementation("batched_mm")


def _without_cache(config: Any) -> Any:
    """No forward keeps what a generation would go on from: it would be one for all layers."""
    config.use_cache = False
    return config


def _larger(one: Shapes, two: Shapes) -> Shapes:
    """Each dimension as large as in either: what has no samples of its own without positions may have them with."""
    if one.keys() != two.keys():
        raise CannotCutError("it calls other modules before the first layer with positions or a mask")
    return {path: tuple(n if m == 1 else m for m, n in zip(one[path], two[path], strict=True)) for path in one}


def _extras() -> dict[str, Tensor]:
    return {
        "attention_mask": torch.ones(SAMPLES, TOKENS, dtype=torch.bool),
        "position_ids": torch.arange(TOKENS).expand(SAMPLES, -1),
    }


def skeleton_of(model: nn.Module, anatomy: Anatomy, held: Mapping[str, nn.Module]) -> Skeleton:
    """A copy of the model without its layers and with these modules, and, where they are not among these, zeros in place of what
    the trained modules before the first layer give."""
    layers = model.get_submodule(anatomy.layers)
    memo: dict[int, Any] = {id(module): module for module in held.values()}
    memo[id(layers)] = nn.ModuleList([LeftOut(layer, i, anatomy.width) for i, layer in enumerate(layers.children())])
    memo |= {id(tensor): tensor for module in model.modules() for tensor in _tensors(module)}
    memo |= {id(m.config): _without_cache(copy.copy(m.config)) for m in model.modules() if hasattr(m, "config")}
    skeleton = Skeleton(copy.deepcopy(model, memo).eval(), anatomy)
    for path, shape in anatomy.absent.items():
        if path not in held:
            dtype = next(p.dtype for p in model.get_submodule(path).parameters())
            skeleton.put(path, Zeros(shape, dtype, skeleton.sizes))
    return skeleton


def layers_path(model: nn.Module) -> str:
    """Where the layers are: the list with most parameters of those that are in no other."""
    inner, found = set[str](), dict[str, int]()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{other}.") for other in inner):
            inner.add(path)
            found[path] = sum(p.numel() for p in module.parameters())
    if not found:
        raise CannotCutError("it has no list of layers")
    return max(found, key=lambda path: found[path])


def _check_dry(model: nn.Module, anatomy: Anatomy, trace: Trace, extras: Mapping[str, Tensor]) -> None:
    """What layers are given must be what they are given where values are missing before the first."""
    skeleton = skeleton_of(model, anatomy, {path: model.get_submodule(path) for path in anatomy.shared})
    assert trace.first is not None
    calls = skeleton.calls(trace.first, extras)
    for number, (real, dry) in enumerate(zip(trace.calls, calls, strict=True)):
        if real.name != dry.name or _shapes(real) != _shapes(dry):
            raise CannotCutError(f"what layer {number} is given depends on values of the layers before")


def _shapes(call: Call) -> list[Any]:
    return [(name, (value.shape, value.dtype) if isinstance(value, Tensor) else value) for name, value in _items(call)]


def _items(call: Call) -> Iterable[tuple[str, Any]]:
    """All that a layer is given beside features, one by one."""
    pending: list[tuple[str, Any]] = [*((f"argument {i}", v) for i, v in enumerate(call.args, 1)), *call.kwargs.items()]
    while pending:
        name, value = pending.pop(0)
        if type(value) in (tuple, list):
            pending = [*((f"{name}[{i}]", v) for i, v in enumerate(value)), *pending]
        elif type(value) is dict:
            pending = [*((f"{name}[{k!r}]", v) for k, v in value.items()), *pending]
        else:
            yield name, value


def _tensors(module: nn.Module) -> list[Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]


def _own(module: nn.Module) -> bool:
    return bool(module._parameters) or bool(module._buffers)


def _owners(model: nn.Module, layers: str) -> dict[int, list[str]]:
    """Parameter, by id → the paths of modules that hold it outside of the layers."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path != layers and not path.startswith(f"{layers}."):
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.setdefault(id(parameter), []).append(path)
    return found


def _topmost(paths: Iterable[str]) -> tuple[str, ...]:
    """Those that are in no other."""
    found = list(paths)
    return tuple(path for path in found if not any(path.startswith(f"{other}.") for other in found))


def _within(path: str, placed: set[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in placed)


def _newest(tensor: Tensor) -> int:
    return tensor.grad_fn._sequence_nr() if tensor.grad_fn is not None else -1


def _parameters_of(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)
