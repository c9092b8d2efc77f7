"""What the data of a run are, in a few numbers: how many samples, and what is in them. By it ranks see whether they read the
same, and a run that goes on from a checkpoint whether its data are those of before."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hetpipe.building.data import MapDataset, count_of, read_samples
from hetpipe.files.formats import Count, Number, Strict
from hetpipe.files.messages import InputError
from hetpipe.processes.progress import warn
from hetpipe.processes.whereabouts import during
from hetpipe.processes.world import World

FEW_SAMPLES, MANY_SAMPLES = (
    4,
    31,
)  # samples that are looked at, of data that cannot be looked at as a whole; the few are among the many
CONTENT_TOLERANCE = 1e-5  # by which what another processor has computed may differ, of the sum of all numbers
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


@runtime_checkable
class Digested(Protocol):
    """A data set that is in memory, and cheap to look at as a whole."""

    def digests(self) -> tuple[str, str | None]:
        """Return two digests of 32 hexadecimal digits each: of all samples in their order, and of all in any order (None
        where they have no other order)."""
        ...


class Looked(Strict):
    """A sample: a digest of its whole numbers, types and shapes, and, for each of its tensors of floating-point numbers, their
    sum, in which each counts otherwise, and that of what they are without their signs."""

    number: Count
    digest: Digest
    sums: tuple[tuple[Number, Number], ...] = ()

    def is_alike(self, other: Looked) -> bool:
        """Whether both are of one sample, but for rounding."""
        pairs = zip(self.sums, other.sums, strict=False)
        return (self.number, self.digest, len(self.sums)) == (other.number, other.digest, len(other.sums)) and all(
            abs(a - b) <= CONTENT_TOLERANCE * max(size, like) for (a, size), (b, like) in pairs
        )


class Content(Strict):
    """What is known of the data to train on. `samples` is their number (None: they come as a stream). `whole` is a digest of all
    samples in their order, and `unordered` one in any order, where the data have digests; else `looked_at` are some of the
    samples (None: they differ each time they are read). `tokenizer`, `template` and `ends` (the tokens that end what is learned)
    say what the samples were made of."""

    samples: Count | None
    whole: Digest | None = None
    unordered: Digest | None = None
    looked_at: tuple[Looked, ...] | None = None
    tokenizer: Digest | None = None
    template: Digest | None = None
    ends: tuple[Count, ...] = ()

    def other(self, than: Content) -> str:
        """What of the data is another than it was; nothing where all is the same, as far as both say it."""
        told = [
            f"the {what} is another"
            for what, name in (("tokenizer", "tokenizer"), ("template of chats", "template"))
            if None not in (was := (getattr(than, name), getattr(self, name))) and was[0] != was[1]
        ]
        if None in (self.samples, than.samples) and self.samples != than.samples:
            told.append(
                "samples came as a stream" if than.samples is None else "samples did not come as a stream, as they do now"
            )
        elif self.samples != than.samples:
            told.append(f"there were {than.samples} samples to train on, and there are {self.samples}")
        elif (self.whole is None) != (than.whole is None) and None not in (self.looked_at, than.looked_at):
            told.append("samples are of another kind")
        elif self.whole != than.whole:
            alike = self.unordered is not None and self.unordered == than.unordered
            told.append("the samples are in another order" if alike else "samples are others")
        elif (number := self._other_sample(than)) is not None:
            told.append(f"sample {number} is another")
        return ", and ".join(told)

    def _other_sample(self, than: Content) -> int | None:
        before = {looked.number: looked for looked in than.looked_at or ()}
        alike = ((own.number, own.is_alike(before[own.number])) for own in self.looked_at or () if own.number in before)
        return next((number for number, same in alike if not same), None)


def content_of(data: MapDataset, made_of: Mapping[str, Any], *, most: int = MANY_SAMPLES) -> Content:
    """Describe a data set: as a whole where it has digests, else by at most so many of its samples."""
    size, source = count_of(data), data if isinstance(data, Digested) else getattr(data, "samples", data)
    made: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in made_of.items()}
    if isinstance(source, Digested):
        whole, unordered = source.digests()
        return Content(samples=size, whole=whole, unordered=unordered, looked_at=(), **made)
    numbers = sorted({round(i * (size - 1) / (most - 1)) for i in range(most)}) if size is not None else list(range(most))
    with during("looking at samples of the data"):
        found = {looked.number: looked for looked in _looked(data, numbers)}
        again = _looked(data, numbers[:: max(1, len(numbers) // FEW_SAMPLES)])
        same = all(looked.is_alike(found[looked.number]) for looked in again)
    return Content(samples=size, looked_at=tuple(found.values()) if same else None, **made)


def same_content(data: MapDataset, made_of: Mapping[str, Any], world: World, *, saved: bool = False) -> Content:
    """Describe the data that all ranks read; of those that a checkpoint will describe (`saved`), the main rank looks at many
    samples. InputError on every rank if ranks read other data. A note if samples differ each time they are read under one seed.
    Collective."""
    own = content_of(data, made_of, most=MANY_SAMPLES if saved and world.is_main else FEW_SAMPLES)
    if own.looked_at is None and world.is_main:
        warn(
            f"note: samples of {type(data).__name__} differ each time they are read, although the seed is the same. It draws "
            "from a generator, a counter or a clock of its own. So a run under another plan, or one that resumes from "
            "a checkpoint, reads other samples than this run. What torch's, NumPy's and Python's own generators draw is the "
            "same in all runs"
        )
    every = world.gather(own)
    for rank, other in zip(world.ranks, every, strict=True):
        where = f"rank {rank} on host {world.hosts[rank]}" if world.hosts else f"rank {rank}"
        if told := other.other(every[0]):
            raise InputError(
                f"the ranks read different data: on {where} {told}, compared with rank {world.ranks[0]}. Give all hosts the same "
                "files, and read them in one order (sorted(os.listdir(…)))"
            )
    content: Content = every[0]
    return content


def _looked(data: MapDataset, numbers: Sequence[int]) -> Iterator[Looked]:
    for number, sample in zip(numbers, read_samples(data, numbers, ("content",)), strict=True):
        yield look(number, sample)


def look(number: int, value: Any) -> Looked:
    """Look at a sample, or at the record that it is made of."""
    own, sums = hashlib.sha256(), list[tuple[float, float]]()
    for leaf in _leaves(value):
        _note(leaf, own, sums)
    return Looked(number=number, digest=own.hexdigest()[:32], sums=tuple(sums))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys of mappings, and every value that is no list, tuple or mapping."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _plain(value: Any) -> Any:
    """Pictures and the like as numbers."""
    return value if isinstance(value, str | bytes) or not hasattr(value, "__array_interface__") else np.array(value)


def _note(value: Any, own: Any, sums: list[tuple[float, float]]) -> None:
    try:
        tensor = value.detach().cpu().to_dense() if isinstance(value, Tensor) else torch.as_tensor(_plain(value))
    except (TypeError, ValueError, RuntimeError):
        text = value if isinstance(value, str) else ADDRESS.sub("", str(value))  # many objects tell no more than their address
        own.update(f"{type(value).__name__} {text}".encode("utf-8", "surrogatepass"))
        return
    own.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = torch.view_as_real(tensor.resolve_conj()).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    if not flat.is_floating_point():
        own.update(flat.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return
    wide = flat.double()
    own.update(wide.isfinite().numpy().tobytes())
    wide = wide.nan_to_num(0.0, 0.0, 0.0)
    weights = torch.linspace(1, 2, len(wide), dtype=torch.float64)
    sums.append((float(wide @ weights), float(wide.abs() @ weights)))


def digest_of_tensors(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the types, shapes and all numbers of tensors in memory."""
    own = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        own.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        own.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return own.hexdigest()
