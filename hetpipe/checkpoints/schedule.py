"""A learning-rate schedule in a checkpoint: its own state in plain values, and what it has made of the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from hetpipe.files.formats import Number, Strict
from hetpipe.files.messages import shown

SCHEDULED = ("lr", "momentum", "betas")  # what a schedule changes in an optimizer's parameter groups
COUNTERS = ("last_epoch", "_step_count")
PARTS = "_schedulers"  # of a schedule that is made of several
Fraction = Annotated[Number, Field(ge=0, le=1)]


class Scheduled(Strict):
    """What a schedule changes in one of the optimizer's groups of parameters."""

    lr: Annotated[Number, Field(ge=0)] | None = None
    momentum: Annotated[Number, Field(ge=0)] | None = None
    betas: tuple[Fraction, Fraction] | None = None


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a schedule's state that JSON can hold, nested schedules included. What is left out are functions, and settings
    that a schedule gets again when it is built."""
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if key == PARTS:
            kept[key] = [plain(inner) for inner in value]
        elif _is_plain(value):
            kept[key] = value
    return kept


def unfit(state: Mapping[str, Any], where: str = "") -> list[str]:
    """The values that change while a schedule runs, as far as one can tell, and that JSON cannot hold."""
    found = []
    for key, value in state.items():
        if key == PARTS:
            found += [fault for i, inner in enumerate(value) for fault in unfit(inner, f"{where}{key}.{i}.")]
        elif not (_is_plain(value) or callable(value) or isinstance(value, Counter)):  # MultiStepLR counts its milestones
            found.append(f"{where}{key}, a {type(value).__name__}")
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict) and not isinstance(value, Counter):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, int | float | str | None)


def scheduled(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a schedule changes in the optimizer's groups, as it is."""
    return [{key: _number(group[key]) for key in SCHEDULED if key in group} for group in optimizer.param_groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def state_differences(saved: Any, own: Any, where: str) -> list[str]:
    """The places where what was saved is of another kind than what the schedule itself has there."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        faults = [f"{where}.{key}: not there" for key in own if key not in saved]
        faults += [f"{where}: unknown key {shown(key)}" for key in saved if key not in own]
        return faults + [f for key in own if key in saved for f in state_differences(saved[key], own[key], f"{where}.{key}")]
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        if len(own) != len(saved):
            return [f"{where}: {len(saved)} values, the schedule has {len(own)}"]
        pairs = enumerate(zip(saved, own, strict=True))
        return [f for i, (there, here) in pairs for f in state_differences(there, here, f"{where}.{i}")]
    wanted = "count" if where.rpartition(".")[2] in COUNTERS else _kind(own)
    fits = _counts(saved) if wanted == "count" else _kind(saved) in (wanted, _OR_ELSE.get(wanted))
    return [] if own is None or fits else [f"{where}: {shown(saved)} is no {wanted}"]


_OR_ELSE = {"finite number": "number"}  # the best loss so far is infinite before the first


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1  # -1 before the first step


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number" if math.isfinite(value) else "finite number"
    known: dict[type, str] = {str: "text", list: "list", dict: "mapping"}
    return known.get(type(value), type(value).__name__)
