"""What a user writes beside hetpipe: models, data and losses named by `tests.support.user_parts:…` in job files."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetpipe.building.datasets import DataSplits

NOT_A_FUNCTION = 3


def two_layers(width: int = 8, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, outputs))


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 3))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def with_centring() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Centre(), nn.Linear(8, 3))


def with_batch_norm_of_8() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4), nn.Flatten(), nn.ReLU(), nn.Linear(16, 4))


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


class _Table(nn.Module):
    """Embedding and head over one matrix, as language models tie them."""

    def __init__(self, weight: nn.Parameter, transposed: bool) -> None:
        super().__init__()
        self.weight, self.transposed = weight, transposed

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x @ (self.weight.T if self.transposed else self.weight)
        return result


def tied() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(8, 16) / 4)
    return nn.Sequential(_Table(weight, False), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), _Table(weight, True), nn.Linear(8, 4))


def mostly_frozen(width: int = 256) -> nn.Sequential:
    """As in fine-tuning: of two frozen layers only the second bias trains, and so does the last layer."""
    frozen = [nn.Linear(width, width).requires_grad_(False) for _ in range(2)]
    frozen[1].bias.requires_grad_(True)
    embed = nn.Linear(8, width).requires_grad_(False)
    return nn.Sequential(embed, nn.Tanh(), frozen[0], nn.Tanh(), frozen[1], nn.Linear(width, 4))


def not_sequential() -> nn.Module:
    return nn.Linear(4, 3)


def refuses(width: int) -> nn.Sequential:
    raise ValueError(f"width {width} is odd")


def points(samples: int = 10, label: int = 0) -> tuple[Dataset[Any], None]:
    """Three classes, and the last sample of class `label`."""
    return [(torch.ones(4) * i, i % 3 if i < samples - 1 else label) for i in range(samples)], None  # type: ignore[return-value]


def whole_numbers() -> tuple[Any, None]:
    return [(torch.arange(4), 0)] * 8, None


def ragged() -> tuple[Any, None]:
    return [(torch.ones(3 if i == 5 else 4), 0) for i in range(8)], None


def regression(samples: int = 24) -> DataSplits:
    """Targets are Python's floats: torch collates them to float64, whatever the model's type."""
    rows = [(torch.arange(4.0) + i, [float(i), 1.0, 2.0]) for i in range(samples)]
    return DataSplits(train=_Rows(rows))


class _Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index][0], torch.tensor(self.rows[index][1], dtype=torch.float64)


class _Unreadable:
    """Neither an index nor an iterator."""


def unreadable() -> DataSplits:
    return DataSplits(train=_Unreadable())  # type: ignore[arg-type]


def dictionaries() -> tuple[Any, None]:
    return [({"pixels": torch.ones(4)}, 0)] * 8, None


def triples() -> tuple[Any, None]:
    return [(torch.ones(4), 0, 1)] * 8, None


def no_samples() -> tuple[Any, None]:
    return [], None


def only_training() -> Any:
    return [(torch.ones(4), 0)]


CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0])


def weighted(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, weight=CLASS_WEIGHTS)


def weight_of(targets: Tensor) -> Tensor:
    return CLASS_WEIGHTS[targets].sum()


def absolute(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().mean()


class _Stuck(Dataset[Any]):
    """Points of which, on one rank, the one that is asked for as number `call` never comes."""

    def __init__(self, call: int, only_rank: int) -> None:
        self.call, self.only_rank, self.calls = call, only_rank, 0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        if self.calls == self.call and os.environ.get("RANK") == str(self.only_rank):
            time.sleep(3600)
        return torch.ones(8) * index, index % 4


def stuck(call: int, only_rank: int = 1) -> tuple[Dataset[Any], None]:
    return _Stuck(call, only_rank), None


class Failing(nn.Module):
    """A layer that fails at its forward number `step`, on one rank: by an error, by SIGKILL ("kill once": not again after a
    restart), by standing still ("stop once"), by never coming back, or by giving numbers that are none, from then on or once."""

    def __init__(self, how: str, step: int, only_rank: int) -> None:
        super().__init__()
        self.how, self.step, self.only_rank, self.calls = how, step, only_rank, 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and os.environ.get("RANK") == str(self.only_rank):  # a real one, in training
            self.calls += 1
            if self.how.startswith("nan"):
                return x * (torch.nan if self.calls == self.step or (self.how == "nan" and self.calls > self.step) else 1.0)
            if self.calls == self.step and not (self.how.endswith("once") and Path("failed_at").exists()):
                self.fail()
        return x

    def fail(self) -> None:
        Path("failed_at").write_text(str(time.time()))
        if self.how == "raise":
            raise ArithmeticError("this layer divides by the number of its friends")
        if self.how in ("kill", "kill once"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop once":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)


def failing(how: str, step: int = 4, only_rank: int = 1) -> nn.Sequential:
    """6 layers; the fourth fails."""
    fourth = Failing(how, step, only_rank)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), fourth, nn.ReLU(), nn.Linear(16, 4))


class _Drawn(Dataset[Any]):
    """A number of each sample is hidden, which one is drawn anew each time: it is the target. `how`: by which generator."""

    def __init__(self, samples: int, how: str) -> None:
        self.points, self.how = torch.randn(samples, 8), how
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        how = ("torch", "numpy", "python")[index % 3] if self.how == "each" else self.how
        draws = {
            "torch": lambda: int(torch.randint(4, ())),
            "numpy": lambda: int(np.random.randint(4)),
            "python": lambda: random.randrange(4),
            "own": lambda: int(self.own.integers(4)),
        }
        hidden = draws[how]()
        x = self.points[index].clone()
        x[hidden] = 5.0
        return x, hidden


class _DrawnTogether(_Drawn):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [self[index] for index in indices]


def drawn(samples: int = 50, how: str = "each", together: bool = False) -> DataSplits:
    """Points that are drawn, too, when the data are built."""
    kind = _DrawnTogether if together else _Drawn
    return DataSplits(train=kind(samples, how), test=kind(20, how))


class Steps(Dataset[Any]):
    """Samples of different lengths: sample i has i + 1 tokens, all i + 1."""

    lengths = torch.arange(1, 7)
    sizes: Sequence[int] = (4, 8)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.full((index + 1,), index + 1)
        return tokens, tokens

    def padded(self, samples: Sequence[tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = torch.zeros(len(samples), size, dtype=torch.int64), torch.full((len(samples), size), -100)
        for row, (tokens, wanted) in enumerate(samples):
            inputs[row, : len(tokens)], targets[row, : len(tokens)] = tokens, wanted
        return inputs, targets


def steps(largest: int = 8) -> DataSplits:
    """With test samples that are padded to another size."""
    test = Steps()
    test.sizes = (4, largest)
    return DataSplits(train=Steps(), test=test)


class _TokensAndPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(400, 8), nn.Embedding(64, 8)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = self.words(given[0]) + self.places(given[1])
        return found


def tokens_and_places() -> nn.Sequential:
    """A model that takes tokens and positions."""
    return nn.Sequential(_TokensAndPlaces(), nn.Linear(8, 400))
