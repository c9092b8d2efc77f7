"""At which precision each card computes: as it is asked, else its fastest safe one; and, beside that, all cards at one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.number_types import Precision
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.precisions import PrecisionChoice, in_turn, parse_precision
from hetpipe.documents.precisions import turns as turns_of
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError, shown
from hetpipe.whatif.cards import Card, Cards


class Single(NamedTuple):
    """One precision for all cards, or for those that have it, while the others compute in fp32; and what that is called."""

    name: str
    precisions: dict[str, Precision]


def parse_choice(text: str, cards: Cards) -> PrecisionChoice:
    """`auto`, `fp16`, or `RTX 3090=bf16,p40=fp32` with the cards by their own names. InputError where one is not known."""
    given = parse_precision(text)
    if isinstance(given, dict):
        named = {cards.find(name): precision for name, precision in given.items()}
        if len(named) < len(given):
            raise InputError(f"--precision {shown(text)}: two of these names mean the same card")
        given = named
    return PlanOptions().changed({"precision": given}).precision or "auto"


def choose(choice: PrecisionChoice, profile: Profile, cluster: Cluster, cards: Mapping[str, Card]) -> dict[str, Precision]:
    """The precision of each card of the cluster; "auto" for those of which the choice says nothing. Empty where the profile does
    not say at which it was measured. InputError for a card that cannot compute at its precision."""
    kinds = list(cluster.device_types)
    given: dict[str, Precision] = {}
    if isinstance(choice, Mapping):
        given = dict(choice)
    elif choice != "auto":
        given = dict.fromkeys(kinds, choice)
    strange = [kind for kind in given if kind not in kinds]
    if strange:
        named = f"{strange[0]}={given[strange[0]]}"
        raise InputError(f"--precision {named}: no machine has a {strange[0]}. The cards are {', '.join(kinds)}")
    wrong = {kind: p for kind, p in given.items() if p not in (*cards[kind].precisions, *profile.precisions(kind))}
    if wrong:
        cannot = "; ".join(_cannot(card, cards[card], p) for card, p in wrong.items())
        able = ",".join(f"{card}={cards[card].precisions[-1]}" for card in wrong)
        raise InputError(f"--precision: {cannot}. Write --precision auto, or what these can compute in: --precision {able}")
    return turns_of(given, profile, cluster, others_auto=True)[0]


def turns(
    choice: PrecisionChoice, profile: Profile, chosen: Mapping[str, Precision], kinds: Sequence[str]
) -> list[dict[str, Precision]]:
    """With which precisions to plan for these cards, until a plan fits: the chosen ones, then others where none was asked for."""
    if isinstance(choice, str) and choice != "auto":
        return [dict(chosen)]
    asked = choice if isinstance(choice, Mapping) else {}
    return in_turn(profile, chosen, [kind for kind in kinds if kind in chosen and kind not in asked])


def _cannot(name: str, card: Card, precision: Precision) -> str:
    known = card.architecture or "taken to have no bf16, as its file of cards says no architecture"
    return f"{name} ({known}) cannot compute in {precision}, but in {' and '.join(card.precisions)}"


def singles(profile: Profile, kinds: Sequence[str]) -> list[Single]:
    """Each precision for all of these cards, of those that the profile holds; where some have no bf16, these at fp32."""
    held = {kind: profile.precisions(kind) for kind in kinds}
    found = []
    for precision in get_args(Precision):
        each: dict[str, Precision] = {kind: precision if precision in held[kind] else "fp32" for kind in kinds}
        if precision in each.values() and all(each[kind] in held[kind] for kind in kinds):
            everywhere = set(each.values()) == {precision}
            found.append(Single(f"{precision} for all" if everywhere else f"{precision}, else fp32", each))
    return found


def same_times(one: Profile, other: Profile, kinds: Sequence[str]) -> bool:
    """Whether two profiles, each at one precision of each card, say the same of these cards, but for what it is called."""

    def told(profile: Profile) -> dict[tuple[str, int], Measurement]:
        own = [m for m in profile.measurements if m.device_type in kinds]
        return {(m.device_type, m.tensor_parallel): m.model_copy(update={"precision": None}) for m in own}

    return told(one) == told(other)
