"""Which pipelines fill a large cluster: a linear program over counts of compositions, and its dual as a proof.

**The bound.** For a step T, a micro-batch size b and plans of R_low to R_high replicas, let M_c be the most
micro-batches of composition c (`_columns`). A plan that ends within T uses y_c pipelines of composition c with

    Σ_c y_c c_k ≤ n_k for every class k,    Σ_c y_c ≤ R_high,    Σ_c y_c M_c ≥ ⌊B / b⌋.

Take any prices π, ρ ≥ 0, and let σ be the largest M_c / (π·c + ρ) of any pipeline: then ⌊B / b⌋ ≤ σ Σ_c y_c
(π·c + ρ) ≤ σ (π·n + ρ R_high). If the last is below ⌊B / b⌋, no plan of this size and these replica counts
ends within T. ∎ The prices come from the linear program's dual, but the proof is the inequality, computed
here for all short compositions and, by `_relaxed`, for all longer pipelines; so the solver's tolerance does
not matter. A remainder of the batch is left out, which only lowers the bound.

T is found by bisection, per micro-batch size and interval of R; the least over all of them bounds every plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._relaxed import Relaxed
from hetpipe.partitioners._space import Array, Counts

ROUNDS = 60
SLACK = 1 + 1e-9


class Relaxation(NamedTuple):
    """The linear program at one T: whether ⌊B / b⌋ micro-batches may be possible, and how many pipelines of which
    composition would do them."""

    possible: bool
    used: dict[Counts, float]


class Master:
    """The linear programs of one micro-batch size."""

    def __init__(self, columns: Columns, relaxed: Relaxed) -> None:
        self.columns, self.relaxed = columns, relaxed
        self.space, self.need = columns.space, columns.need
        self.devices = np.array(columns.comps, dtype=np.float64).reshape(-1, self.space.K)  # [C, K]

    def solve(self, T: float, R_low: int, R_high: int, *, longer: bool = True) -> Relaxation:
        """Solve, and make exact what it uses, until the answer is certain (or the rounds are over: possible).
        Without `longer` pipelines it is no proof, only a quick guess."""
        extra: list[tuple[Counts, int]] = []
        used: dict[Counts, float] = {}
        for _ in range(ROUNDS):
            most = self.columns.most(T, R_low)
            devices = np.vstack([self.devices, *[np.array(c)[None, :] for c, _ in extra]])
            capacity = np.concatenate([most, [float(m) for _, m in extra]])
            if not capacity.any() and not self.relaxed.possible:
                return Relaxation(False, {})
            y, prices, fixed = self._program(devices, capacity, R_high)
            used = {c: float(x) for c, x in zip(self.columns.comps, y, strict=False) if x > 1e-9}
            if float(capacity @ y) >= self.need:
                if not any(self.columns.refine(c, T, R_low) for c in used):
                    return Relaxation(True, used)
                continue
            total = float(prices @ np.array(self.space.counts)) + fixed * R_high
            cost = devices @ prices + fixed
            sigma = float((capacity / np.maximum(cost, 1e-300)).max())
            if not longer and sigma * total * SLACK < self.need:
                return Relaxation(False, used)
            reached, path = self.relaxed.best(
                T, R_low, prices, fixed, max(sigma, self.need / total / SLACK * (1 - 1e-12))
            )
            if max(sigma, reached) * total * SLACK < self.need:
                return Relaxation(False, used)
            if path is None or (path.comp, path.m) in extra or reached <= sigma * SLACK:
                return Relaxation(True, used)
            extra.append((path.comp, path.m))
        return Relaxation(True, used)

    def _program(self, devices: Array, capacity: Array, R_high: int) -> tuple[Array, Array, float]:
        """The counts, and the dual prices of devices and of replicas."""
        rows = np.vstack([devices.T, np.ones(len(capacity))])
        limits = np.array([*self.space.counts, R_high], dtype=np.float64)
        scale = max(1.0, float(capacity.max()))
        found = linprog(-capacity / scale, A_ub=rows, b_ub=limits, method="highs")
        if found.x is None:
            return np.zeros(len(capacity)), np.ones(self.space.K), 0.0
        duals = np.maximum(-np.asarray(found.ineqlin.marginals), 0.0) * scale
        return np.asarray(found.x), duals[:-1] + 1e-9, float(duals[-1])

    def least(
        self, low: float, high: float, R: tuple[int, int], accuracy: float, *, longer: bool = True
    ) -> float:
        """At most `accuracy` below the least possible T in [low, high]: no plan ends within what is returned, unless
        that is `low`. From above, in growing steps, then by bisection."""
        step = 1 + 4 * accuracy
        below = high / step
        while below > low and self.solve(below, *R, longer=longer).possible:
            high, step = below, step * step
            below = high / step
        below = max(low, below)
        while high > below * (1 + accuracy):
            middle = (below * high) ** 0.5
            if self.solve(middle, *R, longer=longer).possible:
                high = middle
            else:
                below = middle
        return below
