"""Seconds of a layer on a card: as measured, or scaled from the nearest that was.

A measurement is scaled by what the two layers would take at the cards' full rates: FLOPs / (FLOP/s) + bytes moved / (bytes/s). So
what a card reaches of its rates is taken over from the measurement: of that card, if a model built like this one was measured on
it, else of the card whose rates are nearest. If both cards ran a model that is built in another way, the time is multiplied by
what the card took for it over what would have been scaled from the other. `bench/what_if` says how far off that is where it can
be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import log
from typing import NamedTuple

from hetpipe.documents.number_types import Precision
from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.transformer import NUMBER_BYTES, Cell, gpt_bytes
from hetpipe.files.messages import InputError
from hetpipe.hf.sizes import Kind, TransformerSizes
from hetpipe.whatif.cards import Card
from hetpipe.whatif.models import NamedModel, family_of
from hetpipe.whatif.shipped import shipped_layers

WEIGHT_BYTES = 16  # a parameter of 4 bytes is read forward and backward, and its gradient is read and written
PASSES = 5  # what is saved is written, read by the next operation and by backward; its gradient is written and read


class MeasuredCell(NamedTuple):
    """A cell, and what was measured in it."""

    model: str
    sizes: TransformerSizes
    family: Kind
    card: str
    tokens: int
    precision: Precision
    cell: Cell


class Estimate(NamedTuple):
    """Seconds of one layer on a card, and the measurement that they come from; `beside`: the measurement of another model on the
    card, by which a time from another card was corrected."""

    cell: Cell
    source: MeasuredCell
    measured: bool
    beside: MeasuredCell | None = None


def all_measured() -> Iterator[MeasuredCell]:
    """Every cell that is shipped."""
    for name, model in shipped_layers().models.items():
        for card, lengths in model.cells.items():
            for tokens, precisions in lengths.items():
                for precision, cell in precisions.items():
                    yield MeasuredCell(name, model.sizes, family_of(name), card, tokens, precision, cell)


@cache
def _shipped() -> tuple[MeasuredCell, ...]:
    return tuple(all_measured())


def ideal_seconds(sizes: TransformerSizes, tokens: int, samples: int, card: Card, precision: Precision) -> float:
    """Forward and backward of one layer at a card's full rates: 6 FLOPs for each parameter and token, 12·t²·h for attention
    (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 5.1, without recomputing)."""
    h, p = sizes.hidden, sizes.layer_parameters
    flops = samples * (6 * p * tokens + 12 * tokens**2 * h)
    options = ImportOptions(model="", hidden_size=h, sequence_length=tokens, number_bytes=NUMBER_BYTES[precision])
    moved = WEIGHT_BYTES * p + PASSES * samples * gpt_bytes(3, options).saved[1]
    return flops / card.flops(precision) + moved / card.bandwidth


def distance(a: Card, b: Card, precision: Precision) -> float:
    """How different the rates of two cards are: the sum of the logarithms of their ratios."""
    return abs(log(a.flops(precision) / b.flops(precision))) + abs(log(a.bandwidth / b.bandwidth))


def scaled(source: MeasuredCell, sizes: TransformerSizes, tokens: int, precision: Precision, card: Card, of: Card) -> Cell:
    """The cell of another layer, number of tokens, precision or card; `of` is the card of the source."""
    ratios = [
        ideal_seconds(sizes, tokens, b, card, precision) / ideal_seconds(source.sizes, source.tokens, b, of, source.precision)
        for b in source.cell.sizes
    ]
    forward, backward = (tuple(t * r for t, r in zip(times, ratios, strict=True)) for times in source.cell[1:])
    return Cell(source.cell.sizes, forward, backward)


def estimate(
    model: NamedModel, tokens: int, precision: Precision, name: str, cards: Mapping[str, Card], known: Sequence[MeasuredCell] = ()
) -> Estimate:
    """The layer of a model on the card of this name. Of the measurements that is nearest which has, in this order, the precision,
    the family of the model (how its layers are built, which changes what a card reaches by a factor of two), the maker, the card,
    or else rates near its own, and the size and number of tokens. `known`: what was measured, if not what is shipped."""
    card = cards[name]

    def unlike(m: MeasuredCell) -> tuple[bool, ...]:
        return m.precision != precision, m.family != model.family, cards[m.card].maker != card.maker, m.card != name

    def far(m: MeasuredCell) -> tuple[float, ...]:
        size = abs(log(m.sizes.layer_parameters / model.sizes.layer_parameters)) + abs(log(m.tokens / tokens))
        return distance(card, cards[m.card], precision), size, m.model != model.name

    there = [m for m in known or _shipped() if m.card in cards]
    if not there:
        raise InputError(f"the list of cards has no card that was measured, so {name!r} cannot be estimated")
    least = min(map(unlike, there))
    source = min((m for m in there if unlike(m) == least), key=far)
    same = source.sizes == model.sizes and (source.card, source.tokens, source.precision) == (name, tokens, precision)
    if same:
        return Estimate(source.cell, source, True)
    cell = scaled(source, model.sizes, tokens, precision, card, cards[source.card])
    both = _ran_on_both(there, name, source, precision) if source.card != name else []
    if not both:
        return Estimate(cell, source, False)
    here, other = min(both, key=lambda pair: abs(log(pair[0].sizes.layer_parameters / model.sizes.layer_parameters)))
    expected = scaled(other, here.sizes, here.tokens, precision, card, cards[other.card])
    factor = seconds(here.cell, expected) / seconds(expected, here.cell)
    forward, backward = (tuple(t * factor for t in times) for times in cell[1:])
    return Estimate(Cell(cell.sizes, forward, backward), source, False, here)


def _ran_on_both(
    known: Sequence[MeasuredCell], name: str, source: MeasuredCell, precision: Precision
) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """What was measured alike on a card and on that of the source."""
    own = {(m.model, m.tokens): m for m in known if (m.card, m.precision) == (name, precision)}
    others = [m for m in known if (m.card, m.precision) == (source.card, precision)]
    pairs = [(own[m.model, m.tokens], m) for m in others if (m.model, m.tokens) in own]
    return [(here, other) for here, other in pairs if {*here.cell.sizes} & {*other.cell.sizes}]


def seconds(cell: Cell, other: Cell) -> float:
    """Seconds of a cell's micro-batches, of those that the other cell has too."""
    rows = [i for i, b in enumerate(cell.sizes) if b in other.sizes]
    return sum(cell.forward[i] + cell.backward[i] for i in rows)
