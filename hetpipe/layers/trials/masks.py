"""Targets that later batches may have and these have not: of which a part is masked, by 0, or by what a loss leaves out."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe.layers.model import Loss, Tensors, as_tuple, as_value
from hetpipe.layers.weights import eagerly

USUAL = -100  # what torch's cross-entropy ignores unless told otherwise; `Loss.skips_samples` knows it


class Masked(NamedTuple):
    """Targets, a part of which was set to this value. `labels`: whether they are whole numbers, of the first tensor. `likely`:
    whether a loss is expected to do with them."""

    value: float
    targets: Tensors
    labels: bool
    likely: bool


def masked(loss: Loss, targets: Tensors, seen: SeenTargets | None) -> Iterator[Masked]:
    """The same targets, but for a part of the second half of the rows. That is 0 in each tensor that could be a mask (of zeros
    and ones only), and in labels of several positions, of which 0 may be one that a loss leaves out. In the first tensor it is
    also whatever else the loss may leave out, if it was `seen`."""
    parts = as_tuple(targets)
    for place, tensor in enumerate(parts):
        if tensor.is_complex() or tensor.numel() < 2:
            continue
        labels = tensor.ndim > 1 and not tensor.is_floating_point() and bool((tensor >= 0).all())
        if labels or bool(((tensor == 0) | (tensor == 1)).all()):
            yield Masked(0, _with_part(parts, place, 0), labels and place == 0, likely=True)
    if seen is not None and not seen.unchecked:
        for value in _left_out(loss, parts[0], seen.ignored):
            yield Masked(value, _with_part(parts, 0, value), not parts[0].is_floating_point(), likely=False)


def _with_part(parts: tuple[Tensor, ...], place: int, value: float) -> Tensors:
    changed = parts[place].clone()
    later = changed[len(changed) // 2 :].view(len(changed) - len(changed) // 2, -1)
    (later.T if later.shape[1] > 1 else later)[1::2] = value
    return as_value([*parts[:place], changed, *parts[place + 1 :]])


def _left_out(loss: Loss, first: Tensor, ignored: Collection[int]) -> list[float]:
    """What may mark a target that does not count. Where a function weighs targets, its user has said which."""
    if callable(loss.weight) or first.dtype == torch.bool or first.is_complex():
        return []
    if first.is_floating_point():
        return [-1.0, float("nan")] if loss.weight == "samples" else []
    own = {value for value in ignored if value != USUAL}
    found = {*own, loss.ignore_index} if loss.weight == "tokens" else {*own, -1} - {loss.ignore_index}
    kind = torch.iinfo(first.dtype)
    return [value for value in sorted(found) if kind.min <= value <= kind.max and not bool((first == value).any())]


class SeenTargets(TorchDispatchMode):
    """What is seen of a loss that runs in here: which labels it ignores; and whether it takes labels `unchecked`, so that a wrong
    one reads beside its memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored, self.unchecked = set[int](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.unchecked |= "ctc_loss" in name
        for place, argument in enumerate(func._schema.arguments if name.startswith("nll_loss") else ()):
            if argument.name == "ignore_index":
                self.ignored.add(int(args[place] if place < len(args) else (kwargs or {}).get(argument.name, USUAL)))
        return func(*args, **(kwargs or {}))


def seen(loss: Loss, output: Tensors, targets: Tensors) -> SeenTargets | None:
    """What a run of the loss shows, and what it says of itself: an `ignore_index` among attributes and arguments. None if it does
    not run so."""
    found = SeenTargets()
    try:
        with eagerly(), found:
            loss.function(*_copies(output, targets)[1:])
    except Exception:  # of a loss that has modes of its own, say
        return None
    function: Any = loss.function
    said = []
    while isinstance(function, partial):
        said.append(function.keywords.get("ignore_index"))
        function = function.func
    owner = getattr(function, "__self__", function)
    said += [getattr(m, "ignore_index", None) for m in (owner.modules() if isinstance(owner, nn.Module) else (owner,))]
    try:
        arguments = inspect.signature(function).parameters
        said += [arguments["ignore_index"].default] if "ignore_index" in arguments else []
    except (TypeError, ValueError):  # of a function in C
        pass
    found.ignored |= {value for value in said if isinstance(value, int) and not isinstance(value, bool)}
    return found


def trains(loss: Loss, output: Tensors, targets: Tensors) -> bool:
    """Whether these targets give a finite loss with finite gradients that are not all zero: others are none of its targets."""
    leaves, *given = _copies(output, targets)
    wanted = [t for t in as_tuple(leaves) if t.requires_grad]
    try:
        value = loss.function(*given)
        if not wanted or not bool(value.isfinite()):
            return False
        found = [g for g in torch.autograd.grad(value, wanted, allow_unused=True) if g is not None]
    except Exception:  # whatever it says of targets that are none
        return False
    return all(bool(g.isfinite().all()) for g in found) and any(bool(g.any()) for g in found)


def _copies(output: Tensors, targets: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """(outputs that are leaves, such as a loss may overwrite, and targets)."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in as_tuple(output)]
    return as_value(leaves), as_value([t.clone() for t in leaves]), as_value([t.clone() for t in as_tuple(targets)])
