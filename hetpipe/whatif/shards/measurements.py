"""A profile with measurements of shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.number_types import Precision
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.transformer import NUMBER_BYTES, gpt_bytes
from hetpipe.whatif.adapters.profile import Adapted
from hetpipe.whatif.cards import Card
from hetpipe.whatif.models import NamedModel
from hetpipe.whatif.shards.rules import Layer
from hetpipe.whatif.shards.seconds import Stream, computing, with_sums

PARAMETER_BYTES = 4  # of a number, where all of a model trains


def shards(
    plain: Profile,
    model: NamedModel,
    layer: Layer,
    adapted: Adapted | None,
    tokens: int,
    cards: Mapping[str, Card],
    link: Link,
    degrees: Mapping[str, tuple[int, ...]],
) -> Iterator[Measurement]:
    """Measurements of shards, `plain` being the profile of whole layers that all train: for each card and number of cards, at
    each precision. All cards of a machine are joined by the link."""
    for whole in plain.measurements:
        precision, card = cast("Precision", whole.precision), cards[whole.device_type]
        number = PARAMETER_BYTES if adapted is None else adapted.stream_number(precision)
        stream = Stream(tokens * model.sizes.hidden, number, NUMBER_BYTES[precision])
        for degree in degrees.get(whole.device_type, ()):
            shard = computing(whole, degree, stream, card)
            if adapted is None:
                shard = _with_bytes(shard, model, layer, tokens, precision)
            else:
                shard = adapted.shard(degree).shard_measurement(shard, tokens, card)
            yield with_sums(shard, stream, link)


def _with_bytes(shard: Measurement, model: NamedModel, layer: Layer, tokens: int, precision: Precision) -> Measurement:
    """With its own bytes, where all of the model trains: embedding and head are whole."""
    sizes, degree = model.sizes, shard.tensor_parallel
    numbers = (sizes.embedding_parameters, *[layer.parameters(degree)] * sizes.layers, sizes.head_parameters)
    options = ImportOptions(
        model=model.name, hidden_size=sizes.hidden, sequence_length=tokens, number_bytes=NUMBER_BYTES[precision]
    )
    (first, *_, last), own = shard.saved_bytes_per_sample or (), gpt_bytes(3, options, degree).saved[1]
    return shard.model_copy(
        update={
            "parameter_bytes": tuple(PARAMETER_BYTES * count for count in numbers),
            "saved_bytes_per_sample": (first, *[own] * sizes.layers, last),
        }
    )


def whole(profile: Profile) -> Profile:
    """The profile without shards."""
    return _with_those(profile, [m for m in profile.measurements if m.tensor_parallel == 1])


def widest_first(profile: Profile, cluster: Cluster) -> list[Profile]:
    """Return what to plan with for a cluster: the profile with the shards that its nodes have cards for, and with whole layers
    only, which need no communicator for sums between shards."""
    most = {kind: max(node.devices.get(kind, 0) for node in cluster.nodes) for kind in cluster.device_types}
    wide = _with_those(profile, [m for m in profile.measurements if m.tensor_parallel <= max(1, most.get(m.device_type, 1))])
    plain = whole(wide)
    return [plain] if len(wide.measurements) == len(plain.measurements) else [wide, plain]


def _with_those(profile: Profile, kept: Sequence[Measurement]) -> Profile:
    return profile if len(kept) == len(profile.measurements) else profile.model_copy(update={"measurements": tuple(kept)})
