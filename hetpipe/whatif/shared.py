"""Profiles that people share: what a layer costs, on which card, and nothing of the machine or of who measured it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hetpipe.documents.number_types import Precision
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError
from hetpipe.files.writing import write_text
from hetpipe.whatif.cards import Card, simplified
from hetpipe.whatif.estimate import distance
from hetpipe.whatif.order import Timed, in_order

_KEPT = ("torch", "cuda", "repeats", "relative_spread")  # of the provenance: versions and numbers
_VERSION = re.compile(r"[0-9][\w.+-]{0,39}")


class TimesOrigin(NamedTuple):
    """Where a card's times at a precision are from: a card, what was measured on it, and how that is said. `as_fp16`: they are
    those of fp16, taken for bf16, in which nobody measured."""

    card: str
    model: str
    text: str
    as_fp16: bool = False

    @property
    def measured(self) -> bool:
        """Whether nothing was scaled."""
        return self.text.startswith("measured")


Origins = Mapping[Precision | None, TimesOrigin]  # of a card, at each precision


def with_note(origin: TimesOrigin, how: str) -> TimesOrigin:
    """The origin, which says how its times were changed, too, if they were."""
    return origin._replace(text=f"{origin.text}; {how}") if how else origin


def for_bf16(origin: TimesOrigin) -> TimesOrigin:
    """The origin of times in fp16 that are taken for bf16, too: cards that have both compute in both at one rate."""
    return with_note(origin, "in fp16, taken for bf16")._replace(as_fp16=True)


def without_private(profile: Profile, model: str) -> Profile:
    """What may be shown to anybody: bytes and seconds of layers, which are numbered, device types, and torch's version. Left out
    are nodes, links, the machine that emulated, the names of layers and tied parameters, and all other notes. `model` is
    what it is called."""
    groups = {tied: f"tied{i}" for i, tied in enumerate(dict.fromkeys(x.tied for x in profile.layers if x.tied is not None))}
    layers = tuple(
        layer.model_copy(update={"name": str(i), "tied": groups.get(layer.tied or "")}) for i, layer in enumerate(profile.layers)
    )
    notes = {
        key: value
        for key in _KEPT
        if isinstance(value := profile.provenance.get(key), int | float) or _VERSION.fullmatch(str(value or ""))
    }
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


def with_cards(profile: Profile, wanted: Sequence[str], cards: Mapping[str, Card]) -> tuple[Profile, Mapping[str, Origins]]:
    """A shared profile on these cards, at each of its precisions that they have: as measured, or scaled from the card with the
    nearest rates. What a layer computes is not known, so all of it is taken to grow as the worse of the two rates."""
    measured = _by_precision(profile, cards)
    as_fp16 = _for_bf16(measured, cards)
    rows = dict[tuple[str, Precision | None], Measurement]()
    origins = {name: dict[Precision | None, TimesOrigin]() for name in wanted}
    for precision, by_card in measured.items():
        able = {name: card for name, card in cards.items() if name in by_card or precision in (None, *card.precisions)}
        found, told = _on_all(profile.model, by_card, able)
        for name in wanted:
            if name in found:
                rows[name, precision] = found[name]
                taken = precision == "bf16" and told[name].card in as_fp16
                origins[name][precision] = for_bf16(told[name]) if taken else told[name]
    for name in wanted:
        if not origins[name]:
            raise InputError(
                f"the profile of {profile.model!r} was measured only in {', '.join(map(str, measured))}, and a {name} "
                "cannot compute in that"
            )
    kept = tuple(rows[name, precision] for name in wanted for precision in origins[name])
    return profile.model_copy(update={"measurements": kept, "links": ()}), origins


def _by_precision(profile: Profile, cards: Mapping[str, Card]) -> dict[Precision | None, dict[str, Measurement]]:
    """At each precision the measurements of known cards. Those that do not say theirs count where there are no others."""
    keys = {simplified(name): key for key, card in cards.items() for name in (key, *card.aliases)}
    found = dict[Precision | None, dict[str, Measurement]]()
    for m in profile.measurements:
        key = keys.get(simplified(m.device_type))
        if m.tensor_parallel == 1 and key is not None:
            found.setdefault(m.precision, {})[key] = m
    if not found:
        kinds = ", ".join(sorted({m.device_type for m in profile.measurements}))
        raise InputError(
            f"the profile of {profile.model!r} was measured on {kinds}. None of these is a known card. Describe one in a file "
            "for --cards"
        )
    return {precision: by_card for precision, by_card in found.items() if precision is not None or len(found) == 1}


def _for_bf16(measured: dict[Precision | None, dict[str, Measurement]], cards: Mapping[str, Card]) -> set[str]:
    """Adds for bf16 what was measured in fp16 on cards that have both and were not measured in bf16, and says on which."""
    own = measured.get("bf16", {})
    added = {
        card: m.model_copy(update={"precision": "bf16"})
        for card, m in measured.get("fp16", {}).items()
        if "bf16" in cards[card].precisions and card not in own
    }
    if added:
        measured["bf16"] = {**own, **added}
    return set(added)


def _on_all(
    model: str, by_card: Mapping[str, Measurement], cards: Mapping[str, Card]
) -> tuple[dict[str, Measurement], dict[str, TimesOrigin]]:
    """The measurements of some cards, at one precision, on all cards."""
    precision = next(iter(by_card.values())).precision or "fp32"
    found, origins = dict[str, Measurement](), dict[str, TimesOrigin]()
    for name in cards:
        if name in by_card:
            found[name], origins[name] = by_card[name], TimesOrigin(name, model, "measured")
        else:
            near = min(by_card, key=lambda other: distance(cards[name], cards[other], precision))
            found[name] = by_card[near].slower(slower(cards[name], cards[near], by_card[near]))
            origins[name] = TimesOrigin(near, model, f"scaled from {near} by data sheets (the worse of its two rates)")
    timed = {name: Timed(m.microbatch_sizes, m.forward, m.backward) for name, m in found.items()}
    ordered = in_order(timed, by_card, cards, precision)
    return (
        {name: _with_times(found[name], name, timed) for name, (timed, _) in ordered.items()},
        {name: with_note(origins[name], how) for name, (_, how) in ordered.items()},
    )


def _with_times(m: Measurement, card: str, timed: Timed) -> Measurement:
    forward, backward = (tuple(map(tuple, times.tolist())) for times in timed[1:])
    rows = {"microbatch_sizes": timed.sizes, "forward_seconds": forward, "backward_seconds": backward}
    return m.model_copy(update={"device_type": card, **rows})


def slower(card: Card, other: Card, measured: Measurement) -> float:
    """How many times as long a card takes as the other, at most, by its FLOP/s and bytes/s."""
    precision = measured.precision or "fp32"
    return max(other.flops(precision) / card.flops(precision), other.bandwidth / card.bandwidth)
