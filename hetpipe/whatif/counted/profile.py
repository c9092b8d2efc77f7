"""The profile of a model whose layers were counted.

A layer takes what it would at the full rates of a card, FLOPs / (FLOP/s) + bytes moved / (bytes/s), times what a measured layer
of a language model takes there more than at full rates (see `estimate`): that of as many tokens, with products of as many FLOPs
as the layer with the most. Moved are parameters (read forward and backward, and the gradients of those that train, which are
written and read), what is saved (five times, as in `estimate`: twice forward, three times backward), and matrices that are made
of quantised ones (written and read, both ways)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpipe.documents.clusters.assumed import CONTEXT_BYTES, CUBLAS_BYTES
from hetpipe.documents.number_types import Precision
from hetpipe.documents.profile import LayerProfile, OptimizerProfile, Profile
from hetpipe.documents.profiles.counted import CountedLayer, CountedModel
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.exchange.importers.transformer import Cell
from hetpipe.hf.sizes import TransformerSizes
from hetpipe.whatif.cards import Card
from hetpipe.whatif.counted.cells import cells_of
from hetpipe.whatif.estimate import PASSES, ideal_seconds
from hetpipe.whatif.models import NamedModel
from hetpipe.whatif.shared import Origins

FORWARD_PASSES = 2  # of those over what is saved


def counted_profile(
    model: CountedModel, kinds: Sequence[str], cards: Mapping[str, Card], state: float
) -> tuple[Profile, Mapping[str, Origins]]:
    """The model on these kinds of cards, at each precision that they have, and where their times are from. `state`: bytes of the
    optimizer's state for each of parameters that train."""
    sizes = TransformerSizes(model.width, 1, max(1, round(model.flops / (2 * model.tokens))), 0, 0)
    found = cells_of(NamedModel(model.name, "llama", sizes, 1, model.source), model.tokens, cards)
    keys = [(card, precision) for card in kinds for precision in cards[card].precisions]
    least = model.layers["bf16"]
    profile = Profile(
        format="hetpipe.profile/1",
        model=model.name,
        layers=tuple(
            LayerProfile(
                name=one.name,
                parameter_bytes=one.parameters,
                trained_bytes=one.trained,
                buffer_bytes=one.buffers,
                saved_bytes_per_sample=one.saved,
                first_saved_bytes_per_sample=one.first_saved,
                output_bytes_per_sample=one.output,
            )
            for one in least
        ),
        measurements=tuple(
            _measurement(model, sizes, card, precision, found[card, precision].cell, cards[card]) for card, precision in keys
        ),
        optimizer=OptimizerProfile(state_bytes_per_parameter_byte=state),
        input_bytes_per_sample=model.input_bytes,
        provenance={"source": model.source},
    )
    return profile, {card: {p: found[card, p].origin for p in cards[card].precisions} for card in kinds}


def with_made(profile: Profile, model: CountedModel) -> Profile:
    """The profile with the largest matrix that a card makes of a quantised one, beside what the framework is assumed to take of
    it; of each card in the widest type in which the profile has it."""
    overheads = list[DeviceOverhead]()
    for kind in dict.fromkeys(m.device_type for m in profile.measurements):
        most = max((one.largest_made for p in profile.precisions(kind) if p is not None for one in model.layers[p]), default=0)
        if most:
            overheads.append(DeviceOverhead(device_type=kind, device_bytes=CONTEXT_BYTES + CUBLAS_BYTES + most))
    return profile.model_copy(update={"overheads": tuple(overheads)})


def _measurement(
    model: CountedModel, sizes: TransformerSizes, name: str, precision: Precision, cell: Cell, card: Card
) -> Measurement:
    """Of one card. What a layer holds there more than in half precision stands with the copies that autocast keeps: a profile has
    bytes of parameters for all cards alike."""
    own, least = model.layers[precision], model.layers["bf16"]
    forward, backward = list[tuple[float, ...]](), list[tuple[float, ...]]()
    for size, f, b in zip(*cell, strict=True):
        slower = (f + b) / ideal_seconds(sizes, model.tokens, size, card, precision)
        forward.append(tuple(slower * _forward(one, size, card, precision) for one in own))
        backward.append(tuple(slower * _backward(one, size, card, precision) for one in own))
    return Measurement(
        device_type=name,
        precision=precision,
        microbatch_sizes=cell.sizes,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        optimizer_seconds=(0.0,) * len(own),
        saved_bytes_per_sample=tuple(one.saved for one in own),
        first_saved_bytes_per_sample=tuple(one.first_saved for one in own),
        output_bytes_per_sample=tuple(one.output for one in own),
        cast_bytes=tuple(one.cast + one.parameters - low.parameters for one, low in zip(own, least, strict=True)),
    )


def _forward(one: CountedLayer, size: int, card: Card, precision: Precision) -> float:
    moved = one.parameters + one.buffers + 2 * one.made + size * FORWARD_PASSES * one.saved
    return size * one.forward / card.flops(precision) + moved / card.bandwidth


def _backward(one: CountedLayer, size: int, card: Card, precision: Precision) -> float:
    if not one.backward:
        return 0.0
    moved = one.parameters + one.buffers + 2 * one.made + 2 * one.trained + size * (PASSES - FORWARD_PASSES) * one.saved
    return size * one.backward / card.flops(precision) + moved / card.bandwidth
