"""Which of six packages of Python's standard library a piece of source text is from: text that every machine has."""

import re
import sysconfig
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

PACKAGES = ("asyncio", "email", "http", "multiprocessing", "unittest", "xml")
WORDS = 32
VOCABULARY = 2048  # a word's token is a hash of it; 0 is padding


class Pieces(Dataset[Any]):
    """Samples ({input_ids, attention_mask}, package): up to 32 words, padded with 0."""

    def __init__(self, texts: list[list[str]], labels: list[int]) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        ids = [1 + crc32(word.encode()) % (VOCABULARY - 1) for word in self.texts[index]]
        padded = torch.tensor(ids + [0] * (WORDS - len(ids)))
        return {"input_ids": padded, "attention_mask": (padded != 0).long()}, self.labels[index]


def build(pieces: int = 250, test_pieces: int = 25) -> tuple[Pieces, Pieces]:
    """So many pieces of each package to train on, and to test with, evenly over its text."""
    train, test = Pieces([], []), Pieces([], [])
    count = pieces + test_pieces
    held_out = set(range(0, count, count // test_pieces)[:test_pieces])
    for label, package in enumerate(PACKAGES):
        found = _pieces(package)
        for i in range(count):
            part = test if i in held_out else train
            part.texts.append(found[i * len(found) // count])
            part.labels.append(label)
    return train, test


def _pieces(package: str) -> list[list[str]]:
    """The package's source in pieces of whole lines, up to 32 words each; what is longer is cut."""
    found: list[list[str]] = [[]]
    for file in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        for line in file.read_text(encoding="utf-8").splitlines():
            words = re.findall(r"[a-z_]{2,}", line.lower())[:WORDS]
            if len(found[-1]) + len(words) > WORDS:
                found.append([])
            found[-1] += words
    return [piece for piece in found if len(piece) >= WORDS // 2]
