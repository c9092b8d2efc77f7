"""FASOP's formula gives what FASOP published, and hetpipe's plans on its inputs are no slower than its own."""

from __future__ import annotations

import numpy as np
import pytest

from bench.fasop.fit import cluster_of, errors, fitted, plan_of
from bench.fasop.formula import backward_ends, sum_seconds, tied_seconds
from bench.fasop.published import GPT2_XL, T5, Model
from bench.fasop.run import compared


@pytest.mark.parametrize("model", [GPT2_XL, T5], ids=lambda model: model.name)
def test_the_formula_gives_the_published_estimates(model: Model) -> None:
    found = np.abs(errors(model, fitted(model)))
    assert found.max() < 0.02
    assert found.mean() < 0.006


def test_one_stage_takes_its_micro_batches_one_after_the_other_and_two_have_a_message_each_way() -> None:
    #   stage 0   F  a                b b b b b  B B       a forward of 1 s, a backward of 2 s,
    #   stage 1         F  B B                             a message of 1 s ahead and of 5 s back
    assert backward_ends(np.full((1, 4), 3.0), 0.0, 0.0).tolist() == [12]
    assert backward_ends(np.full((2, 1), 3.0), 1.0, 5.0).tolist() == [1 + 1 + 1 + 2 + 5 + 2, 1 + 1 + 1 + 2]


def test_sums_are_those_that_were_published_beside_the_pipeline() -> None:
    plan, cluster = plan_of(GPT2_XL, GPT2_XL.best), cluster_of(GPT2_XL.best.a100_node)
    assert sum_seconds(plan, GPT2_XL, cluster, kind="A10") == pytest.approx(0.003536946140229702)
    assert tied_seconds(plan, GPT2_XL, cluster) == pytest.approx(0.06432896107435226)
    assert tied_seconds(plan_of(T5, T5.best), T5, cluster_of(T5.best.a100_node)) == 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT2_XL, T5], ids=lambda model: model.name)
def test_hetpipes_plan_is_no_slower_than_fasops_in_the_simulator(model: Model) -> None:
    published, rule, own = compared(model, fitted(model), 60.0)
    assert own.simulated <= min(published.simulated, rule.simulated) * (1 + 1e-9)
