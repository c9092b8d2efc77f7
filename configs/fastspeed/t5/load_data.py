"""The name of a function from its docstring, in Python's standard library: summaries that every machine has."""

import ast
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SOURCE_BYTES, TARGET_BYTES = 64, 16
END = 1  # no text has this byte; 0 is padding, and what the decoder reads first


class Summaries(Dataset[Any]):
    """Samples ({source_ids, source_mask, target_ids}, labels), byte by byte; labels are the name and END, then -100."""

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        text, name = self.pairs[index]
        source = torch.tensor(list(text[:SOURCE_BYTES].ljust(SOURCE_BYTES, b"\0")))
        wanted = torch.tensor(list((name[: TARGET_BYTES - 1] + bytes([END])).ljust(TARGET_BYTES, b"\0")))
        read = torch.cat([torch.zeros(1, dtype=torch.int64), wanted[:-1]])
        given = {"source_ids": source, "source_mask": (source != 0).long(), "target_ids": read}
        return given, torch.where(wanted == 0, -100, wanted)


def build(samples: int = 903, test_samples: int = 100) -> tuple[Summaries, Summaries]:
    """So many functions to train on, and to test with, evenly over those that have a docstring."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text is not None and len(text) >= 20:
                found.append((" ".join(text.split()).encode(), node.name.encode()))
    count = samples + test_samples
    chosen = [found[i * len(found) // count] for i in range(count)]
    test = set(range(0, count, count // test_samples)[:test_samples])
    return (Summaries([pair for i, pair in enumerate(chosen) if i not in test]),
            Summaries([pair for i, pair in enumerate(chosen) if i in test]))  # fmt: skip
