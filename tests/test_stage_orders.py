"""The order of devices with the shortest longest stage, against all orders and cuts."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from hetpipe.partitioners.pipelines.stage_orders import ORDER_TOLERANCE, best_order


@pytest.mark.parametrize("seed", range(20))
def test_no_order_has_a_shorter_longest_stage(seed: int) -> None:
    dice = np.random.default_rng(seed)
    V, L = 3, 7
    take = dice.integers(0, 3, V)
    take[0] += 1
    forward, backward = (np.hstack([np.zeros((V, 1)), np.cumsum(dice.uniform(0.1, 1, (V, L)), axis=1)]) for _ in range(2))
    tables = np.zeros((V, 6, L + 1, L + 1))
    tables[:, 0] = np.subtract.outer(-np.arange(L + 1.0), -np.arange(L + 1.0))  # a byte a layer
    limits, n = dice.integers(2, L + 1, V).astype(float), int(take.sum())

    def longest(line: tuple[int, ...]) -> float:
        best = np.inf
        for cuts in combinations(range(1, L), n - 1):
            parts = list(pairwise((0, *cuts, L)))
            if all(hi - lo <= limits[v] for v, (lo, hi) in zip(line, parts, strict=True)):
                own = [(x[v, hi] - x[v, lo]) for v, (lo, hi) in zip(line, parts, strict=True) for x in (forward + backward,)]
                best = min(best, max(own))
        return best

    every = set(permutations(np.repeat(np.arange(V), take).tolist()))
    least = min(longest(line) for line in every)
    found = best_order(take, forward, backward, np.ones(n, np.int64), 1, 1, False, tables, limits, 0.0, 1e3)
    if np.isinf(least):
        assert found[0] < 0
    else:
        assert np.bincount(found, minlength=V).tolist() == take.tolist()
        assert longest(tuple(found.tolist())) <= least * (1 + ORDER_TOLERANCE) + 1e-9
