"""28 published templates (tests/support/templates), five chats, all or the last answers: the tokens that are learned are those of
a mask made by hand, or the chat is refused, and the message names what would make it right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hetpipe.files.messages import InputError
from hetpipe.language.conversations import chat
from tests.support.chats import lines
from tests.support.templates.conversations import CHATS, UNDEFINED
from tests.support.templates.expected import Refusal
from tests.support.templates.published import TEMPLATES
from tests.support.templates.template import Template, numbers

from transformers import AutoTokenizer  # isort: skip  # offline, as tests.support.chats sets it

Samples = list[tuple[list[int], list[int]]]


def learned(template: Template, name: str, turns: str, folder: str) -> Samples | Refusal:
    """Tokens and targets of each sample, by hand."""
    expected = template.expected(name, turns)
    if isinstance(expected, Refusal):
        return expected
    its, found = AutoTokenizer.from_pretrained(folder), []
    for sample in expected:
        tokens, marks = numbers(its, sample)
        found.append((tokens[:-1], [number if mark else -100 for number, mark in zip(tokens, marks, strict=True)][1:]))
    return found


def made(name: str, turns: str, folder: str, place: Path) -> Samples | str:
    """Those that a job is given, or why it is not."""
    file = lines(place / f"{name}.jsonl", [(CHATS | UNDEFINED)[name]])
    try:
        train = chat(file, folder, turns=turns, test_fraction=0).train  # type: ignore[arg-type]
    except InputError as error:
        return str(error)
    return [(train[i][0].tolist(), train[i][1].tolist()) for i in range(len(train))]  # type: ignore[arg-type]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_what_is_learned_is_what_a_mask_by_hand_says(template: Template, tmp_path: Path) -> None:
    folder = template.folder(tmp_path / "words")
    for name in template.chats:
        for turns in ("auto", "all", "last"):
            wanted, found = learned(template, name, turns, folder), made(name, turns, folder, tmp_path)
            if isinstance(wanted, Refusal):
                assert isinstance(found, str), (name, turns)
                assert [word for word in wanted.words if word not in found] == [], (name, turns, found)
            else:
                assert found == wanted, (name, turns)


def test_how_many_are_refused() -> None:
    """Of 28 × 5: what templates themselves do not take, or do not write."""
    assert len(TEMPLATES) == 28
    counts = {
        turns: Counter(type(t.expected(name, turns)).__name__ for t in TEMPLATES.values() for name in CHATS)
        for turns in ("auto", "all", "last")
    }
    assert counts["auto"] == counts["last"] == {"list": 101, "Refusal": 39}
    assert counts["all"]["Refusal"] == 39 + 11
