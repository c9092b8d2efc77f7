"""An answer as a table, in words, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.counted import CountedModel
from hetpipe.files.units import human_bytes, human_seconds, three_digits
from hetpipe.whatif.adapters.base import QUANTISED
from hetpipe.whatif.answer import Answer, AnswerRow, unsplit
from hetpipe.whatif.counted.text import counted_notes, counted_text
from hetpipe.whatif.models import NamedModel
from hetpipe.whatif.shipped import shipped_layers

TYPICAL, WORST = 0.18, 2.1  # what python -m bench.what_if.run prints


def answer_table(found: Answer) -> RenderableType:
    """What is asked, the rows, where each card's times are from, and what to know."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "cards", rate_name(found), "step", "peak GiB", "gap", "price"):
        left = name in ("", "cards", "peak GiB")
        rows.add_column(name, justify="left" if left else "right", no_wrap=name in ("tokens/s", "step", "gap"))
    for row in found.rows:
        rows.add_row(*map(Text, cells(row, found)))
    cards = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("card", "memory", "computes in", "its times"):
        cards.add_column(name)
    for card in found.origins:
        memory = human_bytes(found.question.cards[card].memory)
        cards.add_row(*map(Text, (card, memory, found.precisions.get(card, "–"), found.origin(card).text)))
    beside = [beside_table(found)] if any(row.plan is not None for row in found.beside) else []
    return Group(Text(headline(found)), rows, *beside, cards, *(Text(note, style="dim") for note in notes(found)))


