"""Data to train on: CIFAR-10's binary folder, and random samples for tests.

Each function returns a DataSplits of map-style datasets. A sample is (inputs, target), both tensors;
`__getitems__` gets many at once, by the convention of torch's DataLoader.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetpipe.files.messages import InputError

Sample = tuple[Tensor, Tensor]


class Samples(Dataset[Sample], ABC):
    """A dataset of known length whose samples are gathered many at a time."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Tensor) -> Sample:
        """Inputs and targets of int64 [b] indices, stacked along dimension 0."""

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        inputs, targets = self.gather(torch.as_tensor(indices, dtype=torch.int64))
        return list(zip(inputs, targets, strict=True))

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        return self.__getitems__([index % len(self)])[0]


@dataclass(frozen=True, kw_only=True)
class Called:
    """How a model is called with samples that have names.

    Attributes:
        values: its arguments by name for a batch of one sample, of shapes as large as any: tensors [1, …], lists with one entry
            for the one sample, and other values. A sample's inputs are the tensors among them, in this order, and an empty
            tensor [0, number] for each whole number of `sizes`.
        alone: names of tensors that have no samples for the model, and are the same for all samples of a batch.
        sizes: names of values whose whole numbers may be others in another batch.
        made_for: the type of model that the samples are for, if they are for one only.
    """

    values: Mapping[str, Any]
    alone: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    made_for: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """What a data function returns: samples to train on, and some held out, or None. `names`: what the tensors of a sample's
    inputs are, as a model of transformers calls them (input_ids, attention_mask, position_ids); None where that is not known.
    `made_of`: what samples hang on beside files, in plain values: digests of a `tokenizer` and of a `template` of chats, and the
    tokens that end what is learned (`ends`). `called`: how a model is called with samples, where it takes its inputs by name."""

    train: Dataset[Sample]
    test: Dataset[Sample] | None = None
    names: tuple[str, ...] | None = None
    made_of: Mapping[str, Any] = field(default_factory=dict)
    called: Called | None = None


class Images(Samples):
    """Images kept as bytes: inputs float32 [3, height, width], targets int64 []."""

    def __init__(self, pixels: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor) -> None:
        self.pixels, self.labels = pixels, labels  # uint8 [n, 3, height, width], int64 [n]
        self.mean, self.deviation = mean.view(3, 1, 1), deviation.view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Sample:
        scaled = self.pixels[indices].to(torch.float32) / 255
        return (scaled - self.mean) / self.deviation, self.labels[indices]


