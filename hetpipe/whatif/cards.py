"""Cards by name, with what their makers say of them: cards.yaml."""

from __future__ import annotations

import re
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from hetpipe.documents.number_types import Precision
from hetpipe.files.formats import Bytes, BytesPerSecond, Document, Name, Price, Strict
from hetpipe.files.messages import Faults, InputError, nearest, shown

Flops = Annotated[float, Field(strict=True, ge=1e6, le=1e18)]
Bandwidth = Annotated[BytesPerSecond, Field(ge=1e6, le=1e15)]
Architecture = Literal[
    "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rdna2", "rdna3", "rdna4", "cdna2", "cdna3"
]
_WITHOUT_FP16 = ("maxwell",)
_WITHOUT_BF16 = ("maxwell", "pascal", "volta", "turing", "rdna2", None)  # NVIDIA has it since compute capability 8.0
_MAKERS = re.compile(r"^(?:nvidia|amd|geforce|tesla|quadro|radeonpro|rtx|gtx)+(?=[a-z]?\d)")


class Card(Strict):
    """Bytes, bytes/s and FLOP/s of a card, and where they were read. `architecture`: what the maker calls it; a card whose file
    does not say it is taken to be without bf16."""

    maker: Literal["NVIDIA", "AMD"] = "NVIDIA"
    architecture: Architecture | None = None
    memory: Bytes
    bandwidth: Bandwidth
    fp32: Flops
    fp16: Flops
    launch_price_usd: Price | None = None
    aliases: tuple[Name, ...] = ()
    source: Name

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """At which it can compute matrix products."""
        without: dict[Precision, tuple[str | None, ...]] = {"fp16": _WITHOUT_FP16, "bf16": _WITHOUT_BF16}
        return tuple(p for p in get_args(Precision) if self.architecture not in without.get(p, ()))

    def flops(self, precision: Precision) -> float:
        """FLOP/s of matrix products; those of bf16 are those of fp16."""
        return self.fp32 if precision == "fp32" else self.fp16


class Cards(Document):
    """All cards that are known."""

    format: Literal["hetpipe.cards/1"]
    cards: Annotated[dict[Name, Card], Field(min_length=1)]

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        names = [simplified(name) for key, card in self.cards.items() for name in (key, *card.aliases)]
        several = sorted({name for name in names if names.count(name) > 1})
        if several:
            raise Faults([f"the name {name!r} is given to two cards" for name in several])
        return self

    def with_more(self, other: Cards) -> Cards:
        """These cards and those of another file, which come first where both have one of a name."""
        return Cards(format=self.format, cards={**self.cards, **other.cards})

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return {simplified(name): key for key, card in self.cards.items() for name in (key, *card.aliases)}

    def find(self, name: str) -> str:
        """The key of a card, however it is written; InputError with near names and all that are known."""
        key = self._by_name.get(simplified(name))
        if key is None:
            known = list(self.cards)
            hint = nearest(simplified(name), known).split(" known:")[0]
            raise InputError(f"unknown card {shown(name)}{hint} known: {', '.join(known)}")
        return key


def simplified(name: str) -> str:
    """A card's name without maker and punctuation.

    >>> simplified("NVIDIA GeForce RTX 3090"), simplified("a100-40"), simplified("Titan RTX")
    ('3090', 'a10040', 'titanrtx')
    """
    return _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


@cache
def known_cards() -> Cards:
    """The cards that come with hetpipe."""
    return Cards.load(Path(__file__).with_name("cards.yaml"))
