"""What all stages that there could be need in memory, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._appraisal import Appraiser
from hetpipe.partitioners._drafts import Index
from hetpipe.partitioners._kept import kept

Array = NDArray[np.float64]


class StageMemories:
    """Of one problem; types by their numbers."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser = appraiser

    @kept
    def reach(self, kind: int, recompute: bool, samples: int, window: int, largest: int) -> Index:
        """For each first layer where the longest stage ends that fits (where it begins if none does), with so many samples of a
        step, at most `window` in flight, `largest` in one micro-batch [L + 1]."""
        static, boundary, held, transient = self._bytes(kind, recompute)
        needed = np.round(static + boundary * samples + held * window + transient * largest)
        short = needed > self.appraiser.limits[kind]
        L = self.appraiser.L
        places = np.arange(L + 1)
        first = np.where(short & (places > places[:, None]), places, L + 1).min(axis=1)
        found: Index = np.maximum(first - 1, places)
        return found

    @kept
    def _bytes(self, kind: int, recompute: bool) -> Array:
        """Bytes of layers [lo, hi): static, for each sample of the step, in flight, and of a micro-batch [4, L + 1, L + 1]."""
        L, costs, name = self.appraiser.L, self.appraiser.costs, self.appraiser.types[kind]
        found = np.zeros((4, L + 1, L + 1))
        for lo in range(L):
            for hi in range(lo + 1, L + 1):
                memory = costs.stage_memory(name, lo, hi, samples=1, recompute=recompute)
                found[:, lo, hi] = memory.static, memory.boundary, memory.held_per_sample, memory.transient_per_sample
        return found
