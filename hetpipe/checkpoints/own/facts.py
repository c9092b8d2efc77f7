"""What a loop of one's own depends on, as far as its engine and its optimizer know it: the loop goes on from a checkpoint with
what has changed since said."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from hetpipe.building.content import Content, content_of
from hetpipe.building.datasets import DataSplits
from hetpipe.checkpoints.origin.configured import CONFIG, config_of
from hetpipe.checkpoints.training_state import TrainerState
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.layers.transforms import uncompiled
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine

OPTIMIZER = "optimizer"


def loop_facts(engine: PlanEngine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Describe a loop in plain values, the same on every rank and under every plan: the optimizer and its arguments, the
    loss, the batch, the seed, what trains, and how the model's modules describe themselves (dropout, say)."""
    loss, layers = engine.loss, [uncompiled(layer) for layer in engine.layers]
    found: dict[str, Any] = {OPTIMIZER: type(optimizer).__name__}
    found |= {f"{OPTIMIZER}.{key}": _plain(value) for key, value in optimizer.defaults.items()}
    found |= {"loss": _name(loss.function), "loss_weight": _name(loss.weight), "ignore_index": loss.ignore_index}
    found |= {"global_batch": engine.plan.global_batch, "seed": engine.seed}
    found["precision"] = sorted(set((engine.plan.precision or {}).values()))
    named = ((f"{number}.{name}", p) for number, layer in enumerate(layers) for name, p in layer.named_parameters())
    found["what trains (a digest)"] = _digest(name for name, p in named if p.requires_grad)
    return found | config_of(layers) | {"the model's modules (a digest)": _digest(map(_described, layers))}


def facts_of_job(state: TrainerState) -> dict[str, Any]:
    """Return as much of `loop_facts` as the checkpoint of a job's run says."""
    job, train = state.job or {}, "train."
    found = {key.removeprefix(train): value for key, value in job.items() if key.startswith(f"{train}{OPTIMIZER}.")}
    found |= {key: job[f"{train}{key}"] for key in ("global_batch", "seed") if f"{train}{key}" in job}
    return found | {key: value for key, value in job.items() if key.startswith(CONFIG)} | {OPTIMIZER: state.optimizer}


def note_of_change(saved: Mapping[str, Any] | None, own: Mapping[str, Any], checkpoint: object) -> str | None:
    """What is to be said of a loop that has changed since; None: nothing, or nothing is known. InputError where the optimizer
    is of another class."""
    if saved is None:
        return None
    changed = [key for key in own if key in saved and saved[key] != own[key]]
    told = {key: f"{key} was {shown(saved[key])}, is {shown(own[key])}" for key in changed}
    if OPTIMIZER in told:
        raise InputError(
            f"checkpoint {checkpoint} was saved with another optimizer: {told[OPTIMIZER]}. Take the same optimizer, or name "
            "another folder to start anew"
        )
    if not told:
        return None
    lines = listed(list(told.values()))
    return f"note: the loop has changed since {checkpoint} was saved. The run resumes with the new values:\n{lines}"


def content_in(data: object, world: World) -> Content | None:
    """Describe the data that a loop gives, a data set or DataSplits, as the main rank reads them; None where it gives none.
    InputError on every rank if they are no data set. Collective."""
    found = list[Content | None]()
    world.on_main(lambda: found.append(_content(data)))
    content: Content | None = world.first(found[0] if found else None)
    return content


def _content(data: object) -> Content | None:
    if data is None:
        return None
    train: Any = data.train if isinstance(data, DataSplits) else data
    if not (hasattr(train, "__len__") and hasattr(train, "__getitem__")) or len(train) == 0:
        raise InputError(f"data is a {type(data).__name__}. Give a map-style data set that has samples, or DataSplits")
    made_of = data.made_of if isinstance(data, DataSplits) else {}
    if not isinstance(train, Dataset):
        return content_of(train, made_of)  # a list, say, to which nothing refers weakly
    known: Content | None = _KNOWN.get(train)
    if known is None or known.samples != len(train):  # type: ignore[arg-type]
        _KNOWN[train] = known = content_of(train, made_of)
    return known


_KNOWN = WeakIdKeyDictionary()  # data set → its content: each checkpoint of a loop says it


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, int | float | str | None) else _name(value)


def _name(value: Any) -> str:
    """Name a function or an object, with the plain values that it was given."""
    if isinstance(value, str):
        return value
    if isinstance(value, partial):
        return f"{_name(value.func)}({_given(value.keywords)})"
    if (name := getattr(value, "__qualname__", None)) is not None:
        return str(name)
    own = vars(value) if hasattr(value, "__dict__") else {}
    return f"{type(value).__qualname__}({_given({key: own[key] for key in own if key != 'training' and key[0] != '_'})})"


def _given(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={shown(value)}" for key, value in values.items() if isinstance(value, int | float | str | None))


def _described(layer: nn.Module) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(layer))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
