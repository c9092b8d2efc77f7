"""What has to be known of the model and of the data before a job can be written: looked at in small, or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hetpipe.building.build import build_data
from hetpipe.building.language.apart import refuse_mixing
from hetpipe.building.language.samples import IGNORED, Packed, Padded, Sequences
from hetpipe.files.messages import InputError
from hetpipe.hf.replay.build import configured
from hetpipe.hf.replay.tiny import tiny
from hetpipe.spec.job import Job


class ModelFacts(NamedTuple):
    """Of a model: for how many tokens it has positions (None: any number, or not known), and whether it tells samples in a row
    apart."""

    positions: int | None = None
    apart: bool = False


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
    return ModelFacts(most if isinstance(most, int) and most > 0 else None, apart)


class DataFacts(NamedTuple):
    """Of the data: samples to train on and held out, tokens of the former, how many of them are learned, and the longest sample
    of all (None: not known). `sequences`: those to train on, where they are of different lengths."""

    train: int
    test: int
    tokens: int | None = None
    learned: int | None = None
    longest: int | None = None
    sequences: Sequences | None = None

    def rows(self, length: int | None) -> int:
        """How many samples the run sees in an epoch; packed into rows of this length, where there is one."""
        return self.train if length is None or self.sequences is None else len(Packed(self.sequences, length, 0))


def data_facts(job: Job) -> DataFacts:
    """Of a job's data, read as they are, one sample in a row. InputError where they cannot be used."""
    splits = build_data(job)
    train: Any = splits.train
    test: Any = splits.test
    held = len(test) if test is not None else 0
    if not isinstance(train, Padded):
        windows = getattr(train, "context", None)
        tokens = len(train) * windows if isinstance(windows, int) else None
        return DataFacts(len(train), held, tokens, tokens, windows)
    longest = max(int(part.lengths.max()) for part in (train, test) if isinstance(part, Padded))
    own = train.sequences
    return DataFacts(len(train), held, len(own.tokens), int((own.targets != IGNORED).sum()), longest, own)


def cards_here() -> bool:
    """Whether this machine has GPUs."""
    return torch.cuda.is_available()
