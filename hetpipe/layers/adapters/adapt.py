"""`hetpipe.adapt`: adapters for a chain of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hetpipe.documents.sections.adapter import AdapterSection
from hetpipe.files.formats import validated
from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.low_rank import LowRank
from hetpipe.layers.transforms import added_as, transformed


def adapted(layers: nn.Sequential, section: AdapterSection, seed: int) -> nn.Sequential:
    """The chain with adapters, of which every rank with this seed has the same."""
    return transformed(layers, [LowRank(section, layers, seed)])


def adapter_of(layers: Iterable[nn.Module]) -> AdapterSection | None:
    """As which adapters were added to layers; None where they have none."""
    return next((found for layer in layers if isinstance(found := added_as(layer), AdapterSection)), None)


def adapt(model: nn.Sequential, *, seed: int | None = None, **options: Any) -> nn.Sequential:
    """Freeze the model and add adapters that train, in place; the chain that comes back is for `hetpipe.wrap` or `hetpipe.auto`.

    Args:
        model: on the meta device, too, where its layers know their values.
        seed: of what adapters are at first, the same on all ranks; by default that of torch.manual_seed.
        options: the keys of a job's section `adapter`: r=16, alpha=32, dropout=0.0, targets="all-linear" or a list of names,
            rank_stabilized, use_dora, train_also=["embed", "head", "norms"], base="as-is", "nf4", "fp8" or "int8"; or
            weights="FOLDER", of peft, or its name on Hugging Face, whose adapters go on as they are there, beside the base of its
            choice.

    Its checkpoints hold what trains, and not the model, which must be built as before to go on.

    Raises:
        InputError: an option is wrong, the model has no module of a name, the folder is of another model, or peft, or for nf4
            bitsandbytes, is missing.
    """
    section = validated(AdapterSection, options, "hetpipe.adapt", "set of options")
    if section.base in ("bf16", "fp16"):
        raise InputError(
            f"hetpipe.adapt: base {section.base}: hold the model so before (parameter.data = parameter.data.to(…)), "
            "and write base='as-is'"
        )
    return adapted(model, section, torch.initial_seed() if seed is None else seed)
