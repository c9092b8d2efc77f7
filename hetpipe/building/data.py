"""Which samples make up which step: seeded, resumable, each sample exactly once an epoch, split unequally.

Every rank computes the same indices from the same seed and takes its own part of them, so nothing is sent and nothing can
disagree; and what a data set draws for a sample, it draws under a seed of that sample's. The sizes of the parts are decided in
`hetpipe/planning/shares.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NotRequired, Protocol, Self, TypedDict, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hetpipe.files.messages import InputError, cut
from hetpipe.layers.untouched.randomness import Generators, drawing


class SamplerState(TypedDict):
    """Where an EpochSampler stands; plain numbers, fit for a checkpoint."""

    samples: int
    seed: int
    shuffle: bool
    epoch: int
    position: int
    chunk: NotRequired[int | None]  # where samples have groups


class Sampler(Protocol):
    """Global batches of sample numbers, and where they stand (see EpochSampler and `streams.sampler.StreamSampler`)."""

    def forever(self) -> Iterator[Tensor]:
        """Yield int64 [b] numbers without end."""
        ...

    def state_dict(self) -> Any:
        """Return plain values, fit for a checkpoint: among them a `seed` and, unless samples are never read again, an `epoch`."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continue where the state was saved. ValueError if it is of other data."""
        ...


