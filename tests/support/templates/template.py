"""A template with its tokenizer's tokens and what is expected of it, and that tokenizer in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.support.chats import tokenizer
from tests.support.templates.conversations import CHATS, UNDEFINED
from tests.support.templates.expected import Expected, Refusal, Sample, samples

HOME = Path(__file__).parent / "jinja"


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template, and what is expected of it.

    Attributes:
        bos, eos: the tokens that begin and end a text; bos is None where there is none.
        special: the other special tokens.
        plain: added tokens that are not special.
        adds_bos: the tokenizer puts bos before a text, where it is not told to leave its own tokens out.
        swallows: its special tokens take the white space behind them with them.
        chats: by a chat's name, what is expected: of all of CHATS, and of any of UNDEFINED.
    """

    name: str
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    adds_bos: bool = False
    swallows: bool = False
    chats: Mapping[str, Expected]

    def __post_init__(self) -> None:
        assert self.chats.keys() - UNDEFINED.keys() == CHATS.keys(), (self.name, self.chats.keys())

    @property
    def text(self) -> str:
        return (HOME / f"{self.name}.jinja").read_text("utf-8")

    def expected(self, chat: str, turns: str) -> list[Sample] | Refusal:
        return samples(self.chats[chat], turns)

    def folder(self, where: Path) -> str:
        """Its tokenizer in a folder, by its path."""
        special = [AddedToken(each, special=True, normalized=False, rstrip=self.swallows) for each in self.special]
        names = {"bos_token": self.bos, "eos_token": self.eos}
        return tokenizer(where, self.text, special=special, plain=self.plain, adds_bos=self.adds_bos, **names)


def numbers(its: Any, sample: Sample) -> tuple[list[int], list[bool]]:
    """The tokens of a sample, and whether each is learned. Where a learned text begins, a token begins, too: up to there is what
    a model is given before it answers."""
    pieces: list[Sample] = [[]]
    for text, learned in sample:
        if learned:
            pieces.append([])
        pieces[-1].append((text, learned))
    every: list[int] = []
    marks: list[bool] = []
    for piece in pieces:
        tokens = its("".join(text for text, _ in piece), add_special_tokens=False, return_offsets_mapping=True)
        every += tokens["input_ids"]
        marks += [_learned(piece, begin) for begin, _ in tokens["offset_mapping"]]
    return every, marks


def _learned(piece: Sequence[tuple[str, bool]], place: int) -> bool:
    for text, learned in piece:
        if place < len(text):
            return learned
        place -= len(text)
    raise AssertionError("a token behind its text")
