"""What ranks tell each other of their batches."""

from __future__ import annotations

import pytest
import torch

from hetpipe.runtime.checks.agreement import Statement, batch_mark


@pytest.mark.parametrize("batch", [torch.arange(12), torch.arange(36_000).reshape(12, -1).float(), torch.rand(12, 3, 5) < 0.5])
def test_a_mark_knows_the_order_of_a_batch(batch: torch.Tensor) -> None:
    assert batch_mark(batch) == batch_mark(batch.clone()) != batch_mark(batch.roll(1, 0))
    assert batch_mark((batch, batch)) != batch_mark(batch)
    assert batch_mark(batch.to("meta")) is None


def test_marks_in_sum_say_whether_all_are_equal() -> None:
    largest = 2**20 - 1

    def total(*marks: int) -> Statement:
        rows = [Statement([0.0], [0.0], shared=1.0, batch=float(mark), square=float(mark**2)) for mark in marks]
        return Statement.of([sum(column) for column in zip(*(row.numbers() for row in rows), strict=True)])

    assert not total(*[largest] * 4096).batches_differ
    assert not total(3).batches_differ
    assert total(*[largest] * 4095, largest - 1).batches_differ
    assert not Statement.empty(1).batches_differ
