"""A text, and what of it is learned."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A part of a text that is learned, from character `begin` on; `ended`: whether its last token is one that ends a turn, or a
    text."""

    begin: int
    end: int
    ended: bool = True


class Marked(NamedTuple):
    """A text, and the parts of it that are learned, in order. `whole`: whether it holds all its special tokens, as templates
    write them; else the tokenizer puts its own around it, the end of a text among them. `apart`: of a chat whose answers are
    samples by themselves."""

    text: str
    learned: tuple[Span, ...]
    whole: bool = True
    apart: bool = False