class Vectors(Samples):
    """Tensors in memory: inputs [features], targets []."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, indices: Tensor) -> Sample:
        return self.inputs[indices], self.targets[indices]


VARIABLE = "HETPIPE_DATA"  # the environment variable that names the folder of data that is not in the repository
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_IMAGE_SHAPE = (3, 32, 32)  # red, green, blue planes
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32  # one label byte, then the pixels
CIFAR10_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_TEST_FILES = ("test_batch.bin",)
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # per channel, of the 50,000 training images scaled to [0, 1]
CIFAR10_DEVIATION = (0.2470, 0.2435, 0.2616)


def find_data(name: str) -> Path | None:
    """The folder `name` in HETPIPE_DATA; None where the variable is not set, or there is no such folder."""
    root = os.environ.get(VARIABLE)
    found = os.path.join(os.path.expanduser(root), name) if root else ""
    return Path(found) if root and os.path.isdir(found) else None


def data_folder(name: str, otherwise: str) -> Path:
    """Return the folder `name` in HETPIPE_DATA. InputError if there is none: it says what to set, or what to give `otherwise`."""
    found = find_data(name)
    if found is None:
        root = os.environ.get(VARIABLE)
        why = f"the folder {root} of {VARIABLE} has none" if root else f"{VARIABLE} is not set"
        raise InputError(f"there is no folder {name!r}: {why}. Set {VARIABLE} to the folder that holds it, or {otherwise}")
    return found


def cifar10(folder: str | None = None, normalize: bool = True, limit: int | None = None) -> DataSplits:
    """CIFAR-10 (Krizhevsky 2009) from the folder of its binary version: float32 [3, 32, 32] and int64 [].

    Args:
        folder: holds data_batch_1.bin to data_batch_5.bin and test_batch.bin; a piece of each is enough. The default is
            cifar-10-batches-bin in the folder that the environment variable HETPIPE_DATA names.
        normalize: subtract each channel's mean and divide by its deviation; else pixels lie in [0, 1].
        limit: the first so many training images, and test images; None for all.
    """
    if limit is not None:
        require_count("limit", limit, "cifar10")
    path = Path(os.path.expanduser(folder)) if folder is not None else data_folder(CIFAR10_FOLDER, "give `folder`")
    expected = [*CIFAR10_TRAIN_FILES, *CIFAR10_TEST_FILES]
    try:
        found = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise InputError(
            f"cifar10: cannot read the folder {path}: {error.strerror}; expected there: {', '.join(expected)}"
        ) from error
    missing = [name for name in expected if name not in found]
    if missing:
        raise InputError(
            f"cifar10: the folder {path} lacks {', '.join(missing)} (CIFAR-10's binary version has them); "
            f"found: {', '.join(found[:10]) or 'nothing'}{', …' if len(found) > 10 else ''}"
        )
    mean = torch.tensor(CIFAR10_MEAN if normalize else (0.0, 0.0, 0.0))
    deviation = torch.tensor(CIFAR10_DEVIATION if normalize else (1.0, 1.0, 1.0))

    def images(names: Sequence[str]) -> Images:
        records = torch.cat([_cifar10_records(path / name) for name in names])[:limit]
        pixels = records[:, 1:].reshape(-1, *CIFAR10_IMAGE_SHAPE)
        return Images(pixels, records[:, 0].long(), mean, deviation)

    return DataSplits(train=images(CIFAR10_TRAIN_FILES), test=images(CIFAR10_TEST_FILES))


def _cifar10_records(path: Path) -> Tensor:
    """One file as uint8 [n, 3073], checked."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise InputError(f"cifar10: cannot read {path}: {error.strerror}") from error
    if not content or len(content) % CIFAR10_RECORD_BYTES:
        raise InputError(
            f"cifar10: {path} has {len(content)} bytes, not a positive multiple of {CIFAR10_RECORD_BYTES} "
            "(one label and 3 x 32 x 32 pixels an image). Give the whole file, in the binary version"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, CIFAR10_RECORD_BYTES)
    worst = int(records[:, 0].argmax())
    label = int(records[worst, 0])
    if label > 9:
        raise InputError(f"cifar10: {path} gives image {worst} the label {label}; labels are 0 to 9")
    return records


def random_classification(
    samples: int = 256, inputs: int = 32, classes: int = 10, seed: int = 0, test_samples: int = 0
) -> DataSplits:
    """Samples scattered around a random centre for each class: float32 [inputs] and int64 []. For tests.

    Args:
        samples: number of training samples.
        inputs: features of a sample.
        classes: number of classes.
        seed: decides everything.
        test_samples: number of held-out samples; 0 for none.
    """
    for name, value in dict(samples=samples, inputs=inputs, classes=classes).items():
        require_count(name, value, "random_classification")
    if test_samples:
        require_count("test_samples", test_samples, "random_classification")
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, inputs, generator=generator, dtype=torch.float32)
    labels = torch.randint(classes, (samples + test_samples,), generator=generator)
    noise = torch.randn(len(labels), inputs, generator=generator, dtype=torch.float32)
    points = centres[labels] + 0.5 * noise
    return DataSplits(
        train=Vectors(points[:samples], labels[:samples]),
        test=Vectors(points[samples:], labels[samples:]) if test_samples else None,
    )


def require_count(name: str, value: object, function: str) -> None:
    """InputError unless the value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{function}: {name} must be an integer of at least 1, got {value!r}")


def held_out(count: int, fraction: float) -> Tensor:
    """Which samples are held out, spread evenly: bool [count]."""
    numbers = torch.arange(count)
    return ((numbers + 1) * fraction).floor() > (numbers * fraction).floor()