class EpochSampler:
    """Global batches of sample indices, epoch by epoch.

    Iterating yields what is left of the current epoch as int64 [b] tensors, b = global_batch but for the last
    batch, which may be smaller and is not dropped; the next iteration is the next epoch. A batch counts as
    seen as soon as it is yielded, so a state saved after its step resumes with the batch after it.

    Where samples have groups, those of a batch are of one. An epoch is then a row of chunks, each of samples of one group and
    no larger than a global batch, in an order that is drawn.

    Attributes:
        epoch: epochs completed.
        position: samples of the current epoch already yielded. Since it counts samples, a run can resume with
            another global batch: no sample is seen twice in the epoch, and none is left out.
        chunk: the most samples of a chunk of the current epoch, whose order hangs on it: the global batch with which it began.
    """

    def __init__(
        self, samples: int, global_batch: int, *, seed: int = 0, shuffle: bool = True, groups: Tensor | None = None
    ) -> None:
        """`groups`: of which group each sample is, int64 [samples]; None: all are of one."""
        for name, value in dict(samples=samples, global_batch=global_batch).items():
            if value < 1:
                raise ValueError(f"sampler: {name} must be at least 1, got {value}")
        self.samples, self.global_batch, self.groups = samples, global_batch, groups
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self.position = 0
        self.chunk = global_batch

    @classmethod
    def of(
        cls, dataset: "MapDataset", global_batch: int, *, seed: int = 0, shuffle: bool = True, first: int | None = None
    ) -> Self:
        """Return one of a data set's samples, or of so many at its beginning."""
        count = len(dataset) if first is None else first  # type: ignore[arg-type]
        groups = dataset.groups[:count] if isinstance(dataset, Grouped) else None
        return cls(count, global_batch, seed=seed, shuffle=shuffle, groups=groups)

    @property
    def batches_per_epoch(self) -> int:
        """Steps of a whole epoch, those with fewer samples included."""
        sizes = [self.samples] if self.groups is None else self.groups.unique(return_counts=True)[1].tolist()
        return sum(-(-size // self.global_batch) for size in sizes)

    def __len__(self) -> int:
        """Batches left in this epoch; of the next one where this one is at its end."""
        if self.position == self.samples:
            return self.batches_per_epoch
        return sum(-(-len(chunk) // self.global_batch) for chunk in self._left())

    def order(self, epoch: int) -> Tensor:
        """The permutation of an epoch: int64 [samples]."""
        return torch.cat(self._chunks(epoch))

    def _chunks(self, epoch: int) -> list[Tensor]:
        """The samples of an epoch in their order, in pieces that batches do not reach across."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.samples, generator=generator) if self.shuffle else torch.arange(self.samples)
        if self.groups is None:
            return [order]
        own = self.groups[order]
        chunks = [part for group in own.unique() for part in order[own == group].split(self.chunk)]
        if not self.shuffle:
            return chunks
        return [chunks[number] for number in torch.randperm(len(chunks), generator=generator).tolist()]

    def _left(self) -> list[Tensor]:
        """What of the chunks of this epoch is behind the position."""
        chunks = self._chunks(self.epoch)
        ends = accumulate(map(len, chunks))
        return [chunk[max(0, len(chunk) - (end - self.position)) :] for chunk, end in zip(chunks, ends, strict=True)]

    def __iter__(self) -> Iterator[Tensor]:
        if self.position == self.samples:
            self._begin_next()
        for chunk in self._left():
            for at in range(0, len(chunk), self.global_batch):
                batch = chunk[at : at + self.global_batch]
                self.position += len(batch)
                yield batch
        self._begin_next()

    def _begin_next(self) -> None:
        self.epoch, self.position, self.chunk = self.epoch + 1, 0, self.global_batch

    def forever(self) -> Iterator[Tensor]:
        """Batches of this epoch, the next, and so on without end."""
        while True:
            yield from self

    def state_dict(self) -> SamplerState:
        """The state, for a checkpoint."""
        found = SamplerState(samples=self.samples, seed=self.seed, shuffle=self.shuffle, epoch=self.epoch, position=self.position)
        return found if self.groups is None else {**found, "chunk": self.chunk}

    def load_state_dict(self, state: SamplerState) -> None:
        """Continues where the state was saved, in the saved run's order: its seed is taken over too."""
        if state["samples"] != self.samples:
            raise ValueError(
                f"the checkpoint was saved over {state['samples']} samples, the data now has {self.samples}: "
                "resume on the same data, or start anew"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] <= self.samples:
            raise ValueError(
                f"the checkpoint stands at sample {state['position']} of epoch {state['epoch']}, "
                f"outside an epoch of {self.samples} samples"
            )
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        self.epoch, self.position = state["epoch"], state["position"]
        self.chunk = state.get("chunk") or self.global_batch


def replica_slices(batch: Tensor, shares: Sequence[int]) -> list[Tensor]:
    """Consecutive parts of the first dimension, one a replica: `shares[r]` samples for replica r, 0 allowed.

    Works on indices [b] as on samples [b, …], and on a replica's part with the sizes of its micro-batches.
    """
    if any(share < 0 for share in shares) or sum(shares) != len(batch):
        raise ValueError(
            f"shares {list(shares)} sum to {sum(shares)}, the batch has {len(batch)} samples: "
            "shares are not negative and sum to the batch"
        )
    return list(torch.split(batch, list(shares)))


class MapDataset(Protocol):
    """A map-style dataset; `__getitems__(indices)` is used where it has one."""

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Ragged(Protocol):
    """A map-style dataset whose samples are of different lengths, of which it knows how to make batches. A batch is padded to the
    least of its `sizes` that holds the longest sample of the whole global batch, so that all ranks know it without asking.

    Attributes:
        lengths: of the samples, int64 [n].
        sizes: to which batches are padded, rising; the last is at least the longest sample's length.
    """

    @property
    def lengths(self) -> Tensor: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def padded(self, samples: Sequence[Any], size: int) -> tuple[Any, Any]:
        """(inputs, targets) of samples as `[]` gives them, padded to `size` and stacked along dimension 0."""
        ...


@runtime_checkable
class Grouped(Ragged, Protocol):
    """One whose samples are of several shapes, and whose batches hold samples of one only.

    Attributes:
        groups: of which shape each sample is, int64 [n]. Those of one group have one length, which no others have.
    """

    @property
    def groups(self) -> Tensor: ...


@runtime_checkable
class Preferences(Protocol):
    """A data set of a better and a worse answer to each question (see `hetpipe.layers.losses.preference`).

    Attributes:
        reference_log_probabilities: of both answers, float64 [n, 2]; None until they are known.
    """

    reference_log_probabilities: Tensor | None

    def __len__(self) -> int: ...

    def scored(self) -> Any:
        """Return the same pairs with whole rows. Their labels mark the last token only."""
        ...


def count_of(dataset: object) -> int | None:
    """The number of samples; None of a stream, which has no known length."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def largest_of(dataset: MapDataset, first: int) -> Sequence[int]:
    """The numbers of all samples that may be in a batch with the largest; of a stream, of so many at its beginning."""
    if isinstance(dataset, Grouped):
        return (dataset.lengths == dataset.sizes[-1]).nonzero().flatten().tolist()
    return range(count_of(dataset) or first)


def size_for(dataset: MapDataset, numbers: Tensor) -> int | None:
    """The size to which a global batch of int64 [b] numbers is padded; None where samples are all of one shape."""
    if not isinstance(dataset, Ragged):
        return None
    longest = int(dataset.lengths[numbers].max()) if len(numbers) else 0
    return next(size for size in dataset.sizes if size >= longest)


def check_lengths(dataset: MapDataset, what: str) -> None:
    """InputError unless lengths and sizes, if there are any, are as `Ragged` says."""
    if not isinstance(dataset, Ragged):
        return
    if not isinstance(dataset.sizes, list | tuple):
        raise InputError(f"{what}: its sizes must be a list of whole numbers, found {dataset.sizes!r}")
    lengths, sizes, count = dataset.lengths, list(dataset.sizes), len(dataset)  # type: ignore[arg-type]
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int64 or lengths.shape != (count,):
        found = f"{lengths.dtype} of shape {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else type(lengths).__name__
        raise InputError(f"{what}: its lengths must be int64 [{count}], one for each sample, found {found}")
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes) or sorted(set(sizes)) != sizes:
        raise InputError(f"{what}: its sizes must be whole numbers of at least 1, each larger than the one before, found {sizes}")
    if count and int(lengths.max()) > sizes[-1]:
        raise InputError(
            f"{what}: the largest of its sizes is {sizes[-1]}, but sample {int(lengths.argmax())} has length {int(lengths.max())}"
        )


def fetch(dataset: MapDataset, indices: Tensor, *place: int | str, size: int | None = None) -> tuple[Any, Any]:
    """The samples of int64 [b] indices as (inputs, targets), collated by torch's rules along dimension 0. What the data set draws
    for a sample from torch's, numpy's or Python's generator is decided by `place` (seed, epoch) and the sample's index.

    For no indices the tensors have the shapes and types of sample 0 but zero samples. Those of a Ragged data set are padded to
    `size`, by default to its largest.
    """
    numbers: list[int] = indices.tolist()
    wanted = numbers or [int(dataset.lengths.argmin()) if isinstance(dataset, Ragged) else 0]
    samples = read_samples(dataset, wanted, place)
    for number, sample in zip(wanted, samples, strict=False):
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise InputError(
                f"sample {number} of {type(dataset).__name__} is not a pair (inputs, target) but {_describe(sample)}"
            )
    try:
        if isinstance(dataset, Ragged):
            inputs, targets = _padded(dataset, samples, dataset.sizes[-1] if size is None else size)
        else:
            inputs, targets = default_collate(samples)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(_differing(type(dataset).__name__, wanted, samples) or f"samples cannot be batched: {error}") from error
    return (inputs, targets) if numbers else (emptied(inputs), emptied(targets))


def _padded(dataset: Ragged, samples: Sequence[Any], size: int) -> tuple[Any, Any]:
    """A batch that is one."""
    kind = type(dataset).__name__
    try:
        found = dataset.padded(samples, size)
    except InputError:
        raise
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"samples of {kind} cannot be padded to {size}: {type(error).__name__}: {cut(str(error))}") from error
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise InputError(f"{kind}.padded must give a pair (inputs, targets), found {_describe(found)}")
    for part, what in zip(found, ("inputs", "targets"), strict=True):
        every = part if isinstance(part, tuple | list) else [part]
        if any(not isinstance(t, Tensor) or t.ndim == 0 or len(t) != len(samples) for t in every) or not every:
            raise InputError(
                f"{kind}.padded gives {what} {_shape(part)} for {len(samples)} samples. Dimension 0 of each of "
                "their tensors must count samples"
            )
    inputs, targets = (tuple(part) if isinstance(part, list) else part for part in found)
    return inputs, targets


def read_samples(dataset: MapDataset, numbers: Sequence[int], place: tuple[int | str, ...]) -> list[Any]:
    """The samples of these numbers, as they are, each under a seed of its own, of `place` and its number; where nothing is drawn,
    all but the first at once. InputError where one cannot be read."""

    def read(part: Sequence[int], *seed: int | str) -> tuple[list[Any], bool]:
        with drawing(*seed):
            before = Generators.now()
            samples = _samples(dataset, part)
            return samples, before.moved

    found, draws = read(numbers[:1], *place, numbers[0])
    if len(numbers) > 1 and not draws:
        others, draws = read(numbers[1:], *place)
        if not draws:
            return found + others
    return found + [sample for number in numbers[1:] for sample in read([number], *place, number)[0]]


def _samples(dataset: MapDataset, numbers: Sequence[int]) -> list[Any]:
    """The samples of these numbers; InputError, with the number, for one that is not there or whose file cannot be read."""
    many = getattr(dataset, "__getitems__", None)
    at = ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
    try:
        if many is not None:
            return list(many(numbers))
        found = []
        for number in numbers:
            at = str(number)
            found.append(dataset[number])
        return found
    except InputError:
        raise
    except (LookupError, OSError, ValueError, StopIteration) as error:  # the last would end whatever asks for samples one by one
        length = f"; its length says {len(dataset)}" if isinstance(error, LookupError) else ""  # type: ignore[arg-type]
        what = f"{type(error).__name__}: {cut(str(error))}"
        raise InputError(f"sample {at} of {type(dataset).__name__} cannot be read: {what}{length}") from error


def _differing(dataset: str, numbers: Sequence[int], samples: Sequence[Any]) -> str | None:
    """Which two samples do not go into one batch."""
    for part, what in enumerate(("inputs", "targets")):
        first = _shape(samples[0][part])
        for number, sample in zip(numbers, samples, strict=False):
            if _shape(sample[part]) != first:
                return (
                    f"the {what} of samples {numbers[0]} and {number} of {dataset} differ: {first} and {_shape(sample[part])}; "
                    "a batch needs samples of one shape: pad or crop them in the dataset"
                )
    return None


def _shape(value: Any) -> str:
    """What of a value must be the same in all samples of a batch."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shape, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shape(v)}' for key, v in value.items())}}}"
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def _describe(sample: object) -> str:
    if isinstance(sample, tuple | list):
        return f"a {type(sample).__name__} of {len(sample)}"
    if isinstance(sample, Mapping):
        return (
            f"a {type(sample).__name__} with {cut(', '.join(map(str, sample)))}. hetpipe.Made(data, sample) makes pairs of such"
        )
    return f"of type {type(sample).__name__}"


def emptied(collated: Any) -> Any:
    """A tree of tensors like this one, with zero samples."""
    if isinstance(collated, Tensor):
        return collated[:0]
    if isinstance(collated, dict):
        return {key: emptied(value) for key, value in collated.items()}
    if isinstance(collated, tuple | list):
        return type(collated)(emptied(value) for value in collated)
    raise ValueError(f"a sample holds {type(collated).__name__}, which cannot be batched: return tensors")
