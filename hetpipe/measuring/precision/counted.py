"""What the layers of a model compute and keep, counted on tensors without values: no weights are needed, and no arithmetic is
done. Layers of one kind are counted once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hetpipe.documents.number_types import BYTES, NumberTypes, Precision
from hetpipe.documents.profiles.counted import CountedLayer, CountedModel
from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.model import Model, as_tuple, as_value, named_layers
from hetpipe.layers.numbers import StageTypes, computing, held_types
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.untouched.boundaries import Row, trace
from hetpipe.layers.untouched.fakes import looked_at
from hetpipe.layers.weights import eagerly
from hetpipe.measuring.precision.layer_bytes import kinds_of

CPU = torch.device("cpu")
ATEN = torch.ops.aten
ON_CPU = {  # attention's operations there, which torch does not count
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")


def counted(model: Model, source: str, samples: str) -> CountedModel:
    """The model at each precision, for samples of the shape of its inputs. `source`: where its sizes are from; `samples`: what a
    sample is, in words."""
    wide, half = _at(model, "fp32"), _at(model, "bf16")
    most = max(wide, key=lambda one: one.layer.forward)
    layers = {precision: tuple(one.layer for one in (wide if precision == "fp32" else half)) for precision in PRECISIONS}
    return CountedModel(
        name=model.name,
        source=source,
        samples=samples,
        tokens=most.rows,
        width=most.width,
        flops=most.layer.forward,
        input_bytes=_bytes(as_tuple(model.sample(1)[0])),
        layers=layers,
    )


class _Found(NamedTuple):
    """Of a layer by itself. `kept_inputs`: the numbers of tensors that enter it and are saved; `passed`: for each tensor that
    leaves it, the number of the one that entered and is the same, or None; `kept_outputs`: which of them it has saved."""

    layer: CountedLayer
    kept_inputs: frozenset[int]
    passed: tuple[int | None, ...]
    kept_outputs: tuple[bool, ...]
    rows: int
    width: int


def _at(model: Model, precision: Precision) -> list[_Found]:
    """All layers, computed at this precision. A tensor that several layers save is counted with the first of them."""
    types, kinds = NumberTypes.of("float32", precision), kinds_of(model)
    stages = [StageTypes(0, len(model.layers), types)]
    rows = trace(model.layers, model.sample(1)[0], CPU, stages=stages, kinds=kinds).rows
    known, found = dict[int, _Found](), list[_Found]()
    counted_before = [False] * len(rows[0])
    for index, kind in enumerate(kinds.first):
        if kind not in known:
            known[kind] = _counted_layer(model, index, types, rows[index])
        one = known[kind]
        entered = sum(rows[index][k].size_bytes for k in one.kept_inputs if not counted_before[k])
        now = [before or k in one.kept_inputs for k, before in enumerate(counted_before)]
        counted_before = [kept if at is None else now[at] for at, kept in zip(one.passed, one.kept_outputs, strict=True)]
        layer = one.layer._replace(name=named_layers(model.layers)[index][0], saved=one.layer.first_saved + entered)
        found.append(one._replace(layer=layer))
    return found


@dataclass
class _Seen:
    """What was seen while a layer ran."""

    own: set[int] = field(default_factory=set)  # storages of the layer's parameters and buffers
    casts: dict[int, int] = field(default_factory=dict)  # of the copies of parameters that train → their bytes
    saved: dict[int, Tensor] = field(default_factory=dict)
    rows: int = 0
    width: int = 0


def _counted_layer(model: Model, index: int, types: NumberTypes, row: Row) -> _Found:
    name, layer = named_layers(model.layers)[index]
    with looked_at(layer), eagerly():
        return _run(name, layer, types, row, model if index == len(model.layers) - 1 else None)  # no tensor outlives it


def _run(name: str, layer: nn.Module, types: NumberTypes, row: Row, whole: Model | None) -> _Found:
    """One layer, and behind it the loss of the `whole` model, where it is the last."""
    held = held_types(layer, types)
    fakes = {own: _fake(tensor, held[tensor]) for own, tensor in tensors_of(layer).items()}
    given = [spec.empty(CPU) for spec in row]
    seen = _Seen({_storage(fake) for fake in fakes.values()})
    forward, backward = (FlopCounterMode(display=False, custom_mapping=ON_CPU) for _ in range(2))
    hooks = saved_tensors_hooks(partial(_note_saved, seen), lambda tensor: tensor)
    with _rows_noted(layer, seen), hooks, computing(types, CPU), forward, _Casts(seen):
        outputs = as_tuple(functional_call(layer, fakes, (as_value(given),)))
        left = outputs
        if whole is not None:
            targets = as_value([torch.empty(t.shape, dtype=t.dtype) for t in as_tuple(whole.sample(1)[1])])
            outputs = (whole.loss.share(as_value(outputs), targets, 1.0),)
    with backward:
        _run_backward(outputs, [*given, *fakes.values()])
    entered = {_storage(t): k for k, t in enumerate(given)}
    saved = {at: t for at, t in seen.saved.items() if at not in seen.own and at not in seen.casts}
    parameters, made = [fakes[own] for own, _ in layer.named_parameters()], _made(layer, types)
    found = CountedLayer(
        name=name,
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops(),
        parameters=_bytes(parameters),
        trained=_bytes([p for p in parameters if p.requires_grad]),
        buffers=_bytes([fakes[own] for own, _ in layer.named_buffers()]),
        saved=0,
        first_saved=sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in entered),
        output=_bytes(left),
        cast=sum(seen.casts.values()),
        made=sum(made),
        largest_made=max(made, default=0),
    )
    return _Found(
        layer=found,
        kept_inputs=frozenset(entered[at] for at in saved if at in entered),
        passed=tuple(entered.get(_storage(t)) for t in outputs),
        kept_outputs=tuple(_storage(t) in saved for t in outputs),
        rows=seen.rows,
        width=seen.width,
    )


def _run_backward(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    ends = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
    wanted = [t for t in given if t.requires_grad]
    if ends and wanted:
        torch.autograd.grad(ends, wanted, [torch.ones_like(t) for t in ends], allow_unused=True)


def _made(layer: nn.Module, types: NumberTypes) -> list[int]:
    """Bytes of each matrix that is made of a quantised one."""
    number = BYTES[types.computed or "float32"]
    return [number * m.in_features * m.out_features for m in layer.modules() if isinstance(m, QuantisedLinear)]


@contextmanager
def _rows_noted(layer: nn.Module, seen: _Seen) -> Iterator[None]:
    """Meanwhile the most rows of a product are noted, and how wide they are."""

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found = (args[0].numel() // args[0].shape[-1], args[0].shape[-1])
        seen.rows, seen.width = max((seen.rows, seen.width), found)

    handles = [module.register_forward_pre_hook(note) for module in layer.modules() if isinstance(module, nn.Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Casts(TorchDispatchMode):
    """Notes the copies of parameters that train: autocast keeps them for a step, and not for a micro-batch."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ATEN._to_copy.default and args[0].requires_grad and _storage(args[0]) in self.seen.own:
            self.seen.casts[_storage(result)] = result.untyped_storage().nbytes()
            self.seen.saved[_storage(result)] = result  # so that no other storage gets its address
        return result


def _note_saved(seen: _Seen, tensor: Tensor) -> Tensor:
    """Note it; what a node keeps must not be its own output, which would keep the node for ever."""
    seen.saved.setdefault(_storage(tensor), tensor.detach())
    return tensor.detach()


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
