"""What a pipeline of so many samples takes at least, as the arrays of `_relaxed`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._relaxed import Load
from hetpipe.partitioners._space import allowed_families, measured_sizes
from hetpipe.partitioners._types import Types

Array = NDArray[np.float64]
Index = NDArray[np.int64]
MOST_LOADS = 400  # whose tables are kept


class Demand:
    """Of the pipelines of one problem."""

    def __init__(self, types: Types) -> None:
        self.types, self.problem, self.L = types, types.problem, types.L
        self.loads: dict[tuple[int, int, int], Load] = {}
        runtime = self.problem.cluster.runtime_overhead
        self.more, self.blocking = runtime.action_seconds, not runtime.overlap_transfers
        self.gpipe = allowed_families(self.problem) == ("gpipe",)
        self.sizes, large = list[int](), list[set[int]]()
        for b in measured_sizes(self.problem):  # with those of the whole batch or more it is one micro-batch
            there = set(self.usable(b).tolist())
            if there and (b < self.problem.global_batch or not any(there <= others for others in large)):
                self.sizes.append(b)
                large += [there] * (b >= self.problem.global_batch)

    @kept
    def usable(self, b: int) -> Index:
        """Kinds that were measured at b."""
        return np.array(
            [v for v, kind in enumerate(self.types.kinds) if b in self.types.sizes_of(kind)], dtype=np.int64
        )

    def load(self, b: int, low: int, high: int) -> Load:
        """As `_load`; the last so many are kept."""
        key = b, low, high
        if key not in self.loads:
            if len(self.loads) >= MOST_LOADS:
                self.loads.clear()
            self.loads[key] = self._load(*key)
        return self.loads[key]

    def _load(self, b: int, low: int, high: int) -> Load:
        """Pipelines of `low` to `high` samples in micro-batches of b: m = ⌊low / b⌋ full ones, and one of q = low mod b samples
        or more. The first forward is of b samples, or of q where m = 0; the last backward of q or more, and where `high` is not
        `low` and m > 0, of any number."""
        m, q = divmod(low, b)
        first = b if m else q
        last = first if not m else (q or b) if low == high else 1
        usable = self.usable(b)
        none = np.zeros((2, self.L))
        each = [
            [self.types.layer_times(v, size, b) if size else none for size in (b, q, first, last)]
            for v in usable.tolist()
        ]
        full, rest, begin, end = np.array(each).swapaxes(0, 1)  # [V, 2, L] each
        links = [self.types.transfer(size) for size in (first, last)]
        hops = [sum(link[where].sum(axis=0) for link in links) for where in (0, 1)]
        wires, actions = [np.zeros_like(hop) for hop in hops], 0
        for size, count in ((b, m), (q, 1)):
            for where, link in enumerate(self.types.transfer(size) if size and count else ()):
                wires[where] += count * (link.sum(axis=0) if self.blocking else link[0])
            actions += count if size else 0
        return Load(
            work=_before(m * full.sum(axis=1) + rest.sum(axis=1)), again=_before(m * full[:, 0] + rest[:, 0]),
            once=_before(begin[:, 0] + end[:, 1]), once_again=_before(end[:, 0]), ahead=_before(begin[:, 0]),
            work_more=2 * self.more * actions, once_more=2 * self.more,
            hop=hops[0], wire=wires[0], hop_inside=hops[1], wire_inside=wires[1],
            room=self._room(usable, min(b, low), low), b=b, samples=low,
        )  # fmt: skip

    def _room(self, usable: Index, largest: int, samples: int) -> Array:
        """The most samples in flight [2, V, L + 1, L + 1], without and with recompute. (A peak is a whole number of bytes,
        rounded.)"""
        found = np.full((2, len(usable), self.L + 1, self.L + 1), -np.inf)
        for i, v in enumerate(usable.tolist()):
            static, boundary, *plain_and_less = self.types.memory(v)
            limit = self.types.limit[self.types.at[v]] + 1.0
            for again in (0, 1) if self.problem.allow_recompute else (0,):
                held, transient = plain_and_less[2 * again : 2 * again + 2]
                with np.errstate(invalid="ignore"):
                    room = (limit - static - boundary * samples - transient * largest) / np.maximum(
                        held, 1e-9
                    )
                found[again, i] = np.where(np.isfinite(static), room, -np.inf)
        return found


def _before(rows: Array) -> Array:
    """Sums of all before each [V, L + 1]."""
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
