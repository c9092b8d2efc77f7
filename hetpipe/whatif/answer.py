"""The rows of an answer: the machines as they are, with a card more, with one less; each planned by `auto` and simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import ValidationError

from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.transformer import Cell, transformer_profile
from hetpipe.files.formats import explained
from hetpipe.files.messages import InputError, listed
from hetpipe.spec.cluster import Cluster, Link
from hetpipe.spec.number_types import Precision
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from hetpipe.study.changes import carried_plan, same_plan
from hetpipe.study.rules import plan_with
from hetpipe.study.study import Alternative
from hetpipe.whatif.cards import Card
from hetpipe.whatif.estimate import Estimate, estimate
from hetpipe.whatif.machine import Machine, as_cluster, cards_text
from hetpipe.whatif.models import NamedModel
from hetpipe.whatif.order import Timed, in_order
from hetpipe.whatif.shared import TimesOrigin, with_cards, with_note

SECONDS = 4.0  # for each row's search
STATE_BYTES = {"adamw": 2.0, "momentum": 1.0, "sgd": 0.0}  # of optimizer state for each byte of parameters
Optimizer = Literal["adamw", "momentum", "sgd"]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a model, or a profile that somebody shared; machines; what could be added to or taken from the first."""

    model: NamedModel | Profile
    machines: tuple[Machine, ...]
    cards: Mapping[str, Card]
    link: Link
    network: Link | None = None
    added: tuple[Machine, ...] = ()
    without: tuple[str, ...] = ()
    tokens: int = 512
    global_batch: int = 64
    precision: Precision = "fp16"
    optimizer: Optimizer = "adamw"
    prices: Mapping[str, float] = field(default_factory=dict)  # of a card, over its launch price
    seconds: float = SECONDS

    @property
    def kinds(self) -> tuple[str, ...]:
        """All cards in any row, each once."""
        return tuple(dict.fromkeys(card for machine in (*self.machines, *self.added) for card in machine))

    def price(self, card: str) -> float | None:
        """The price of a card: as given, else what its maker asked when it came out."""
        return self.prices.get(card, self.cards[card].launch_price_usd)


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """One set of machines: its name, its cluster, the plan or why there is none, and what is added to the machines as they are,
    with its price (None where that is not known)."""

    name: str
    machines: tuple[Machine, ...]
    cluster: Cluster
    found: Alternative
    added: Machine = ()
    price: float | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of these machines, if there is one."""
        return self.found.plan

    @property
    def cards(self) -> str:
        """The cards of these machines in words."""
        return cards_text(self.machines)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Rows, that of the machines as they are first; their profile; and where each card's times are from."""

    question: Question
    profile: Profile
    origins: Mapping[str, TimesOrigin]
    rows: tuple[AnswerRow, ...]


def answer(question: Question, progress: Progress = lambda _: None) -> Answer:
    """Plan and simulate each row. A row that has all cards of another is no slower: that one's plan is tried in it, too."""
    profile, origins = profile_of(question)
    here = question.machines
    sets: list[tuple[str, tuple[Machine, ...], Machine]] = []
    sets += [(f"without one {card}", _without(here, card), ()) for card in question.without]
    sets.append(("as it is", here, ()))
    sets += [(_with_name(more), (here[0] + more, *here[1:]), more) for more in question.added]
    rows: list[AnswerRow] = []
    for i, (name, machines, more) in enumerate(sets):
        progress(f"{name} ({i + 1} of {len(sets)})")
        cluster = as_cluster(machines, question.cards, question.link, question.network)
        smaller = [row for row in rows if not row.added]
        found = _best(question, profile, name, cluster, smaller)
        price = _price(question, more)
        rows.append(AnswerRow(name=name, machines=machines, cluster=cluster, found=found, added=more, price=price))
    rows.sort(key=lambda row: (row.name != "as it is", not row.added))
    return Answer(question=question, profile=profile, origins=origins, rows=tuple(rows))


def profile_of(question: Question) -> tuple[Profile, dict[str, TimesOrigin]]:
    """The profile of the question's model on all its cards, and where the times of each are from."""
    model = question.model
    if isinstance(model, Profile):
        return with_cards(model, question.kinds, question.cards)
    own = {card: estimate(model, question.tokens, question.precision, card, question.cards) for card in question.cards}
    timed = {card: _timed(found.cell) for card, found in own.items()}
    measured = [card for card, found in own.items() if found.measured]
    ordered = in_order(timed, measured, question.cards, question.precision)
    options = ImportOptions(
        model=model.name, sequence_length=question.tokens, vocabulary=model.vocabulary, number_bytes=4
    )
    try:
        profile = transformer_profile(
            model.sizes, {(card, question.precision): _cell(ordered[card][0]) for card in question.kinds}, options,
            provenance={"source": model.source}, state_bytes_per_parameter_byte=STATE_BYTES[question.optimizer],
        )  # fmt: skip
    except ValidationError as error:  # sizes or rates that are allowed one by one, and together make no profile
        raise InputError(f"no profile can be made of {model.name} on these cards:\n{listed(explained(error))}") from None
    return profile, {card: with_note(_origin(own[card], card), ordered[card][1]) for card in question.kinds}


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


def _best(question: Question, profile: Profile, name: str, cluster: Cluster, smaller: Sequence[AnswerRow]) -> Alternative:
    """The plan of `auto`, or that of a row with fewer cards, where it is faster here, or stays faster with the others unused."""
    limit = {"time_limit_seconds": question.seconds}
    tried = [plan_with("auto", name, profile, cluster, question.global_batch, **limit)]
    for row in smaller:
        if row.plan is not None:
            tried += same_plan(row.plan, row.cluster, name, profile, cluster)
            kept = carried_plan(row.plan, row.cluster, cluster)
            tried += [Alternative(name=name, plan=kept)] if kept is not None else []
    return min(tried, key=lambda one: one.step_seconds)


def _without(machines: tuple[Machine, ...], card: str) -> tuple[Machine, ...]:
    """The machines without one of these cards: the first that there is."""
    for i, machine in enumerate(machines):
        if card in machine:
            at = machine.index(card)
            left = (*machines[:i], machine[:at] + machine[at + 1 :], *machines[i + 1 :])
            if not any(left):
                raise InputError(f"without its {card} there is no card left")
            return left
    raise InputError(f"there is no {card} to leave out; the cards are {cards_text(machines)}")


def _with_name(more: Machine) -> str:
    return f"with one more {more[0]}" if len(more) == 1 else f"with {cards_text([more])} more"


def _price(question: Question, more: Machine) -> float | None:
    prices = [question.price(card) for card in more]
    return None if not prices or None in prices else sum(price for price in prices if price is not None)
