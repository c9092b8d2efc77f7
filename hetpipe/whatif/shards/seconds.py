"""How long one of several cards takes for its shard of a layer.

Matrix products, attention, and what is made of parts of their results take a part of the whole layer's seconds: a product of
half a matrix is taken to reach as much of a card's rate as one of all of it. Norms and the sums of the residual stream are done
by each card in full. These are 10 of the 34 bytes that a token and hidden number leaves for backward in half precision
(Korthikanti et al. 2022, section 4.1), that is 5 numbers, each of which is written and read in forward, and read, and its
gradient written and read, in backward, as `estimate` counts it.

Each layer has two sums over the cards in forward, of what leaves its two blocks, and two in backward, of the gradients of what
enters them (Shoeybi et al. 2019, section 3), each by a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetpipe.documents.cluster import Link
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.predict.cost import ring_seconds
from hetpipe.whatif.cards import Card

KEPT = 5  # numbers that norms and residual sums keep for each token and hidden number
WRITTEN, BACK = 2, 3  # how often each is moved, in forward and in backward
SUMS = 2  # of a layer, each way


class Stream(NamedTuple):
    """What of one sample goes through layers: numbers, the bytes of each between layers, and as products give it."""

    numbers: int
    number_bytes: int
    product_bytes: int


def computing(whole: Measurement, degree: int, stream: Stream, card: Card) -> Measurement:
    """A whole layer's measurement as that of a shard, without sums. Embedding and head are whole on each card."""

    def part(rows: Sequence[Sequence[float]], moved: int) -> tuple[tuple[float, ...], ...]:
        each = moved * KEPT * stream.numbers * stream.number_bytes / card.bandwidth  # of a sample
        kept = zip(whole.microbatch_sizes, rows, strict=True)
        return tuple((row[0], *(_part(t, size * each, degree) for t in row[1:-1]), row[-1]) for size, row in kept)

    return whole.model_copy(
        update={
            "tensor_parallel": degree,
            "forward_seconds": part(whole.forward_seconds, WRITTEN),
            "backward_seconds": part(whole.backward_seconds, BACK),
        }
    )


def _part(seconds: float, alike: float, degree: int) -> float:
    """Of the seconds of a layer those of a shard; `alike` of them each card takes."""
    alike = min(alike, seconds)
    return alike + (seconds - alike) / degree


def with_sums(shard: Measurement, stream: Stream, link: Link) -> Measurement:
    """The measurement of a shard with the sums over a link between its cards."""
    degree = shard.tensor_parallel

    def longer(rows: Sequence[Sequence[float]], number_bytes: int) -> tuple[tuple[float, ...], ...]:
        sums = [SUMS * ring_seconds([link], degree, b * stream.numbers * number_bytes) for b in shard.microbatch_sizes]
        return tuple((row[0], *(t + more for t in row[1:-1]), row[-1]) for row, more in zip(rows, sums, strict=True))

    return shard.model_copy(
        update={
            "forward_seconds": longer(shard.forward_seconds, stream.product_bytes),
            "backward_seconds": longer(shard.backward_seconds, stream.number_bytes),
        }
    )
