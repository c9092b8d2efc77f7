"""Which sizes batches are padded to in a run whose samples are of different lengths, and how often: what is measured of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from hetpipe.building.data import EpochSampler, Grouped, MapDataset, Ragged, fetch, size_for
from hetpipe.documents.job import TrainSection
from hetpipe.layers.model import ShapedBatch
from hetpipe.layers.numbers import as_type
from hetpipe.layers.trials.rows import ROWS

BATCHES = 1000  # of an epoch, from whose sizes their shares are known to a few percent


def shorter_batches(data: MapDataset, train: TrainSection) -> tuple[ShapedBatch, ...]:
    """Batches of other sizes than the largest, with the share of steps for which each stands; none where samples are all of one
    shape."""
    if not isinstance(data, Ragged):
        return ()
    shares = few_sizes(size_shares(data, train), data.sizes[-1])
    return tuple(_batch(data, size, share, train) for size, share in shares.items() if size < data.sizes[-1])


def size_shares(data: Ragged, train: TrainSection) -> dict[int, float]:
    """Size → the share of the steps of the first epoch, or of its beginning, whose batch is padded to it."""
    sampler = EpochSampler.of(data, train.global_batch, seed=train.seed)
    sizes = [size_for(data, numbers) for numbers in islice(sampler, BATCHES)]
    return {size: count / len(sizes) for size, count in Counter(s for s in sizes if s is not None).items()}


def few_sizes(shares: Mapping[int, float], largest: int) -> dict[int, float]:
    """Three sizes at most, the smallest, the one next to the mean and the largest of all, which stand for the others: the share
    of one between two of them is theirs, as its seconds are if they grow alike."""
    mean = sum(size * share for size, share in shares.items())
    chosen = sorted({min(shares), min(shares, key=lambda size: abs(size - mean)), largest})
    found = dict.fromkeys(chosen, 0.0)
    for size, share in shares.items():
        above = next(other for other in chosen if other >= size)
        below = max((other for other in chosen if other <= size), default=above)
        part = (size - below) / (above - below) if above > below else 0.0
        found[below] += share * (1 - part)
        found[above] += share * part
    return found


def _batch(data: Ragged, size: int, share: float, train: TrainSection) -> ShapedBatch:
    """A few of the longest samples that it holds, where samples have groups, of one."""
    numbers = ((data.lengths == size) if isinstance(data, Grouped) else (data.lengths <= size)).nonzero().flatten()
    longest = numbers[data.lengths[numbers].argsort(descending=True)[:ROWS]]
    inputs, targets = (as_type(x, train.dtype) for x in fetch(data, longest, train.seed, 0, size=size))
    return ShapedBatch(inputs, targets, share)
