"""Latents of random numbers, to try and to measure a model without pictures."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.datasets import DataSplits, require_count
from hetpipe.diffusion.cached import CachedFolder, Entry, argument_of, as_tuples
from hetpipe.diffusion.folder import TransformerFolder
from hetpipe.diffusion.kinds import kind_of
from hetpipe.diffusion.latents import splits_of
from hetpipe.diffusion.noise import Noise
from hetpipe.files.messages import InputError, shown

NAME = "random_latents"
SIZES = "sizes"  # a key beside the names of tensors
MASK, IDS = "mask", "_ids"  # parts of names


@dataclass(frozen=True)
class RandomEntry(Entry):
    """A sample of normal numbers, drawn by its `seed`, or by that of all where they are `shared`; positions are zeros, and masks
    hide nothing."""

    seed: int = 0
    seed_of_all: int = 0
    shared: Collection[str] = ()

    def tensors(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Draw its tensors, in the order of their names."""
        return {name: self._drawn(name) for name in self.kinds if names is None or name in names}

    def _drawn(self, name: str) -> Tensor:
        shape = self.kinds[name][1]
        if MASK in name:
            return torch.ones(shape, dtype=torch.int64)
        if name.endswith(IDS):
            return torch.zeros(shape)
        seed = self.seed_of_all if argument_of(name) in self.shared else self.seed
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode())))


def random_latents(
    type: str,
    shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    samples: int = 64,
    guidance: float | None = None,
    test_fraction: float = 0.0,
    seed: int = 0,
) -> DataSplits:
    """Latents and embeddings of random numbers in the place of a folder of them (see `latents`).

    Args:
        type: of the transformer for which they are: a class of diffusers, `FluxTransformer2DModel`.
        shapes: of the tensors of a sample by name, as in `{latents: [64, 16], encoder_hidden_states: [16, 32]}`, and of whole
            numbers, as in `sizes: {height: 8}`; or a list of several such, for samples of several shapes.
        samples: how many, as many of each shape.
        guidance: of which the model is told, where it is.
        test_fraction: the part of the samples that do not train.
        seed: decides all numbers.
    """
    require_count("samples", samples, NAME)
    every = [shapes] if isinstance(shapes, Mapping) else shapes
    if not isinstance(every, list) or not every or not all(isinstance(each, Mapping) for each in every):
        raise InputError(
            f"{NAME}: shapes is {shown(shapes)}; expected a mapping, such as {{latents: [64, 16]}}, or a list of such"
        )
    kind = kind_of(type, None)
    folder = TransformerFolder.of_type(type, {}, kind.prediction)
    entries = [_entry(every[number % len(every)], number, seed, kind.alone) for number in range(samples)]
    cached = CachedFolder(entries, folder.arguments, kind.alone)
    return splits_of(cached, folder, Noise.of(folder, kind), guidance, test_fraction=test_fraction)


def _entry(shapes: Mapping[str, Any], number: int, seed: int, shared: Collection[str]) -> RandomEntry:
    kinds = dict[str, tuple[str, tuple[int, ...]]]()
    for name in sorted({*shapes} - {SIZES}):
        shape = shapes[name]
        if not isinstance(shape, list | tuple) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape
        ):
            raise InputError(f"{NAME}: the shape of {name!r} is {shown(shape)}; expected whole numbers, such as [64, 16]")
        kinds[name] = ("I64" if MASK in name else "F32", tuple(shape))
    said = shapes.get(SIZES, {})
    if not isinstance(said, Mapping):
        raise InputError(f"{NAME}: {SIZES} is {shown(said)}; expected whole numbers by name, such as {{height: 8}}")
    sizes = {name: as_tuples(said[name]) for name in sorted(said)}
    digest = hashlib.sha256(repr((kinds, sizes, seed, number)).encode()).hexdigest()
    own, of_all = zlib.crc32(digest.encode()), zlib.crc32(repr((kinds, seed)).encode())
    return RandomEntry(Path(f"sample {number}"), kinds, sizes, digest, own, of_all, shared)
