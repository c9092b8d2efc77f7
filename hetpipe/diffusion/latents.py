"""Cached latents as the data of a job: each sample with noise of its own, and what the model is to predict of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from hetpipe.building.datasets import Called, DataSplits, held_out
from hetpipe.diffusion.cached import LATENTS, CachedFolder, Entry, argument_of
from hetpipe.diffusion.folder import PART, TransformerFolder
from hetpipe.diffusion.kinds import kind_of
from hetpipe.diffusion.noise import ALL, Noise
from hetpipe.files.messages import InputError

GUIDANCE = "guidance"
Inputs = tuple[Tensor, ...]


class Latents(Dataset[tuple[Inputs, Inputs]]):
    """Samples of a folder. Inputs are what a transformer is called with, in the order of `called`; targets are what it is to
    predict, and its weight []. Those of a batch are of one shape (see `data.Grouped`)."""

    def __init__(
        self, folder: CachedFolder, numbers: Tensor, noise: Noise, guidance: float | None = None, dropped: float = 0.0
    ) -> None:
        """`numbers`: of the folder's samples, int64 [n]; `guidance`: what the model is told of it; `dropped`: the part of
        captions that are replaced by empty ones."""
        self.folder, self.numbers, self.noise = folder, numbers, noise
        self.guidance, self.dropped = guidance, dropped
        self.groups = torch.tensor(folder.sizes_of_groups)[numbers]

    @property
    def lengths(self) -> Tensor:
        """The groups."""
        return self.groups

    @property
    def sizes(self) -> Sequence[int]:
        """The groups, the largest last."""
        return self.groups.unique().tolist()  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.numbers)

    def digests(self) -> tuple[str, str | None]:
        """Return digests of all samples in their order, and in any (see `content.Digested`)."""
        own = [self.folder.entries[number].digest for number in self.numbers.tolist()]
        if self.dropped and self.folder.empty is not None:
            own.append(self.folder.empty.digest)
        ordered, unordered = (hashlib.sha256("".join(each).encode()).hexdigest()[:32] for each in (own, sorted(own)))
        return ordered, unordered

    def source(self, index: int) -> str:
        """The file of a sample."""
        return str(self.folder.entries[int(self.numbers[index])].file)

    def __getitem__(self, index: int) -> tuple[Inputs, Inputs]:
        entry = self.folder.entries[int(self.numbers[index])]
        tensors = entry.tensors()
        if self.dropped and float(torch.rand(())) < self.dropped:
            assert self.folder.empty is not None
            tensors |= self.folder.empty.tensors()
        drawn = self.noise.draw(tensors.pop(LATENTS))
        named = self._named(drawn.mixed, drawn.time, tensors)
        sizes = [torch.empty((0, number), dtype=torch.uint8) for number in tree_leaves(list(entry.sizes.values()))]
        return (*named.values(), *sizes), (drawn.wanted, drawn.weight)

    def _named(self, mixed: Tensor, time: Tensor, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kind = self.noise.kind
        first = {kind.latents_name: mixed, kind.time_name: time}
        if self.guidance is not None:
            first[GUIDANCE] = torch.tensor(self.guidance * kind.guidance)
        return {**first, **others}

    def padded(self, samples: Sequence[tuple[Inputs, Inputs]], size: int) -> tuple[Inputs, Inputs]:
        """Samples of one group, stacked."""
        inputs, targets = zip(*samples, strict=True)
        return tuple(map(torch.stack, zip(*inputs, strict=True))), tuple(map(torch.stack, zip(*targets, strict=True)))

    def called(self) -> Called:
        """How a transformer is called with a batch of one sample, of the largest shape."""
        entry: Entry = self.folder.entries[int(self.numbers[int(self.groups.argmax())])]
        kind, tensors = self.noise.kind, entry.tensors()
        latents = tensors.pop(LATENTS)
        time = torch.zeros((), dtype=torch.float32 if self.noise.signal is None else torch.int64)

        named = dict[str, Any]()
        for name, tensor in self._named(latents, time, tensors).items():
            argument = argument_of(name)
            own = tensor if argument in kind.alone else [tensor] if argument in kind.listed else tensor[None]
            named[argument] = (*named.get(argument, ()), own) if argument != name else own
        alone = tuple(name for name in kind.alone if name in named)
        return Called(values={**named, **entry.sizes}, alone=alone, sizes=tuple(entry.sizes))


def latents(
    folder: str,
    weights: str,
    part: str = PART,
    times: str = "logit_normal",
    mean: float = 0.0,
    deviation: float = 1.0,
    sigmas: Sequence[float] = ALL,
    shift: float | None = None,
    weighting: str = "none",
    guidance: float | None = None,
    drop_captions: float = 0.0,
    test_fraction: float = 0.0,
    kind: Mapping[str, Any] | None = None,
) -> DataSplits:
    """Latents and embeddings of texts, which a VAE and text encoders have made before (see `cached`), for flow matching, or to
    predict noise or v, as the scheduler beside the transformer says.

    Args:
        folder: of safetensors files, one a sample.
        weights: the transformer's folder, or its pipeline's, or a pipeline's name on Hugging Face: how it is to be called.
        part: which transformer of the pipeline.
        times: how much noise: uniform, or logit_normal, a sigmoid of normal numbers.
        mean: of these numbers.
        deviation: of these numbers.
        sigmas: the least and the most noise, from 0 to 1; of a pipeline with two transformers, each has a part.
        shift: by how much large noise is drawn more often; by default as the scheduler says.
        weighting: of a sample by its noise: none, sigma_sqrt or cosmap, or min_snr for models that predict noise or v.
        guidance: the strength of guidance of which distilled models are told; 1 by default, where the model takes it.
        drop_captions: the part of captions that are replaced by those of empty.safetensors.
        test_fraction: the part of the samples that do not train.
        kind: keys of how the transformer is called, where it is of a type that is not known.
    """
    found = TransformerFolder.of(weights, part)
    own = kind_of(found.type_name, kind)
    for what, value in (("drop_captions", drop_captions), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise InputError(f"{what} is {value}, and must be from 0 to below 1")
    drawn: dict[str, Any] = {"times": times, "mean": mean, "deviation": deviation, "sigmas": sigmas, "shift": shift}
    noise = Noise.of(found, own, weighting=weighting, **drawn)
    cached = CachedFolder.read(folder, found.arguments, own.alone)
    if drop_captions and cached.empty is None:
        raise InputError(
            f"drop_captions is {drop_captions}, and {folder} has no empty.safetensors with the embeddings of no text"
        )
    return splits_of(cached, found, noise, _guidance(found, guidance), drop_captions, test_fraction)


def splits_of(
    cached: CachedFolder,
    folder: TransformerFolder,
    noise: Noise,
    guidance: float | None,
    dropped: float = 0.0,
    test_fraction: float = 0.0,
) -> DataSplits:
    """Samples for a transformer, with noise, some of them held out (see `Latents`)."""
    every = torch.arange(len(cached.entries))
    apart = held_out(len(every), test_fraction)
    train = Latents(cached, every[~apart], noise, guidance, dropped)
    test = Latents(cached, every[apart], noise, guidance) if apart.any() else None
    called = replace(train.called(), made_for=folder.type_name)
    return DataSplits(train=train, test=test, names=_names(called), called=called)  # type: ignore[arg-type]


def _guidance(folder: TransformerFolder, said: float | None) -> float | None:
    """What the model is told; None where it is told nothing."""
    if GUIDANCE not in folder.arguments or not folder.config.get("guidance_embeds", False):
        if said is not None:
            raise InputError(f"guidance is {said}, and this {folder.type_name} is not told of it (guidance_embeds). Leave it out")
        return None
    return 1.0 if said is None else said


def _names(called: Called) -> tuple[str, ...]:
    several = {name for name, value in called.values.items() if name in called.sizes or isinstance(value, tuple)}
    return tuple(name for name, value in called.values.items() for _ in (tree_leaves(value) if name in several else [0]))
