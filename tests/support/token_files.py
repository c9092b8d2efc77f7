"""Chats in a file, and what a run takes from them as data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


from hetpipe.building.datasets import DataSplits
from hetpipe.language.conversations import chat
from hetpipe.language.kept.token_file import FOLDER
from hetpipe.language.reading import read
from hetpipe.language.reading.gathered import Gathered, gather
from tests.support.chats import THINKING, chat_of, lines, tokenizer

LENGTH = 50  # at which some are cut
RECORDS = [
    chat_of(f"Hello {'the ' * (i % 7)}fox", f"<think>{i}</think>Yes, {'dog ' * (i % 11)}{i}.", *more, id=i)
    for i, more in enumerate(30 * [(), ("and?", "No.")])
]


def write_chats(folder: Path) -> None:
    """Chats, of which some are cut and all have a key that nothing reads, and a tokenizer."""
    tokenizer(folder / "words", THINKING)
    lines(folder / "chats.jsonl", RECORDS)


def chats(**changes: Any) -> DataSplits:
    arguments: dict[str, Any] = {"file": "chats.jsonl", "tokenizer": "words", "length": LENGTH}
    return chat(**(arguments | changes))


def everything(splits: DataSplits) -> Any:
    """All that a run takes from data, in plain values."""
    parts: list[Any] = [part for part in (splits.train, splits.test) if part is not None]
    samples = [
        [
            [x.tolist() for x in torch.utils.data.default_collate([part[i]])[0]]
            if isinstance(part[i][0], tuple)
            else [x.tolist() for x in part[i]]
            for i in range(len(part))
        ]
        for part in parts
    ]
    return samples, [part.digests() for part in parts], [part.words for part in parts], splits.made_of, splits.names


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.safetensors"))


def count_groups(patch: pytest.MonkeyPatch) -> list[int]:
    """The first record of each group of records that is tokenized in this process from now on."""
    found = list[int]()

    def counted(texts: Any, shape: Any, first: int, records: Any, **more: Any) -> Gathered:
        found.append(first)
        return gather(texts, shape, first, records, **more)

    patch.setattr(read, "gather", counted)
    return found
