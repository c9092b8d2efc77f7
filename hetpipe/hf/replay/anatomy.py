"""What belongs where in a causal language model, by runs of its own forward without values; or why it cannot be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from hetpipe.hf.replay.skeleton import Anatomy, Call, Form, own_tensors, skeleton_of
from hetpipe.hf.replay.trace import CannotCutError, Trace, logits_of, reasons, traced
from hetpipe.layers.untouched.fakes import fake_tensors

EXTRAS = ("attention_mask", "position_ids")

Shapes = Mapping[str, tuple[int | str, ...]]


def anatomy_of(make: Callable[[], nn.Module], form: Form, extras: Sequence[str] = EXTRAS) -> Anatomy:
    """Of a model, which `make` makes, with each of the extras and without; `form` is of what its layers return. CannotCutError
    says why there is none."""
    with fake_tensors():
        with no_init_weights():  # values are not needed, and some ways to draw them ask for values
            model = make().eval()
        _choose_experts(model)
        found = None
        samples, tokens = telling_sizes(model)
        known = _extras(samples, tokens)
        for more in ({}, *({name: known[name]} for name in extras)):
            given = {"input_ids": torch.zeros(samples, tokens, dtype=torch.long), **more}
            trace, logits = traced(model, given, form)
            own = Reading(trace, given, logits).anatomy()
            if found is not None and replace(own, absent=found.absent) != found:
                raise CannotCutError(f"it computes in another way with {' and '.join(more)}")
            found = own if found is None else replace(own, absent=_larger(found.absent, own.absent))
            _check_dry(model, own, trace, more)
        assert found is not None
        _check_idle(model, found)
    return found


class Reading:
    """What follows from a run."""

    def __init__(self, trace: Trace, given: Mapping[str, Tensor], logits: Tensor) -> None:
        self.trace, self.model, self.given, self.logits = trace, trace.model, given, logits
        self.owners = _owners(self.model, trace.path)

    def anatomy(self) -> Anatomy:
        """CannotCutError says why there is none."""
        trace = self.trace
        self._check_calls()
        embed, head = dict.fromkeys(trace.called["before"]), dict.fromkeys(trace.called["after"])
        before, _ = self._ancestors([trace.first])
        after, late = self._ancestors([self.logits])
        if not late:
            raise CannotCutError("what it computes after the last layer depends on more than that layer gives")
        for found, into in ((before, embed), (after, head)):
            for parameter in found:
                paths = self.owners.get(id(parameter))
                if paths is None:
                    raise CannotCutError("a parameter of a layer is used outside of it")
                if not any(path in into for path in paths):
                    into[paths[0]] = None
        shared, absent = self._before()
        embedded = trace.called["before"].get(trace.embedding)
        if not isinstance(embedded, Tensor) or "inputs_embeds" not in trace.takes:
            raise CannotCutError("its forward takes no inputs_embeds")
        for path in [*embed, *head]:
            if trace.holds_layers(path):
                raise CannotCutError(f"{path or 'the model'!r} holds parameters of its own beside the layers")
        assert trace.form is not None
        return Anatomy(
            layers=trace.path,
            form=trace.form,
            embed=_topmost(embed),
            head=_topmost(head),
            shared=_topmost(shared),
            tables=self._tables(),
            idle=self._idle({*embed, *head}),
            absent=absent,
            features=embedded.shape[-1],
            takes=trace.takes,
            words=self.logits.shape[-1],
            logits=self._gives_logits(),
        )

    def _gives_logits(self) -> str | None:
        """The linear layer whose very output they are."""
        found = [path for path, output in self.trace.called["after"].items() if output is self.logits]
        return next((path for path in found if type(self.model.get_submodule(path)) is nn.Linear), None)

    def _before(self) -> tuple[list[str], dict[str, tuple[int | str, ...]]]:
        """Modules that run before the first layer: without trained parameters; and with them, with the shapes that they give."""
        shared, absent = list[str](), dict[str, tuple[int | str, ...]]()
        samples, tokens = self.given["input_ids"].shape
        for path, output in self.trace.called["before"].items():
            module = self.model.get_submodule(path)
            if not any(p.requires_grad for p in module.parameters()):
                shared.append(path)
            elif isinstance(output, Tensor):
                absent[path] = tuple({samples: "b", tokens: "t"}.get(n, n) for n in output.shape)
            else:
                raise CannotCutError(f"{path!r} gives a {type(output).__name__} before the first layer")
        return shared, {path: absent[path] for path in _topmost(absent)}

    def _check_calls(self) -> None:
        trace = self.trace
        if len(trace.order) != len(trace.layers):
            raise CannotCutError("not all of its layers are called")
        if "between" in trace.called:
            raise CannotCutError(f"{next(iter(trace.called['between']))!r} is called between layers")
        leaves = {id(output) for output in trace.outputs}
        tokens = self.given["input_ids"]
        for number, call in enumerate(trace.calls):
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
        trace = self.trace
        leaves = {id(output): number for number, output in enumerate(trace.outputs)}
        found, late = dict[int, Tensor](), True
        pending, seen = [t.grad_fn for t in tensors if t is not None and t.grad_fn is not None], set[Any]()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is None:
                late = late and node._sequence_nr() > trace.first_node
            elif id(variable) in leaves:
                late = late and leaves[id(variable)] == len(trace.outputs) - 1
            else:
                found[id(variable)] = variable
            pending += [parent for parent, _ in node.next_functions if parent is not None]
        return list(found.values()), late

    def _tables(self) -> tuple[str, ...]:
        """Tensors that are not trained, of modules that hold the layers."""
        return tuple(
            f"{path}.{name}" if path else name
            for path, module in self.model.named_modules()
            if self.trace.holds_layers(path)
            for name, tensor in own_tensors(module).items()
            if not tensor.requires_grad
        )

    def _idle(self, placed: set[str]) -> tuple[str, ...]:
        """Modules whose parameters are in no layer and neither before nor after them, and which are not called: as many in one
        as there are."""
        homeless = {
            path
            for parameter in self.model.parameters()
            for paths in [self.owners.get(id(parameter), [])]
            if not any(_within(path, placed) or (self.trace.holds_layers(path) and not parameter.requires_grad) for path in paths)
            for path in paths
        }
        for path in homeless:
            if self.trace.holds_layers(path):
                raise CannotCutError(f"a parameter of {path or 'the model'!r} is in no layer, and neither before nor after them")
        return _topmost(sorted({self._whole(path, homeless) for path in homeless}))

    def _whole(self, path: str, homeless: set[str]) -> str:
        """The greatest module around this one that holds nothing else."""
        above = path.rpartition(".")[0]
        if self.trace.holds_layers(above):
            return path
        owners = {p for paths in self.owners.values() for p in paths if _within(p, {above})}
        return self._whole(above, homeless) if owners <= homeless else path


def _choose_experts(model: Any) -> None:
    """An implementation of experts whose shapes do not depend on values, where there is a choice (a grouped product wants types
    that tensors without values do not have)."""
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # a model without experts of that kind
            model.set_experts_implementation("batched_mm")


def _larger(one: Shapes, two: Shapes) -> Shapes:
    """Each dimension as large as in either: what has no samples of its own without positions may have them with."""
    if one.keys() != two.keys():
        raise CannotCutError("it calls other modules before the first layer with positions or a mask")
    return {path: tuple(n if m == 1 else m for m, n in zip(one[path], two[path], strict=True)) for path in one}


def _extras(samples: int, tokens: int) -> dict[str, Tensor]:
    return {
        "attention_mask": torch.ones(samples, tokens, dtype=torch.bool),
        "position_ids": torch.arange(tokens).expand(samples, -1),
    }


def telling_sizes(model: nn.Module) -> tuple[int, int]:
    """Samples and tokens of the run, by which those of a batch are told in shapes: sizes that no tensor of the model has."""
    own = {size for tensor in [*model.parameters(), *model.buffers()] for size in tensor.shape}
    tokens, samples = [size for size in range(37, 37 + len(own) + 2) if size not in own][:2]
    return samples, tokens


def _check_dry(model: nn.Module, anatomy: Anatomy, trace: Trace, extras: Mapping[str, Tensor]) -> None:
    """What layers are given must be what they are given where values are missing before the first."""
    shared = {path: model.get_submodule(path) for path in anatomy.shared}
    assert trace.first is not None
    with reasons(), skeleton_of(model, anatomy).lent(shared, {}) as skeleton:
        calls = skeleton.calls(trace.first, extras)
    for number, (real, dry) in enumerate(zip(trace.calls, calls, strict=True)):
        if real.name != dry.name or _shapes(real) != _shapes(dry):
            raise CannotCutError(f"what layer {number} is given depends on values of the layers before")


def _check_idle(model: nn.Module, anatomy: Anatomy) -> None:
    """What no token comes through must be so in training, too."""
    if not anatomy.idle:
        return
    called = list[str]()
    for path in anatomy.idle:
        for module in filter(own_tensors, model.get_submodule(path).modules()):
            module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
    logits_of(model.train(), anatomy.takes, {"input_ids": torch.zeros(*telling_sizes(model), dtype=torch.long)})
    if called:
        raise CannotCutError(f"{called[0]!r} is called in training only")


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
