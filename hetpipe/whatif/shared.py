"""Profiles that people share: what a layer costs, on which card, and nothing of the machine or of who measured it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hetpipe.files.messages import InputError
from hetpipe.files.writing import write_text
from hetpipe.spec.profile import Measurement, Profile
from hetpipe.whatif.cards import Card, simplified
from hetpipe.whatif.estimate import distance
from hetpipe.whatif.order import Timed, in_order

_KEPT = ("torch", "cuda", "repeats", "relative_spread")  # of the provenance: versions and numbers
_VERSION = re.compile(r"[0-9][\w.+-]{0,39}")


class TimesOrigin(NamedTuple):
    """Where a card's times are from: a card, what was measured on it, and how that is said."""

    card: str
    model: str
    text: str

    @property
    def measured(self) -> bool:
        """Whether nothing was scaled."""
        return self.text.startswith("measured")


def with_note(origin: TimesOrigin, how: str) -> TimesOrigin:
    """The origin, which says how its times were changed, too, if they were."""
    return origin._replace(text=f"{origin.text}; {how}") if how else origin


def without_private(profile: Profile, model: str) -> Profile:
    """What may be shown to anybody: bytes and seconds of layers, which are numbered, device types, and torch's version. Left out
    are nodes, links, the machine that emulated, the names of layers and tied parameters, and all other notes. `model` is
    what it is called."""
    groups = {tied: f"tied{i}" for i, tied in enumerate(dict.fromkeys(x.tied for x in profile.layers if x.tied is not None))}
    layers = tuple(
        layer.model_copy(update={"name": str(i), "tied": groups.get(layer.tied or "")}) for i, layer in enumerate(profile.layers)
    )
    notes = {
        key: value for key in _KEPT
        if isinstance(value := profile.provenance.get(key), int | float) or _VERSION.fullmatch(str(value or ""))
    }  # fmt: skip
    return Profile(
        format=profile.format,
        model=model,
        layers=layers,
        measurements=tuple(map(_rounded, profile.measurements)),
        optimizer=profile.optimizer,
        input_bytes_per_sample=profile.input_bytes_per_sample,
        provenance=notes,
    )


def share_profile(profile: Profile, model: str, path: Path) -> None:
    """Write what may be shown to anybody, as small JSON."""
    shown = without_private(profile, model).model_dump(mode="json", exclude_none=True)
    write_text(path, json.dumps(shown, separators=(",", ":")) + "\n")


def _rounded(m: Measurement) -> Measurement:
    def four(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(f"{t:.4g}") for t in times)

    rows = {name: tuple(map(four, getattr(m, name))) for name in ("forward_seconds", "backward_seconds")}
    return m.model_copy(update={**rows, "optimizer_seconds": four(m.optimizer_seconds)})


def with_cards(profile: Profile, wanted: Sequence[str], cards: Mapping[str, Card]) -> tuple[Profile, dict[str, TimesOrigin]]:
    """A shared profile on these cards: as measured, or scaled from the card with the nearest rates. What a layer computes is not
    known, so all of it is taken to grow as the worse of the two rates."""
    own = {simplified(m.device_type): m for m in profile.measurements if m.tensor_parallel == 1}
    by_card = {name: own[key] for name, card in cards.items() for key in map(simplified, (name, *card.aliases)) if key in own}
    if not by_card:
        kinds = ", ".join(sorted({m.device_type for m in profile.measurements}))
        raise InputError(
            f"the profile of {profile.model!r} was measured on {kinds}, of which none is a known card; describe one in a file "
            "for --cards"
        )
    found, origins = dict[str, Measurement](), dict[str, TimesOrigin]()
    for name in cards:
        if name in by_card:
            found[name], origins[name] = by_card[name], TimesOrigin(name, profile.model, "measured")
        else:
            near = min(by_card, key=lambda other: distance(cards[name], cards[other], by_card[other].precision or "fp32"))
            found[name] = by_card[near].slower(slower(cards[name], cards[near], by_card[near]))
            origins[name] = TimesOrigin(near, profile.model, f"scaled from {near} by data sheets (the worse of its two rates)")
    timed = {name: Timed(m.microbatch_sizes, m.forward, m.backward) for name, m in found.items()}
    precision = next(iter(by_card.values())).precision or "fp32"
    ordered = in_order(timed, by_card, cards, precision)
    rows = tuple(_with_times(found[name], name, ordered[name][0]) for name in wanted)
    told = {name: with_note(origins[name], ordered[name][1]) for name in wanted}
    return profile.model_copy(update={"measurements": rows, "links": ()}), told


def _with_times(m: Measurement, card: str, timed: Timed) -> Measurement:
    forward, backward = (tuple(map(tuple, times.tolist())) for times in timed[1:])
    rows = {"microbatch_sizes": timed.sizes, "forward_seconds": forward, "backward_seconds": backward}
    return m.model_copy(update={"device_type": card, **rows})


def slower(card: Card, other: Card, measured: Measurement) -> float:
    """How many times as long a card takes as the other, at most, by its FLOP/s and bytes/s."""
    precision = measured.precision or "fp32"
    return max(other.flops(precision) / card.flops(precision), other.bandwidth / card.bandwidth)
