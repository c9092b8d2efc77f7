"""Linear and integer programs are those of HiGHS through SciPy, also from the basis of others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hetpipe.planning.programs import Program
from tests.support.strategies import UNHURRIED


@settings(**UNHURRIED)
@given(seed=st.integers(0, 2**32 - 1), whole=st.booleans())
def test_one_after_the_other_they_cost_what_they_cost_alone(seed: int, whole: bool) -> None:
    dice = np.random.default_rng(seed)
    count, columns = dice.integers(1, 5), dice.integers(1, 7)
    rows, low = dice.integers(0, 4, (count, columns)), dice.integers(0, 9, count)
    high = np.where(dice.random(count) < 0.5, np.inf, low + dice.integers(0, 9, count))
    program = Program(rows, low, high, whole=whole)
    for _ in range(4):
        costs, most = dice.integers(-5, 6, columns), dice.integers(0, 6, columns)
        alone = milp(
            costs, constraints=LinearConstraint(rows, low, high), bounds=Bounds(0, most), integrality=np.full(columns, whole)
        )
        found = program.least(costs, most)
        assert (found is None) == (alone.x is None)
        if found is None:
            assert program.known
            continue
        assert found.cost == pytest.approx(alone.fun)
        assert costs @ found.x == pytest.approx(found.cost)
        assert (rows @ found.x >= low - 1e-6).all()
        assert (rows @ found.x <= high + 1e-6).all()


def test_prices_are_what_one_more_unit_of_a_limit_costs() -> None:
    """Most of 3 x + 2 y with x + y at most 4 and x at most 3."""
    found = Program([[1, 1], [1, 0]], -np.inf, [4, 3]).least([-3, -2])
    assert found is not None
    assert (found.cost, found.x.tolist(), found.prices.tolist()) == (-11, [3, 1], [-2, -1])
