"""At which precisions each device type is measured: those that are asked for, or all that it can compute in.

Source: CUDA C++ Programming Guide, "Arithmetic Instructions" (products of float16 from compute capability 5.3 on, of bfloat16
from 8.0 on).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hetpipe.documents.cluster import Cluster, Emulate
from hetpipe.documents.number_types import TYPE_OF, Precision
from hetpipe.documents.precisions import PrecisionChoice, named
from hetpipe.files.messages import InputError, shown
from hetpipe.layers.model import Model
from hetpipe.layers.numbers import type_name
from hetpipe.processes.cards import Capability

FIRST_WITH: Mapping[Precision, Capability] = {"fp32": (0, 0), "fp16": (5, 3), "bf16": (8, 0)}
FAST_ON_CPUS: tuple[Precision, ...] = ("fp32", "bf16")  # products of fp16 take a hundred times as long there


class Able(NamedTuple):
    """In which precisions a device type can compute, in which of these it is measured unless it is said in which, and what it is,
    in words."""

    can: tuple[Precision, ...]
    unasked: tuple[Precision, ...]
    what: str


def able(device: torch.device, emulate: Emulate | None = None) -> Able:
    """What a device, of this process, can compute in."""
    if emulate is not None and emulate.precisions is not None:
        return Able(emulate.precisions, emulate.precisions, "the precisions of its slowdown in the cluster file")
    if device.type != "cuda":
        return Able(tuple(TYPE_OF), FAST_ON_CPUS, "a CPU")
    return card_able(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def card_able(name: str, capability: Capability) -> Able:
    """What a card can compute in.

    >>> card_able("Tesla T4", (7, 5))
    Able(can=('fp32', 'fp16'), unasked=('fp32', 'fp16'), what='a Tesla T4 of compute capability 7.5')
    """
    can = tuple(precision for precision, first in FIRST_WITH.items() if capability >= first)
    return Able(can, can, f"a {name} of compute capability {capability[0]}.{capability[1]}")


def chosen_precisions(
    choice: PrecisionChoice | None, cluster: Cluster, found: Mapping[str, Able]
) -> dict[str, tuple[Precision | None, ...]]:
    """At which precisions each device type of `found` is measured: at the one that is asked for (fp32 where only others are
    named), or with "auto" at all; None stands for that in which the model was built. InputError if a type cannot compute in its.
    """
    if choice is None:
        for kind in found:
            if (emulate := cluster.device_types[kind].emulate) is not None:
                emulate.slowdown_at(None, kind)
        return dict.fromkeys(found, (None,))
    if choice == "auto":
        return {kind: of.unasked for kind, of in found.items()}
    asked = named(choice, cluster)
    wanted: dict[str, Precision] = {kind: asked.get(kind, "fp32") for kind in found}
    faults = [
        f"device type {kind!r} cannot compute in {wanted[kind]}: it is {of.what}, which has {', '.join(of.can)}"
        if cluster.device_types[kind].emulate is None
        else f"device type {kind!r} cannot compute in {wanted[kind]}: it has {', '.join(of.can)}, {of.what}"
        for kind, of in found.items()
        if wanted[kind] not in of.can
    ]
    if faults:
        raise InputError("; ".join(faults))
    return {kind: (precision,) for kind, precision in wanted.items()}


def check_parameters(model: Model, choice: PrecisionChoice | None) -> None:
    """InputError where a precision is asked for, and the model's parameters are of another type than float32 (those that do not
    train may have fewer bits)."""
    floating = [p for p in model.layers.parameters() if p.is_floating_point()]
    others = {p.dtype for p in floating if p.requires_grad or p.dtype.itemsize > torch.float32.itemsize} - {torch.float32}
    if choice is not None and others:
        raise InputError(
            f"precision is {shown(choice)}, which needs parameters in float32, but parameters of this model are "
            f"{type_name(others.pop())}. Leave precision out, or train with train.dtype float32"
        )
