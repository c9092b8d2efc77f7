"""What people type because other trainers have it (keys of files, commands, options), and what hetpipe answers: guesses.yaml."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hetpipe.files.formats import Document, Name, Strict
from hetpipe.files.messages import Faults

Answers = Mapping[str, str]  # by what is tried


class Guess(Strict):
    """An answer, and what gets it: by where it is tried (`job and train`: in both), a list of what is tried there."""

    answer: Name
    tried: dict[Name, tuple[Name, ...]]


class Guesses(Document):
    """All that is known: see guesses.yaml."""

    format: Literal["hetpipe.guesses/1"]
    keys: tuple[Guess, ...]
    command_line: tuple[Guess, ...]
    arguments: dict[Name, Name]
    optimizer: dict[Name, Name]
    losses: dict[Name, Name]

    @model_validator(mode="after")
    def _one_answer_each(self) -> Self:
        listed = Counter((place, word) for guess in (*self.keys, *self.command_line) for place, word, _ in _placed(guess))
        if several := [f"{word!r} has {count} answers under {place!r}" for (place, word), count in listed.items() if count > 1]:
            raise Faults(several)
        return self

    @cached_property
    def by_place(self) -> Mapping[str, Answers]:
        """What is answered in each section of a file, and behind each command, to what is tried there."""
        found: dict[str, dict[str, str]] = {}
        for guess in (*self.keys, *self.command_line):
            for place, word, answer in _placed(guess):
                found.setdefault(place, {})[word] = answer
        return found


def _placed(guess: Guess) -> Iterator[tuple[str, str, str]]:
    """(where, what is tried there, the answer)."""
    for places, words in guess.tried.items():
        for place in places.split(" and "):
            yield from ((place, word, guess.answer) for word in words)


@cache
def guesses() -> Guesses:
    """All that is known; read when something unknown is first met."""
    return Guesses.load(Path(__file__).with_name("guesses.yaml"))


class KeysOf(Mapping[str, str]):
    """What is answered to keys that people try in this section of a file."""

    def __init__(self, section: str) -> None:
        self.section = section

    def __getitem__(self, key: str) -> str:
        return guesses().by_place[self.section][key]

    def __iter__(self) -> Iterator[str]:
        return iter(guesses().by_place[self.section])

    def __len__(self) -> int:
        return len(guesses().by_place[self.section])
