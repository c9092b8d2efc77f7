"""The rows of an answer: the machines as they are, with a card more, with one less; each planned by `auto` and simulated. Beside
them the machines as they are with all cards at one precision, where each card's is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pydantic import ValidationError

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.number_types import Precision
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan
from hetpipe.documents.precisions import PrecisionChoice
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.counted import CountedModel
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.transformer import transformer_profile
from hetpipe.files.formats import explained
from hetpipe.files.messages import InputError, listed
from hetpipe.partitioners.memory_fit.obstacle import fits
from hetpipe.planning.partition import Problem
from hetpipe.study.changes import AS_IT_IS, carried_plan, same_plan
from hetpipe.study.study import Alternative
from hetpipe.whatif.adapters.base import Base
from hetpipe.whatif.adapters.lora import Lora
from hetpipe.whatif.adapters.profile import Adapted
from hetpipe.whatif.cards import Card
from hetpipe.whatif.counted.cells import cells_of
from hetpipe.whatif.counted.profile import counted_profile, with_made
from hetpipe.whatif.machine import SECONDS, Machine, Optimizer, as_cluster, cards_text
from hetpipe.whatif.models import NamedModel
from hetpipe.whatif.precisions import Single, choose, same_times, singles, turns
from hetpipe.whatif.shards.measurements import shards, widest_first
from hetpipe.whatif.shards.rules import degrees_of, layer_of
from hetpipe.whatif.shards.search import best_plan
from hetpipe.whatif.shared import Origins, TimesOrigin, with_cards

STATE_BYTES = {"adamw": 2.0, "momentum": 1.0, "sgd": 0.0}  # of optimizer state for each byte of parameters
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a model, by its sizes or by its layers as they were counted, or a profile that somebody shared; machines;
    what could be added to or taken from the first."""

    model: NamedModel | CountedModel | Profile
    machines: tuple[Machine, ...]
    cards: Mapping[str, Card]
    link: Link
    network: Link | None = None
    added: tuple[Machine, ...] = ()
    without: tuple[str, ...] = ()
    tokens: int = 512
    global_batch: int = 64
    precision: PrecisionChoice = "auto"
    optimizer: Optimizer = "adamw"
    prices: Mapping[str, float] = field(default_factory=dict)  # of a card, over its launch price
    seconds: float = SECONDS
    lora: Lora | None = None
    base: Base = "as-is"  # of adapters

    @cached_property
    def adapted(self) -> Adapted | None:
        """The model with its adapters; None where all of it trains, or where its layers were counted with these. InputError where
        it cannot have them."""
        if isinstance(self.model, CountedModel):
            return None
        if self.lora is None:
            if self.base != "as-is":
                raise InputError(
                    f"--base {self.base} is for weights that are frozen beside adapters. Give --lora r=16, too, which adds "
                    "adapters"
                )
            return None
        return Adapted.of(self.model, self.lora, self.base)

    def at(self, profile: Profile, precisions: Mapping[str, Precision]) -> Profile:
        """The profile at these precisions, with what cards hold for a moment of a quantised base."""
        held = profile.at(precisions)
        if isinstance(self.model, CountedModel):
            return with_made(held, self.model)
        return held if self.adapted is None else self.adapted.with_made(held)

    @cached_property
    def pairs(self) -> bool:
        """Whether any row has a machine with several cards of one kind."""
        return any(len({*machine}) < len(machine) for machine in self.any_machines)

    @property
    def any_machines(self) -> list[Machine]:
        """All machines of any row."""
        return [*self.machines, *(self.machines[0] + more for more in self.added)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """All cards in any row, each once."""
        return tuple(dict.fromkeys(card for machine in (*self.machines, *self.added) for card in machine))

    def price(self, card: str) -> float | None:
        """The price of a card: as given, else what its maker asked when it came out."""
        return self.prices.get(card, self.cards[card].launch_price_usd)


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """One set of machines: its name, its cluster, at which precision its cards compute (where that is known), the plan or why
    there is none, and what is added to the machines as they are, with its price (None where that is not known). `unfit`: why
    there is none at the fastest precisions, where the plan is at others."""

    name: str
    machines: tuple[Machine, ...]
    cluster: Cluster
    precisions: Mapping[str, Precision]
    found: Alternative
    added: Machine = ()
    price: float | None = None
    unfit: str = ""

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
    """Rows, that of the machines as they are first; the profile of all precisions; at which each card computes, where that is
    known; where each card's times are from; the machines as they are with all cards at one precision, where it was chosen; and
    the cheapest card with which these would hold the model, where they do not."""

    question: Question
    profile: Profile
    precisions: Mapping[str, Precision]
    origins: Mapping[str, Origins]
    rows: tuple[AnswerRow, ...]
    beside: tuple[AnswerRow, ...] = ()
    cheapest: str | None = None

    def origin(self, card: str) -> TimesOrigin:
        """Where the times are from that the rows are planned with."""
        return self.origins[card][self.precisions.get(card)]


def answer(question: Question, progress: Progress = lambda _: None) -> Answer:
    """Plan and simulate each row. A row that has all cards of another is no slower: that one's plan is tried in it, too. Where
    the machines as they are do not hold the model, the cheapest card with which they do is one of those that are added."""
    cheapest = cheapest_card(question)
    if cheapest is not None and (cheapest,) not in question.added:
        question = replace(question, added=(*question.added, (cheapest,)))
    profile, origins = profile_of(question)
    everything = as_cluster([question.kinds], question.cards, question.link, None)
    precisions = choose(question.precision, profile, everything, question.cards)
    kinds = tuple(dict.fromkeys(card for machine in question.machines for card in machine))
    others = singles(profile, kinds) if question.precision == "auto" else []
    rows, beside = _planned(question, profile, precisions, others if len(others) > 1 else [], progress)
    return Answer(
        question=question,
        profile=profile,
        precisions=precisions,
        origins=origins,
        rows=tuple(rows),
        beside=tuple(beside),
        cheapest=cheapest,
    )


def cheapest_card(question: Question) -> str | None:
    """The card of the lowest price with which the machines as they are would hold the model; None where they do without, or
    with no single card that has a price. Nothing is searched for: only memory is counted."""
    if _holding(question, [()]) is not None:
        return None
    choice, model = question.precision, question.model
    asked = {choice} if isinstance(choice, str) and choice != "auto" else set()
    known = {m.precision for m in model.measurements if m.precision is not None} if isinstance(model, Profile) else set()
    able = {card: {*sheet.precisions} for card, sheet in question.cards.items()}
    able = {card: own for card, own in able.items() if asked <= own and (not known or known & own)}
    prices = {card: price for card in able if (price := question.price(card)) is not None}
    found = _holding(question, [(card,) for card in sorted(prices, key=lambda card: (prices[card], card))])
    return found[0] if found else None


def _holding(question: Question, added: Sequence[Machine]) -> Machine | None:
    """The first of these with which the machines as they are hold the model."""
    here, asked = question.machines, replace(question, added=(*question.added, *added))
    profile, _ = profile_of(asked)
    everything = as_cluster([asked.kinds], question.cards, question.link, None)
    chosen = choose(question.precision, profile, everything, question.cards)
    for more in added:
        cluster = as_cluster((here[0] + more, *here[1:]), question.cards, question.link, question.network)
        for precisions in turns(question.precision, profile, chosen, list(cluster.device_types)):
            for one in widest_first(question.at(profile, precisions), cluster):
                if fits(Problem.of(one, cluster, question.global_batch, PlanOptions())):
                    return more
    return None


def _planned(
    question: Question, profile: Profile, chosen: Mapping[str, Precision], others: Sequence[Single], progress: Progress
) -> tuple[list[AnswerRow], list[AnswerRow]]:
    """The rows, of the profile at the chosen precisions, or where nothing fits at these at others (see `turns`); and the machines
    as they are at the others, searched for where their times are not those of the chosen ones."""
    here, sets = question.machines, _sets(question)
    fastest = question.at(profile, chosen)
    unlike = [one for one in others if not same_times(profile.at(one.precisions), fastest, list(one.precisions))]
    rows, searched = list[AnswerRow](), dict[str, AnswerRow]()
    for i, one in enumerate(unlike, 1):
        progress(f"{one.name} ({i} of {len(unlike) + len(sets)})")
        searched[one.name] = _row(question, [question.at(profile, one.precisions)], one.name, here)
    for i, (name, machines, more) in enumerate(sets, len(unlike) + 1):
        progress(f"{name} ({i} of {len(unlike) + len(sets)})")
        smaller = [row for row in rows if not row.added]
        layouts = list(searched.values()) if name == AS_IT_IS else []
        kinds = list(dict.fromkeys(card for machine in machines for card in machine))
        each = [question.at(profile, one) for one in turns(question.precision, profile, chosen, kinds)]
        rows.append(_row(question, each, name, machines, more, smaller, layouts))
    rows.sort(key=lambda row: (row.name != AS_IT_IS, not row.added))
    return rows, [_beside(one, question.at(profile, one.precisions), rows[0], searched.get(one.name)) for one in others]


def _sets(question: Question) -> list[tuple[str, tuple[Machine, ...], Machine]]:
    """The machines of each row, with its name and what is added; those with fewer cards before those that have them all."""
    here = question.machines
    fewer = [(f"without one {card}", _without(here, card), ()) for card in question.without]
    more = [(_with_name(more), (here[0] + more, *here[1:]), more) for more in question.added]
    return [*fewer, (AS_IT_IS, here, ()), *more]


def profile_of(question: Question) -> tuple[Profile, Mapping[str, Origins]]:
    """The profile of the question's model on all its cards, at each precision that they have, and where the times of each are
    from."""
    model, adapted = question.model, question.adapted
    if isinstance(model, Profile):
        return with_cards(model, question.kinds, question.cards)
    state = STATE_BYTES[question.optimizer]
    try:
        if isinstance(model, CountedModel):
            return counted_profile(model, question.kinds, question.cards, state)
        found = cells_of(model, question.tokens, question.cards)
        keys = [(card, precision) for card in question.kinds for precision in question.cards[card].precisions]
        options = ImportOptions(model=model.name, sequence_length=question.tokens, vocabulary=model.vocabulary, number_bytes=4)
        profile = transformer_profile(
            model.sizes,
            {key: found[key].cell for key in keys},
            options,
            provenance={"source": model.source},
            state_bytes_per_parameter_byte=state,
        )
        more = _shards(question, profile)
        if adapted is not None:
            profile = adapted.profile(profile, question.tokens, question.cards)
        profile = profile.model_copy(update={"measurements": (*profile.measurements, *more)})
    except ValidationError as error:  # sizes or rates that are allowed one by one, and together make no profile
        raise InputError(f"no profile can be made of {model.name} on these cards:\n{listed(explained(error))}") from None
    return profile, {card: {p: found[card, p].origin for p in question.cards[card].precisions} for card in question.kinds}


def _shards(question: Question, plain: Profile) -> list[Measurement]:
    """Measurements of split layers, where any row has a machine with several cards of one kind and the layers can be split."""
    model, link = question.model, question.link
    if unsplit(question) is not None or not isinstance(model, NamedModel):
        return []
    layer = layer_of(model, question.base)
    degrees = degrees_of(layer, question.any_machines)
    return list(shards(plain, model, layer, question.adapted, question.tokens, question.cards, link, degrees))


def unsplit(question: Question) -> str | None:
    """Why stages are not split over several cards of a machine; None where they may be."""
    if not question.pairs:
        return "no machine has several cards of one kind"
    if isinstance(question.model, CountedModel):
        return f"how the layers of {question.model.name} are split is not known"
    try:
        layer_of(question.model, question.base)
    except InputError as error:
        return str(error)
    return None


def _row(
    question: Question,
    profiles: Sequence[Profile],
    name: str,
    machines: tuple[Machine, ...],
    added: Machine = (),
    smaller: Sequence[AnswerRow] = (),
    layouts: Sequence[AnswerRow] = (),
) -> AnswerRow:
    """These machines with the plan of `auto` at the precisions of the first profile at which any fits, or that of a row with
    fewer cards, where it is faster here, or stays faster with the others unused; or the layout of a row at other precisions,
    where it is faster at these."""
    cluster = as_cluster(machines, question.cards, question.link, question.network)
    planned = [row for row in (*smaller, *layouts) if row.plan is not None]
    unfit = ""
    for profile in profiles:
        tried = [best_plan(name, profile, cluster, question.global_batch, question.seconds)]
        profile = widest_first(profile, cluster)[0]
        for row in planned:
            tried += same_plan(row.plan, row.cluster, name, profile, cluster) if row.plan is not None else []
        if any(one.plan is not None for one in tried):
            break
        unfit = unfit or tried[0].reason
    for row in smaller:
        kept = carried_plan(row.plan, row.cluster, cluster) if row.plan is not None else None
        tried += [Alternative(name=name, plan=kept)] if kept is not None else []
    found = min(tried, key=lambda one: one.step_seconds)
    own = found.plan.precision if found.plan is not None else None
    precisions = {kind: p for kind in cluster.device_types for p in profile.precisions(kind) if p is not None}
    return AnswerRow(
        name=name,
        machines=machines,
        cluster=cluster,
        precisions={**precisions, **(own or {})},
        found=found,
        added=added,
        price=_price(question, added),
        unfit=unfit if found.plan is not None else "",
    )


def _beside(one: Single, profile: Profile, row: AnswerRow, searched: AnswerRow | None) -> AnswerRow:
    """The machines of a row at one precision, as the profile is: what was searched for, or the row's plan, where it is faster
    at that. Where nothing was, the times are those that the row was first planned with."""
    profile = widest_first(profile, row.cluster)[0]
    if searched is not None:
        tried = [searched.found]
        if row.plan is not None:
            tried += same_plan(row.plan, row.cluster, one.name, profile, row.cluster)
        return replace(searched, found=min(tried, key=lambda found: found.step_seconds))
    found = replace(row.found, name=one.name)
    if row.unfit:
        found = Alternative(name=one.name, reason=row.unfit)
    elif row.plan is not None and row.plan.precision is not None:
        precision = {kind: one.precisions[kind] for kind in row.plan.precision}
        found = replace(found, plan=row.plan.model_copy(update={"precision": precision}))
    return replace(row, name=one.name, precisions=one.precisions, found=found, unfit="")


def _without(machines: tuple[Machine, ...], card: str) -> tuple[Machine, ...]:
    """The machines without one of these cards: the first that there is."""
    for i, machine in enumerate(machines):
        if card in machine:
            at = machine.index(card)
            left = (*machines[:i], machine[:at] + machine[at + 1 :], *machines[i + 1 :])
            if not any(left):
                raise InputError(f"the machine has no other card than its {card}, so nothing is left without it")
            return left
    raise InputError(f"--without {card}: no machine has a {card}. The cards are {cards_text(machines)}")


def _with_name(more: Machine) -> str:
    return f"with one more {more[0]}" if len(more) == 1 else f"with {cards_text([more])} more"


def _price(question: Question, more: Machine) -> float | None:
    prices = [question.price(card) for card in more]
    return None if not prices or None in prices else sum(price for price in prices if price is not None)
