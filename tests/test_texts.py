"""Text tasks over the standard library: words, vocabulary, what is held out, and messages."""

from __future__ import annotations

import pytest
import torch

from hetpipe.building.data import fetch
from hetpipe.building.texts import (
    END,
    FIRST,
    IGNORED,
    PAD,
    SPECIAL,
    UNKNOWN,
    Vocabulary,
    function_docs,
    source_packages,
    words_of,
)
from hetpipe.files.messages import InputError


def test_words_are_parts_of_names_numbers_and_signs() -> None:
    assert words_of("def getFileSize(a_path2): # it's") == [
        "def",
        "get",
        "file",
        "size",
        "(",
        "a",
        "path",
        "2",
        ")",
        ":",
        "#",
        "it",
        "'",
        "s",
    ]


def test_the_vocabulary_numbers_by_frequency() -> None:
    known = Vocabulary([["b", "a", "b"], ["c", "a", "b"], ["d"]], SPECIAL + 3)
    assert known.number == {"b": SPECIAL, "a": SPECIAL + 1, "c": SPECIAL + 2}  # the rarest of the same count is left out
    assert known.encode([["a", "d"], ["b", "b", "b", "b"]], 4, first=True, end=True).tolist() == [
        [FIRST, SPECIAL + 1, UNKNOWN, END],
        [FIRST, SPECIAL, SPECIAL, END],
    ]
    assert known.encode([["c"]], 3, end=True).tolist() == [[SPECIAL + 2, END, PAD]]


def test_source_packages() -> None:
    splits = source_packages(("json", "xml", "email"), length=16, vocabulary=300, samples=40, test_fraction=0.25)
    assert splits.test is not None
    assert (len(splits.train), len(splits.test)) == (90, 30)  # type: ignore[arg-type]
    (words, mask), labels = fetch(splits.test, torch.arange(30))
    assert labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert words.shape == mask.shape == (30, 16)
    assert (words[:, 0] == FIRST).all()
    assert int(words.max()) < 300
    again = source_packages(("json", "xml", "email"), length=16, vocabulary=300, samples=40, test_fraction=0.25)
    assert torch.equal(fetch(again.test, torch.arange(30))[0][0], words)  # type: ignore[arg-type]


def test_function_docs() -> None:
    splits = function_docs(length=12, vocabulary=500, samples=200)
    assert splits.test is not None
    assert 180 <= len(splits.train) + len(splits.test) <= 200  # type: ignore[arg-type]
    (source, mask, read), wanted = fetch(splits.train, torch.arange(50))
    assert source.shape == read.shape == wanted.shape == (50, 12)
    assert torch.equal(mask.bool(), source != PAD)
    assert (read[:, 0] == PAD).all()
    shown = read[:, 1:]  # what the decoder reads is what it had to write, one word later
    counted = (wanted[:, :-1] != IGNORED) & (shown != PAD)
    assert torch.equal(shown[counted], wanted[:, :-1][counted])
    assert ((shown == UNKNOWN) <= (wanted[:, :-1] == IGNORED)).all()
    assert (wanted == END).sum(1).tolist() == [1] * 50


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: source_packages(("jsonn",)),
            "there is no Python source in .*jsonn. 'jsonn' must be a package of the standard library",
        ),
        (lambda: source_packages(samples=0), "source_packages: samples must be an integer of at least 1, got 0"),
        (lambda: source_packages(length=2), "source_packages: length must be at least 3, got 2"),
        (lambda: function_docs(vocabulary=4), "function_docs: vocabulary must be at least 5, got 4"),
        (lambda: function_docs(test_fraction=1), "function_docs: test_fraction must be from 0 to below 1, got 1"),
    ],
)
def test_message(make: object, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        make()  # type: ignore[operator]
