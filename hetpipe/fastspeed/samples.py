"""Data sets whose samples hold a dict, as those of FastSpeed's BERT and T5 do, as samples of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from hetpipe.building.datasets import DataSplits
from hetpipe.files.messages import InputError
from hetpipe.planning import registry


class DictSamples(Dataset[Any]):
    """Samples (dict of tensors, label) as (tuple of tensors, label): `names` are the keys, in order."""

    def __init__(self, samples: Dataset[Any], names: Sequence[str]) -> None:
        self.samples, self.names = samples, tuple(names)

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Any]:
        inputs, label = self.samples[index]
        missing = [name for name in self.names if name not in inputs]
        if missing:
            raise InputError(f"sample {index} has no {', '.join(map(repr, missing))}; it has {', '.join(inputs)}")
        return tuple(inputs[name] for name in self.names), label


def dict_samples(target: str, input_names: Sequence[str], arguments: Mapping[str, Any] | None = None) -> DataSplits:
    """The data that `target` (`package.module:function`) returns for these keyword `arguments`, (training, test) samples or
    DataSplits, with the tensors of `input_names` taken out of each sample's dict."""
    found = registry.load_target(target)(**(arguments or {}))
    train, test = (found.train, found.test) if isinstance(found, DataSplits) else found
    return DataSplits(train=DictSamples(train, input_names), test=DictSamples(test, input_names) if test is not None else None)