def beside_table(found: Answer) -> Table:
    """The machines as they are, each card at its own precision and all at one: what the mixture is worth."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (f"{found.rows[0].name}, at", rate_name(found), "step", "of auto's"):
        table.add_column(name, justify="left" if name.endswith("at") else "right")
    auto = found.rows[0].found.step_seconds
    own = ", ".join(f"{card} {precision}" for card, precision in found.rows[0].precisions.items())
    for name, row in ((f"auto: {own}", found.rows[0]), *((row.name, row) for row in found.beside)):
        predicted = row.plan.predicted if row.plan is not None else None
        if predicted is None:
            table.add_row(*map(Text, (name, "–", "does not fit", "–")))
        else:
            share = "–" if isinf(auto) else f"{predicted.step_seconds / auto:.2f}"
            table.add_row(*map(Text, (name, rate_text(row, found), human_seconds(predicted.step_seconds), share)))
    return table


def rate_name(found: Answer) -> str:
    """What is counted in a second."""
    return "samples/s" if tokens_of(found) is None else "tokens/s"


def rate_text(row: AnswerRow, found: Answer) -> str:
    """So many in a second."""
    assert row.plan is not None
    assert row.plan.predicted is not None
    return three_digits(row.plan.predicted.samples_per_second * (tokens_of(found) or 1))


def cells(row: AnswerRow, found: Answer) -> list[str]:
    """A row of the table."""
    price = "" if not row.added else "?" if row.price is None else f"+{row.price:,.0f}"
    predicted = row.plan.predicted if row.plan is not None else None
    if predicted is None:
        return [row.name, row.cards, "–", "–", "does not fit", "–", price]
    gap = "–" if predicted.gap is None else f"{predicted.gap:.1%}"
    return [row.name, row.cards, rate_text(row, found), human_seconds(predicted.step_seconds), peaks_text(row, found), gap, price]


def peaks_text(row: AnswerRow, found: Answer) -> str:
    """For each kind of card the peak bytes of each, of what it has."""
    assert row.plan is not None
    assert row.plan.predicted is not None
    peaks: dict[str, list[str]] = {}
    for device in row.cluster.devices:
        peak = row.plan.predicted.peak_bytes.get(device.id)
        peaks.setdefault(device.type, []).append("unused" if peak is None else three_digits(peak / 2**30))
    limits = {kind: f" of {three_digits(found.question.cards[kind].memory / 2**30)}" for kind in peaks}
    return "\n".join(
        f"{kind} {', '.join(each)}{limits[kind]}" if set(each) != {"unused"} else f"{kind} unused" for kind, each in peaks.items()
    )


def tokens_of(found: Answer) -> int | None:
    """Tokens of a sample; None where they are not what is counted, or a shared profile does not say it."""
    return found.question.tokens if isinstance(found.question.model, NamedModel) else None


def headline(found: Answer) -> str:
    """What was asked, in a sentence."""
    question = found.question
    model = question.model
    if isinstance(model, Profile):
        return f"{model.model} (a shared profile of {len(model.layers)} layers), global batch {question.global_batch}"
    if isinstance(model, CountedModel):
        return f"{counted_text(model)}, global batch {question.global_batch}, precision {asked(found)}, {question.optimizer}"
    return (
        f"{model.name} ({sum_parameters(model) / 1e9:.3g} billion parameters, {model.sizes.layers} layers; {model.source}), "
        f"{question.tokens} tokens a sample, global batch {question.global_batch}, precision {asked(found)}, {question.optimizer}"
        f"{adapters_text(found)}"
    )


def adapters_text(found: Answer) -> str:
    """What of it trains, where that is adapters only."""
    adapted = found.question.adapted
    if adapted is None:
        return ""
    trained = adapted.trained * adapted.model.sizes.layers
    base = f"{adapted.built} as it is" if adapted.base == "as-is" else adapted.base
    return f", adapters {adapted.lora} ({trained / 1e6:.3g} million parameters) over a base in {base}"


def asked(found: Answer) -> str:
    """The precision as it was asked for."""
    choice = found.question.precision
    return choice if isinstance(choice, str) else ",".join(f"{card}={precision}" for card, precision in choice.items())


def sum_parameters(model: NamedModel) -> float:
    """Parameters of the model, without adapters."""
    return model.sizes.layers * model.sizes.layer_parameters + model.sizes.embedding_parameters + model.sizes.head_parameters


def notes(found: Answer) -> Iterator[str]:
    """What one has to know to believe the numbers as far as they deserve it."""
    question = found.question
    for row in found.rows:
        if row.plan is None:
            yield f"{row.name}: {row.found.reason}"
            continue
        if row.unfit:
            other = ", ".join(f"{card} in {p}" for card, p in row.precisions.items() if p != found.precisions.get(card))
            yield f"{row.name}: fits with {other}, which takes less memory, and not at what is fastest"
        yield from (f"{row.name}: {split}" for split in splits(row))
        if any(device.id not in row.plan.device_ids for device in row.cluster.devices):
            yield f"{row.name}: the plan is faster without the cards that are marked unused"
    if found.rows[0].plan is None:
        yield cheapest_text(found)
    link = f"links between cards are taken to carry {question.link.peak / 1e9:.3g} GB/s (--link)"
    yield f"Nothing was run: all rates and peaks are simulated from the times above; {link}."
    scaled = [card for card in found.origins if not found.origin(card).measured]
    if scaled:
        yield (
            f"Scaled times ({', '.join(scaled)}) are estimates: where they can be checked, half of the cards are off by more "
            f"than {TYPICAL:.0%}, and the worst is by a factor of {WORST}."
        )
    as_fp16 = [card for card in found.origins if any(origin.as_fp16 for origin in found.origins[card].values())]
    if as_fp16:
        yield f"Nobody measured bf16 on {', '.join(as_fp16)}: it is taken to be as fast as fp16, which has the same rate there."
    yield from _held_notes(found)
    yield from _split_notes(found)
    if any(row.price is not None for row in found.rows):
        yield "Prices are of the added cards: yours (--price), else what the maker asked in US dollars when the card came out."
    if not isinstance(question.model, Profile):
        yield f"Measured by {shipped_layers().source}."


def _held_notes(found: Answer) -> Iterator[str]:
    """How numbers are held."""
    question = found.question
    if isinstance(question.model, CountedModel):
        yield from counted_notes(question.model)
    if question.adapted is not None:
        yield (
            "Adapters, their gradients and optimizer have 4 bytes a number. The base has no gradients, takes as long backward as "
            "forward, and is float32 on cards that compute in fp32, unless it is quantised."
        )
        if any(question.adapted.copied(precision) for precision in found.precisions.values()):
            yield (
                "A base in float32 has copies of its matrices in half precision, which are counted once; autocast keeps them for "
                "each micro-batch in flight. With --base bf16 there are none."
            )
        if question.base in QUANTISED:
            yield (
                f"Before each product its matrix is made of {question.base}, which takes the bytes that it moves over the card's "
                "bandwidth, in forward and again in backward, and the memory of one matrix."
            )
    elif {*found.precisions.values()} & {"fp16", "bf16"} and isinstance(question.model, NamedModel):
        yield "fp16 and bf16 are automatic mixed precision: parameters, gradients and optimizer of 4 bytes a number."


def splits(row: AnswerRow) -> list[str]:
    """Which layers are split over which cards, in words."""
    stages = [stage for replica in row.plan.replicas for stage in replica.stages] if row.plan is not None else []
    return [
        f"the stage of layers {stage.layers[0]} to {stage.layers[1] - 1} is split over "
        f"{len(stage.devices)} × {row.cluster.device(stage.devices[0]).type} ({', '.join(stage.devices)})"
        for stage in stages
        if len(stage.devices) > 1
    ]


def _split_notes(found: Answer) -> Iterator[str]:
    """How the times of split layers are made, or why there are none where several cards could split layers."""
    reason = unsplit(found.question)
    if any(map(splits, found.rows)):
        yield (
            "Times of split layers are computed and not measured: of so many cards each takes its part of the products and all "
            "of the norms, and each layer has four sums between the cards over --link."
        )
    elif reason is not None and found.question.pairs:
        yield f"Each layer is whole on one card: {reason}."


def cheapest_text(found: Answer) -> str:
    """Which card to buy, where the machines as they are do not hold the model."""
    if found.cheapest is None:
        return "No single card with a price would make it fit; --add tries several, and --price says what others cost."
    price, sheet = found.question.price(found.cheapest), found.question.cards[found.cheapest]
    return f"The cheapest card that would make it fit is a {found.cheapest} ({human_bytes(sheet.memory)}), for {price:,.0f}."


def as_json(found: Answer) -> dict[str, Any]:
    """The answer for scripts, in SI units."""
    question = found.question
    return {
        "model": found.profile.model,
        "global_batch": question.global_batch,
        "tokens_per_sample": tokens_of(found),
        "precision": question.precision,
        "adapters": _adapters(found),
        "cheapest_card": found.cheapest,
        "cards": {card: _card(card, found) for card in found.origins},
        "rows": [_row(row, found) for row in found.rows],
        "single_precisions": [_row(row, found) for row in found.beside],
        "notes": list(notes(found)),
    }


def _adapters(found: Answer) -> dict[str, Any] | None:
    adapted = found.question.adapted
    if adapted is None:
        return None
    trained = adapted.trained * adapted.model.sizes.layers
    return {"r": adapted.lora.r, "targets": [m.name for m in adapted.targets], "base": adapted.base, "parameters": trained}


def _card(card: str, found: Answer) -> dict[str, Any]:
    origin, sheet = found.origin(card), found.question.cards[card]
    return {
        "precision": found.precisions.get(card),
        "measured": origin.measured,
        "from_card": origin.card,
        "from_model": origin.model,
        "how": origin.text,
        "precisions": {precision or "not said": each.text for precision, each in found.origins[card].items()},
        "memory_bytes": sheet.memory,
        "source": sheet.source,
    }


def _row(row: AnswerRow, found: Answer) -> dict[str, Any]:
    predicted = row.plan.predicted if row.plan is not None else None
    tokens = tokens_of(found)
    rate = predicted.samples_per_second if predicted is not None else None
    return {
        "name": row.name,
        "machines": [list(machine) for machine in row.machines if machine],
        "added": list(row.added),
        "price": row.price,
        "precision": dict(row.precisions) or None,
        "samples_per_second": rate,
        "tokens_per_second": rate * tokens if rate is not None and tokens is not None else None,
        "step_seconds": predicted.step_seconds if predicted is not None else None,
        "gap": predicted.gap if predicted is not None else None,
        "peak_bytes": dict(predicted.peak_bytes) if predicted is not None else None,
        "reason": row.found.reason or None,
        "plan": row.plan.model_dump(mode="json", exclude_none=True) if row.plan is not None else None,
    }
