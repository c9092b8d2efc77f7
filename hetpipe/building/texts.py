"""Text tasks over Python's standard library, which every machine has: which package a piece of source comes from, and what a
function's documentation says. Words are numbered by their frequency in the training part."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetpipe.building.datasets import DataSplits, held_out, require_count
from hetpipe.files.messages import InputError

PAD, END, UNKNOWN, FIRST = 0, 1, 2, 3  # T5's own: padding (and the start of the target), end of text
SPECIAL = 4
IGNORED = -100
PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
_WORD = re.compile(r"[A-Za-z]+|\d+|[^\sA-Za-z\d_]")
_FUNCTION = re.compile(r'^[ \t]*def (?P<name>\w+)\((?P<arguments>[^()]*)\)[^\n:]*:\n\s+r?"""\s*(?P<text>[^\n"]+)', re.MULTILINE)
_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Encoded(Dataset[Any]):
    """Tensors in memory: inputs are a tuple, dimension 0 of all counts samples."""

    def __init__(self, inputs: tuple[Tensor, ...], targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return tuple(tensor[index] for tensor in self.inputs), self.targets[index]


class Vocabulary:
    """The most frequent words, numbered from SPECIAL."""

    def __init__(self, texts: Iterable[Sequence[str]], size: int) -> None:
        count = Counter(word for text in texts for word in text)
        kept = sorted(count, key=lambda word: (-count[word], word))[: size - SPECIAL]
        self.number = {word: SPECIAL + rank for rank, word in enumerate(kept)}

    def encode(self, texts: Sequence[Sequence[str]], length: int, *, first: bool = False, end: bool = False) -> Tensor:
        """int64 [texts, length], cut or padded; FIRST before, END behind the words on request."""
        rows = torch.full((len(texts), length), PAD)
        for row, text in zip(rows, texts, strict=True):
            numbers = [self.number.get(word, UNKNOWN) for word in text[: length - first - end]]
            numbers = [FIRST] * first + numbers + [END] * end
            row[: len(numbers)] = torch.tensor(numbers)
        return rows


def words_of(text: str) -> list[str]:
    """Words (parts of names too), numbers and signs, in lower case: getFileSize is get, file, size."""
    return [word.lower() for word in _WORD.findall(_CASE.sub(" ", text))]


def source_packages(
    packages: Sequence[str] = PACKAGES, length: int = 32, vocabulary: int = 2000, samples: int = 400, test_fraction: float = 0.1
) -> DataSplits:
    """Which package of the standard library some lines of source come from: inputs are words int64 [length], the first
    of them FIRST, and their mask; the target is the package's number.

    Args:
        packages: names of packages (folders) of the standard library; their number is that of the classes.
        length: words of a sample.
        vocabulary: distinct words; a model's vocab_size.
        samples: at most so many of each package, spread over its files.
        test_fraction: part of the samples that is held out; 0 for none.
    """
    _check(length, vocabulary, test_fraction, "source_packages")
    require_count("samples", samples, "source_packages")
    texts, labels = list[list[str]](), list[int]()
    for label, package in enumerate(packages):
        found = _pieces(package, length - 1)
        step = max(1, len(found) // samples)
        texts += found[::step][:samples]
        labels += [label] * len(found[::step][:samples])
    held = held_out(len(texts), test_fraction)
    known = Vocabulary([t for t, out in zip(texts, held.tolist(), strict=True) if not out], vocabulary)
    words = known.encode(texts, length, first=True)
    return _split((words, (words != PAD).long()), torch.tensor(labels), held)


def _pieces(package: str, count: int) -> list[list[str]]:
    """The words of a package's files, `count` at a time."""
    found = list[list[str]]()
    for text in _sources(package):
        words = words_of(text)
        found += [words[at : at + count] for at in range(0, len(words) - count + 1, count)]
    return found


def function_docs(length: int = 24, vocabulary: int = 3000, samples: int | None = None, test_fraction: float = 0.1) -> DataSplits:
    """From a function's name and arguments to the first line of its documentation. Inputs are the source's words int64 [length],
    their mask, and the target's words shifted to the right; targets are its words and END, int64 [length], IGNORED where
    there is padding or a word that the vocabulary lacks.

    Args:
        length: words of a source and of a target.
        vocabulary: distinct words; a model's vocab_size.
        samples: at most so many; None for all.
        test_fraction: part of the samples that is held out; 0 for none.
    """
    _check(length, vocabulary, test_fraction, "function_docs")
    if samples is not None:
        require_count("samples", samples, "function_docs")
    pairs = dict.fromkeys(
        (f"{m['name']} ( {m['arguments']} )", m["text"]) for text in _sources("") for m in _FUNCTION.finditer(text)
    )
    chosen = [(words_of(a), words_of(b)) for a, b in list(pairs)[:: max(1, len(pairs) // (samples or len(pairs)))][:samples]]
    held = held_out(len(chosen), test_fraction)
    known = Vocabulary([a + b for (a, b), out in zip(chosen, held.tolist(), strict=True) if not out], vocabulary)
    source = known.encode([a for a, _ in chosen], length, end=True)
    target = known.encode([b for _, b in chosen], length, end=True)
    read = torch.nn.functional.pad(target[:, :-1], (1, 0), value=PAD)
    wanted = target.masked_fill((target == PAD) | (target == UNKNOWN), IGNORED)
    return _split((source, (source != PAD).long(), read), wanted, held)


def _sources(package: str) -> list[str]:
    """The text of a package's files, but for tests; of the whole standard library for an empty name."""
    root = Path(sysconfig.get_path("stdlib"))
    folder = root / package
    paths = [p for p in sorted(folder.rglob("*.py")) if not _left_out(p.relative_to(root).parts)]
    if not paths:
        raise InputError(f"there is no Python source in {folder}. {package!r} must be a package of the standard library")
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _left_out(parts: Sequence[str]) -> bool:
    """Tests, installed packages, and what describes the machine."""
    return any(p in ("test", "tests", "site-packages", "dist-packages") or p.startswith("_sysconfigdata") for p in parts)


def _split(inputs: tuple[Tensor, ...], targets: Tensor, held: Tensor) -> DataSplits:
    train, test = (Encoded(tuple(t[chosen] for t in inputs), targets[chosen]) for chosen in (~held, held))
    return DataSplits(train=train, test=test if len(test) else None)


def _check(length: int, vocabulary: int, test_fraction: float, function: str) -> None:
    for name, value, least in (("length", length, 3), ("vocabulary", vocabulary, SPECIAL + 1)):
        require_count(name, value, function)
        if value < least:
            raise InputError(f"{function}: {name} must be at least {least}, got {value}")
    if not 0 <= test_fraction < 1:
        raise InputError(f"{function}: test_fraction must be from 0 to below 1, got {test_fraction!r}")
