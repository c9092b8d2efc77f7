"""The clusters: how fast their cards are and how much they hold, by one rule for all, from `hetpipe/whatif/cards.yaml`."""

from __future__ import annotations

from bench.throughput.clusters import Mix
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.predict.cost import Costs
from hetpipe.whatif.cards import known_cards

# Of each cluster the fastest card first, as CUDA counts them (CUDA_DEVICE_ORDER=FASTEST_FIRST).
CLUSTERS = (
    Mix("3090 + 3060", ({"3090": 1, "3060": 1},)),
    Mix("2×3090 + 1080 Ti", ({"3090": 2, "1080ti": 1},)),
    Mix("V100 + T4", ({"v100-16": 1, "t4": 1},)),
)
NAMES = [mix.name for mix in CLUSTERS]
SMALL, LARGE = "fits each card", "larger than each card"  # what the model is
HOLDS = {SMALL: (min, 1.5), LARGE: (max, 0.9)}  # the smallest, or largest, card holds so much of the model


def times(mix: Mix) -> dict[str, float]:
    """How long each card takes beside the fastest: by the rate of products in half precision, in which adapters train."""
    rates = {card: known_cards().cards[card].flops("fp16") for card in dict.fromkeys(mix.cards)}
    return {card: max(rates.values()) / rate for card, rate in rates.items()}


def memory(mix: Mix, case: str, profile: Profile, cluster: Cluster, batch: int) -> dict[str, int]:
    """Bytes of each card, which are to each other as they really are. The model is what one card takes, sample by sample, with
    recompute if it is LARGE."""
    kind, layers = cluster.devices[0].type, len(profile.layers)
    stage = Costs(profile, cluster).stage_memory(kind, 0, layers, samples=batch, recompute=case == LARGE)
    real = {card: known_cards().cards[card].memory for card in mix.cards}
    which, held = HOLDS[case]
    return {card: round(stage.peak((1,), 1) * held * size / which(real.values())) for card, size in real.items()}
