"""One run of a causal language model's own forward, and what was seen in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hetpipe.files.messages import InputError, one_line
from hetpipe.hf.replay.skeleton import Call, Form, as_run, features_of, options, own_tensors

TRACED_TOKENS = 8  # tokens where there are values: a model may have places for few


class CannotCutError(InputError):
    """The model is no chain of layers, and why."""


class Trace:
    """One forward. CannotCutError says why a model is no chain. `form`: of what its layers return. If that is features alone,
    they are not run: what happens within them, which may ask for values, or take long, changes nothing of what they are given."""

    def __init__(self, model: nn.Module, layers: str, form: Form | None = None) -> None:
        self.model, self.path, self.form = model, layers, form
        self.layers = list(model.get_submodule(layers).children())
        self.calls: list[Call] = []
        self.outputs: list[Tensor] = []
        self.forms = set[Form]()
        self.order: list[int] = []
        self.phase = "before"
        self.called: dict[str, dict[str, Any]] = {"before": {}, "after": {}}  # path → what it gave
        self.first: Tensor | None = None
        self.first_node = 0
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.embedding = _embedding(model)

    def run(self, given: Mapping[str, Tensor]) -> Tensor:
        """Logits."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        handles = [
            module.register_forward_hook(self._note(path))
            for path, module in self.model.named_modules()
            if id(module) not in inside and not self.holds_layers(path) and (own_tensors(module) or path == self.embedding)
        ]
        for number, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave(number)))
            if self.form is not None and self.form.alone:
                layer.forward = partial(_left_out, self.form)
        before = {name: p._version for name, p in self.model.named_parameters()}
        try:
            logits = logits_of(self.model, self.takes, given)
        finally:
            for handle in handles:
                handle.remove()
            for layer in self.layers:
                layer.__dict__.pop("forward", None)
        for name, parameter in self.model.named_parameters():
            if parameter._version != before.get(name):
                raise CannotCutError(f"its forward changes the values of {name!r}")
        return logits

    def holds_layers(self, path: str) -> bool:
        """Whether a module, by its path, is one in which the layers are."""
        return path == "" or self.path == path or self.path.startswith(f"{path}.")

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
            try:
                form = Form.of(output)
            except LookupError:
                raise CannotCutError(f"layer {number} returns a {type(output).__name__}") from None
            self.forms.add(form)
            leaf = features_of(output).detach().requires_grad_()
            self.outputs.append(leaf)
            self.phase = "after" if number == len(self.layers) - 1 else "between"
            return leaf if isinstance(output, Tensor) else form.kind([leaf, *output[1:]])

        return leave


def _left_out(form: Form, *args: Any, **kwargs: Any) -> Any:
    return form.holding(Call.of(args, kwargs).hidden)


def traced(model: nn.Module, given: Mapping[str, Tensor], form: Form | None = None) -> tuple[Trace, Tensor]:
    """The run, and its logits. The layers are the list with most parameters of those that are called, and are in no other."""
    lists = dict[str, int]()
    for path, module in model.named_modules():
        if hasattr(module, "config"):
            as_run(module.config)
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{other}.") for other in lists):
            lists[path] = sum(p.numel() for p in module.parameters())
    for path in sorted(lists, key=lambda path: -lists[path]):
        trace = Trace(model, path, form)
        logits = trace.run(given)
        if trace.order:
            return trace, logits
    raise CannotCutError("it has no list of layers through which tokens come")


def form_of(model: nn.Module) -> Form:
    """Of what the layers of a small model, with values, return. CannotCutError where there is no such form."""
    with torch.random.fork_rng(devices=[]):
        trace, _ = traced(model.eval(), {"input_ids": torch.zeros(1, TRACED_TOKENS, dtype=torch.long)})
    if len({(form.kind, form.items) for form in trace.forms}) > 1:
        raise CannotCutError("its layers return tuples of several lengths")
    return min(trace.forms, key=lambda form: form.alone)


def logits_of(model: nn.Module, takes: frozenset[str], given: Mapping[str, Tensor]) -> Tensor:
    """Of a forward that takes these arguments."""
    with reasons():
        logits: Tensor = model(**given, **options(takes)).logits
    return logits


@contextmanager
def reasons() -> Iterator[None]:
    """Whatever is raised where a forward runs without values is a CannotCutError that says why."""
    try:
        yield
    except CannotCutError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise CannotCutError("its forward asks for values of tensors, and its layers are found by a run without values") from None
    except Exception as error:  # whatever transformers says
        raise CannotCutError(f"its forward does not run where its layers are left out: {one_line(error)}") from error


def _embedding(model: Any) -> str:
    found: nn.Module = model.get_input_embeddings()
    return str(next(path for path, module in model.named_modules() if module is found))


def _newest(tensor: Tensor) -> int:
    return tensor.grad_fn._sequence_nr() if tensor.grad_fn is not None else -1
