"""What is found out of the model and of the data: looked at in small, or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetpipe.building.content import Content, content_of
from hetpipe.building.data import Grouped
from hetpipe.building.datasets import DataSplits
from hetpipe.files.messages import InputError
from hetpipe.finetune.draft import DataFacts, ModelFacts
from hetpipe.hf.replay.build import configured
from hetpipe.hf.replay.tiny import tiny
from hetpipe.language.samples import Packed, Padded
from hetpipe.layers.trials.apart import refuse_mixing, switch_of


def model_facts(model: Mapping[str, Any]) -> ModelFacts:
    """Of a job's section `model`; nothing of others than `causal_lm`. InputError where there is no such model."""
    if model.get("name") != "causal_lm":
        return ModelFacts()
    config = dict(model.get("args") or {})
    taken = [config.pop(key, None) for key in ("weights", "type", "attention", "trust_remote_code")]
    for key in ("extras", "labels"):
        config.pop(key, None)
    weights, kind, attention, trusted = taken
    found = configured(weights, kind, attention, trusted, config)
    most = getattr(found.config.get_text_config(), "max_position_embeddings", None)
    try:
        refuse_mixing(found.model, tiny(found.model, found.config))
        apart = True
    except InputError:  # that it does not, or that no small one runs: of which the run itself says more
        apart = False
    limit = switch_of(found.config)
    return ModelFacts(most if isinstance(most, int) and most > 0 else None, apart, limit.value if limit is not None else None)


def data_facts(splits: DataSplits) -> DataFacts:
    """Describe data that were read as they are, one sample in a row."""
    train: Any = splits.train
    test: Any = splits.test
    held = len(test) if test is not None else 0
    if isinstance(train, Grouped):
        return DataFacts(len(train), held, groups=train.groups.unique(return_counts=True)[1].tolist())  # type: ignore[arg-type]
    if not isinstance(train, Padded):
        windows = getattr(train, "context", None)
        tokens = len(train) * windows if isinstance(windows, int) else None
        return DataFacts(len(train), held, tokens, tokens, windows)
    longest = max(int(part.lengths.max()) for part in (train, test) if isinstance(part, Padded))
    own = train.sequences
    learned = int(own.looks.learned.sum())
    return DataFacts(len(train), held, int(own.lengths.sum()), learned, longest, own.lengths.tolist())


def data_content(splits: DataSplits, args: Mapping[str, Any]) -> Content:
    """What is in these data, in rows if the arguments of a job's data say so."""
    train: Any = splits.train
    if isinstance(train, Padded) and args.get("pack"):
        train = Packed(train.sequences, args["length"], train.pad)
    return content_of(train, splits.made_of)


def cards_here() -> bool:
    """Whether this machine has GPUs."""
    return torch.cuda.is_available()
