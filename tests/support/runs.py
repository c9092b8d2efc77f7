"""Jobs that are run to their end, and the same on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.reference import Truth, train_reference
from hetpipe.documents.job import Job
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank
from hetpipe.training.trainer import Trainer

ONE = [{"cuts": [6], "sizes": [6, 6]}]  # all of the model on one device


def trained(file: Path, *settings: str) -> TrainResult:
    job = Job.read(file, settings)
    job.check_files()
    result = run_everywhere(job, train_rank)
    assert isinstance(result, TrainResult)
    return result


def alone(file: Path, *settings: str) -> TrainResult:
    """In this process, the only rank."""
    try:
        result = Trainer(Job.read(file, settings)).run()
    finally:
        dist.destroy_process_group()
    assert result is not None
    return result


def reference(file: Path, *settings: str) -> Truth:
    return train_reference(Job.read(file, settings))


def assert_same(found: TrainResult, truth: TrainResult | Truth) -> None:
    assert len(found.losses) == len(truth.losses) > 0
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(truth.losses), rtol=0, atol=1e-9)
    assert (found.evaluation is None) == (truth.evaluation is None)
    if found.evaluation is not None and truth.evaluation is not None:
        assert found.evaluation.loss == pytest.approx(truth.evaluation.loss, abs=1e-9)
        assert (found.evaluation.metric, found.evaluation.weight) == (truth.evaluation.metric, truth.evaluation.weight)
