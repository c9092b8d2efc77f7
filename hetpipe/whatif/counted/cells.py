"""One layer of a transformer on all cards, at each precision, and where its times are from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hetpipe.documents.number_types import Precision
from hetpipe.exchange.importers.transformer import Cell
from hetpipe.whatif.cards import Card
from hetpipe.whatif.estimate import Estimate, estimate
from hetpipe.whatif.models import NamedModel
from hetpipe.whatif.order import Timed, in_order
from hetpipe.whatif.shared import TimesOrigin, for_bf16, with_note

MEASURED: tuple[Precision, ...] = ("fp32", "fp16")  # precisions of what is shipped


class OnCard(NamedTuple):
    """Seconds of a layer, and where they are from."""

    cell: Cell
    origin: TimesOrigin


def cells_of(model: NamedModel, tokens: int, cards: Mapping[str, Card]) -> dict[tuple[str, Precision], OnCard]:
    """A layer of the model on each card, at each precision that it has. Nobody measured bf16: where a card has it, it takes as
    long as fp16."""
    found = dict[tuple[str, Precision], OnCard]()
    for precision in MEASURED:
        able = {card: sheet for card, sheet in cards.items() if precision in sheet.precisions}
        own = {card: estimate(model, tokens, precision, card, cards) for card in able}
        timed = {card: _timed(one.cell) for card, one in own.items()}
        measured = [card for card, one in own.items() if one.measured]
        for card, (times, how) in in_order(timed, measured, able, precision).items():
            found[card, precision] = OnCard(_cell(times), with_note(_origin(own[card], card), how))
    for card, sheet in cards.items():
        if "bf16" in sheet.precisions:
            cell, origin = found[card, "fp16"]
            found[card, "bf16"] = OnCard(cell, for_bf16(origin))
    return found


def _timed(cell: Cell) -> Timed:
    return Timed(cell.sizes, *(np.array(times)[:, None] for times in cell[1:]))


def _cell(timed: Timed) -> Cell:
    return Cell(timed.sizes, *(tuple(times[:, 0].tolist()) for times in timed[1:]))


def _origin(found: Estimate, card: str) -> TimesOrigin:
    source = found.source
    if found.measured:
        return TimesOrigin(source.card, source.model, "measured")
    cell = f"{source.model}, {source.tokens} tokens, {source.precision}"
    if source.card == card:
        return TimesOrigin(source.card, source.model, f"scaled from what was measured on it: {cell}")
    if found.beside is not None:
        return TimesOrigin(source.card, source.model, f"scaled from {source.card} ({cell}) by how both ran {found.beside.model}")
    return TimesOrigin(source.card, source.model, f"scaled from {source.card} by data sheets ({cell})")
